"""Prompts whose KV outlives the process, for Hugging Face transformers.

    prefixes = kvhoist.transformers.PrefixCache(model, "/mnt/nvme/kv", capacity="200GiB")
    output = model.generate(**inputs, past_key_values=prefixes(**inputs))

`docs/transformers.md` has what is supported and what is refused.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Mapping, Sequence

import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from .. import errors
from .._stores import Place
from .._values import config_error
from .._versions import supported
from ..cache import _paths
from .model_identity import model_identity, refuse_kv_by_length, refuse_uncounted_changes
from .model_state import ModelState, refuse_last_positions
from .probe import probe
from .prompt_record import Known, PromptRecord, cache_of, inputs_of
from .store import PrefixStore, block_tokens_of, chain, staging_device

__all__ = ["PrefixCache"]

logger = logging.getLogger(__name__)

#: Changes whenever stored blocks would be read differently. A store of the format before may have the recurrent states
#: of a part of a prompt under the key of the whole.
FORMAT = "transformers-v2"

_supported = supported(transformers, "kvhoist.transformers")
_supported.check()


class _Prefixed:
    """What the caches of a `PrefixCache` have beside those of transformers: a record of their tokens."""

    record: PromptRecord

    @property
    def prefix_length(self) -> int:
        """Columns of `input_ids`, padding included, that are there: the model computes the others."""
        return self.record.prepared

    @property
    def loaded_length(self) -> int:
        """Those of them that were loaded. The others were computed by the call: the last whole block of a hybrid."""
        return self.record.loaded

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # noqa: ANN001, ANN201
        self.record.arrive(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]
        if not torch.compiler.is_compiling():
            self.record.seen(layer_idx, keys, values)
        return keys, values

    # Rows that are no longer what was recorded.

    def _changes(self, why: str) -> None:
        self.record.arrive_all()
        self.record.forget(why)

    def reorder_cache(self, *args: Any) -> None:
        self._changes("its rows were reordered")
        super().reorder_cache(*args)  # type: ignore[misc]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._changes("tokens were removed from it")
        super().crop(*args, **kwargs)  # type: ignore[misc]

    def batch_repeat_interleave(self, *args: Any) -> None:
        self._changes("its rows were repeated")
        super().batch_repeat_interleave(*args)  # type: ignore[misc]

    def batch_select_indices(self, *args: Any) -> None:
        self._changes("rows were selected")
        super().batch_select_indices(*args)  # type: ignore[misc]

    def reset(self) -> None:
        self._changes("it was reset")
        super().reset()  # type: ignore[misc]


class _DynamicPrefixCache(_Prefixed, DynamicCache):
    """A `DynamicCache` that begins with what was loaded."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)  # type: ignore[call-arg]


class _StaticPrefixCache(_Prefixed, StaticCache):
    """A `StaticCache` that begins with what was loaded."""

    def __init__(self, config: Any, max_cache_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)  # type: ignore[call-arg]


