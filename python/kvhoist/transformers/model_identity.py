"""What a model's KV depends on, as something to digest. Needs torch, and no engine."""

from __future__ import annotations

import hashlib
from typing import Any, Iterable, Iterator

import torch

from .._ropes import LONG_ROPE, settings_of
from .._values import config_error

#: Settings of a model that change no KV.
_NO_MATTER = frozenset(
    "_name_or_path _commit_hash transformers_version use_cache return_dict output_hidden_states "
    "output_attentions".split()
)

#: Kinds of rope whose angles depend on how long the sequence is, so that one token has several KVs.
_ROPE_BY_LENGTH = LONG_ROPE | {"dynamic"}

#: Settings of attention that chooses among all tokens, later ones too, where the sequence is longer than they say.
_CHOICE_BY_LENGTH = frozenset({"keep_window_size"})

#: What a layer of peft's calls the module that it adapts.
_ADAPTED = frozenset({"base_layer", "original_module", "model"})

#: 8-byte words that are digested at a time.
_WORDS = 1 << 22

#: Odd constants of splitmix64 and murmur3, as signed numbers.
_MIX = ((-7046029254386353131, -4658895280553007687), (-49064778989728563, -4265267296055464877))


def refuse_kv_by_length(config: Any) -> None:
    """Raises ConfigError for a model whose KV depends on the length of the sequence that it is computed in."""
    for name, value in settings_of(config.to_dict()):
        if name in ("rope_type", "type") and isinstance(value, str) and value in _ROPE_BY_LENGTH:
            expected = "a rope whose angles do not depend on the sequence's length: no stored key fits another length"
            raise config_error("rope_type", value, expected)
        if name in _CHOICE_BY_LENGTH and value is not None:
            expected = "attention that depends on the tokens before only: in longer prompts it depends on those behind"
            raise config_error(name, value, expected)


def model_identity(model: Any, revision: str | None) -> dict[str, Any]:
    """All that a model's KV depends on beside tokens: settings, weights, adapters, and the kernels of its attention.

    The weights count by their bytes, or, with `revision`, by the name that the caller vouches for. Those of adapters
    count by their bytes always.
    """
    config = model.config
    settings = {name: value for name, value in config.to_dict().items() if name not in _NO_MATTER}
    identity: dict[str, Any] = {
        "class": type(model).__name__,
        "config": settings,
        "attention": getattr(config, "_attn_implementation", None),
        "dtypes": sorted({str(one.dtype) for one in model.parameters()}),
        "adapters": [
            list(map(str, (name, *state)))
            for name, module in model.named_modules()
            if (state := adapter_state(module)) is not None
        ],
        "device": sorted({one.device.type for one in model.parameters()}),
    }
    if revision is None:
        identity["weights"] = weights_digest(_tensors(model))
    else:
        if adapters := dict(_adapter_tensors(model)):
            identity["adapter_weights"] = weights_digest(adapters.items())
        commit = getattr(config, "_commit_hash", None)
        identity["revision"] = [getattr(config, "_name_or_path", ""), commit, revision]
    return identity


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of the bytes of parameters and buffers. Reads each once, where it lies."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors):
        try:
            sums = _sums(tensor)
        except (RuntimeError, NotImplementedError) as error:
            expected = f"what tells these weights from others: {name} cannot be digested ({error})"
            raise config_error("revision", None, expected) from error
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {sums}\n".encode())
    return digest.hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _sums(tensor: torch.Tensor) -> list[int]:
    """Two sums over all words of a tensor, each word mixed with its place."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 8 or data.data_ptr() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).clone()
    words = data.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _WORDS):
        some = words[start : start + _WORDS]
        places = torch.arange(start + 1, start + 1 + some.numel(), device=words.device)
        for n, (spread, mix) in enumerate(_MIX):
            mixed = (some ^ (places * spread)) * mix
            sums[n] += ((mixed ^ (mixed >> 29)) * spread).sum()
    return sums.tolist()


def adapter_state(module: Any) -> tuple | None:
    """Of a layer of peft's: the adapters that are at work, and how much they count."""
    active, disabled = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
    if active is None or disabled is None or callable(active):
        return None
    merged = getattr(module, "merged_adapters", None) or getattr(module, "merged", False)
    return str(active), disabled, str(merged), str(getattr(module, "scaling", None))


def _adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that layers of peft's add to what they adapt."""
    for name, module in model.named_modules():
        if adapter_state(module) is not None or type(module).__module__.startswith("peft."):
            for inner, tensor in _tensors(module):
                if inner.split(".")[0] not in _ADAPTED:
                    yield f"{name}.{inner}", tensor


def refuse_uncounted_changes(model: Any) -> None:
    """Refuses weights that count no writes, so that a change would go unnoticed."""
    if any(one.is_inference() for _, one in _tensors(model)):
        expected = "weights whose changes PyTorch counts: load the model outside of torch.inference_mode()"
        raise config_error("model", "weights made under torch.inference_mode()", expected)