class PrefixCache:
    """The KV of a model's prompts on disk, in blocks of tokens.

    Called with `input_ids`, and their `attention_mask` if they have padding on the left, it returns a cache for
    `generate` or `forward` that has the longest stored prefix in its layers; whole blocks that the model then computes
    with it are stored. The last token is never loaded: its logits must be computed. With `max_length` the cache is a
    `StaticCache` of so many tokens.

    ``path`` is a directory, or a list of them, one for each drive; None is host memory only. ``capacity`` and
    ``host_bytes`` are bytes on disk and in host memory. ``revision`` names the weights; without it their bytes are
    digested, once, here. ``settings`` are those of `kvhoist.Cache`.

    One model, one process. Raises ConfigError for a model that cannot be cached, with the reason.
    """

    def __init__(
        self,
        model: Any,
        path: Any,
        *,
        capacity: int | str | None = None,
        host_bytes: int | str = "1GiB",
        block_tokens: int = 64,
        revision: str | None = None,
        **settings: Any,
    ) -> None:
        _supported.warn()
        if revision is not None and (not isinstance(revision, str) or not revision):
            raise config_error("revision", revision, "a name that tells these weights from others")
        if path is None and capacity is not None or path is not None and capacity is None:
            raise config_error("capacity", capacity, "bytes on disk beside a path, and none without")
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.block_tokens = block_tokens_of(block_tokens)
        refuse_kv_by_length(self.model.config)
        refuse_uncounted_changes(self.model)
        refuse_last_positions(self.model)
        self._config = self.model.config.get_text_config(decoder=True)
        groups, devices = probe(self.model, self._config, self.block_tokens)
        identity = model_identity(self.model, revision)
        layout = {
            "format": FORMAT, "block_tokens": block_tokens, "transformers": _supported.layout(),
            "groups": list(map(repr, groups)),
        }  # fmt: skip
        name = str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)
        place = Place(os.path.basename(name.rstrip("/")), "transformers", {**identity, **layout})
        settings = {"write_policy": "write_back", **settings}
        device = staging_device(set(devices.values()), settings)
        sizes = {"host_bytes": host_bytes} if path is None else {"host_bytes": host_bytes, "capacity": capacity}
        paths = None if path is None else _paths(path)
        self.store = PrefixStore(groups, self.block_tokens, place, paths, device, devices, sizes, settings)
        self._state = ModelState(self.model)
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, with_kwargs=True),
            # Also where it is called by itself.
            self.model.get_decoder().register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            self.model.get_decoder().register_forward_hook(self._after_decoder, with_kwargs=True),
        ]

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stores what is not written yet, and takes the hooks from the model. Again: with the same result."""
        for hook in self._hooks:
            hook.remove()
        self.store.close()

    # A prompt

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_length: int | None = None,
        layerwise: bool = False,
        **more: Any,
    ) -> Cache:
        """A cache for these prompts. `more` are the further inputs of the model: none that changes KV is allowed.

        With `layerwise` the layers may arrive while the model computes with it: before that, nothing but the model may
        look at them. A forward then raises CopyError if a block did not arrive.
        """
        if unknown := sorted(name for name, value in more.items() if value is not None):
            raise errors.ArgumentError(f"{unknown[0]}: found a value, expected tokens only: a key does not tell it")
        if (found := self._state.change()) is not None:
            raise errors.ArgumentError(f"model: found {found}, expected those of the start; make another PrefixCache")
        known = Known.of(input_ids, attention_mask)
        for row in known.rows:
            chain(row.tokens, self.block_tokens, row.keys)
        cache: Any = _DynamicPrefixCache(self._config)
        if max_length is not None:
            if max_length < input_ids.shape[1]:
                expected = f"at least the prompt's {input_ids.shape[1]} tokens, and room for those that follow"
                raise errors.ArgumentError(f"max_length: found {max_length}, expected {expected}")
            cache = _StaticPrefixCache(self._config, max_length)
        cache.record = PromptRecord(cache, self.store, known, self._state)
        # What generate would give beside a static cache: masks that cannot be told from a caller's own.
        opaque = max_length is not None and getattr(self._config, "_attn_implementation", None) == "flex_attention"
        autocast = torch.is_autocast_enabled(input_ids.device.type)
        if self._state.passing() is None and not opaque and not autocast:
            cache.record.load(layerwise)
            cache.record.prepare(self.model, input_ids)
        return cache

    def _record(self, inputs: Mapping[str, Any]) -> PromptRecord | None:
        """That of the cache among a forward's inputs, if it is one of this object's."""
        cache = cache_of(inputs)
        if not isinstance(cache, _Prefixed) or cache.record.store is not self.store or torch.compiler.is_compiling():
            return None
        return cache.record

    def _before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inputs = inputs_of(module, args, kwargs)
        if (record := self._record(inputs)) is not None:
            record.begin(self.model, inputs)

    def _after(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], _output: Any) -> None:
        if (record := self._record(inputs_of(module, args, kwargs))) is not None:
            record.end()

    def _before_decoder(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if (record := self._record(inputs_of(module, args, kwargs))) is not None:
            record.begin_decoder()

    def _after_decoder(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], _output: Any) -> None:
        if (record := self._record(inputs_of(module, args, kwargs))) is not None:
            record.end_decoder()
