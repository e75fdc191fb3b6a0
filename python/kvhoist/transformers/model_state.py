"""What may change of a model while its prompts are cached. Needs torch, and no engine."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._values import config_error
from .model_identity import adapter_state

#: What modules keep of their last prompt with images, and look at in the next prompt's positions.
_LAST_POSITIONS = ("rope_deltas", "_cached_decode_position_ids")


class ModelState:
    """A model's modules, weights and adapters as they are now, to compare with at every forward: in one call for all
    of a kind, because a step of a large model is not much longer than a look at each.

    Reads no weights, so it does not see writes that go past autograd (`parameter.data`).
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._attention = _attention(model)
        self._modules = list(model.modules())
        self._children = [(module._modules, dict(module._modules)) for module in self._modules]
        self._adapted = [module for module in self._modules if adapter_state(module) is not None]
        self._adapters = list(map(adapter_state, self._adapted))
        self._adapter_hooks = list(map(_hooks, self._adapted))
        self._tables = [table for module in self._modules for table in (module._parameters, module._buffers)]
        self._sizes = list(map(len, self._tables))
        slots = [(table, name) for table in self._tables for name in table]
        #: Those offloaded have bytes in a forward only, and other ones each time.
        self._offloaded = [slot for slot in slots if _is_meta(slot)]
        self._slots = [slot for slot in slots if not _is_meta(slot)]
        self._weights = self._weights_now()
        #: These keep no bytes, but the numbers of storages that are gone from being used again.
        self._storages = [StorageWeakRef(one.untyped_storage()) for one in self._tensors()]

    def change(self) -> str | None:
        """What the model has otherwise than at the start, as far as it can be told."""
        if _attention(self._model) != self._attention:
            return "another attention implementation than at the start"
        if (
            any(children != before for children, before in self._children)
            or list(map(adapter_state, self._adapted)) != self._adapters
            or self._weights_now() != self._weights
        ):
            return "other weights or adapters than at the start"
        if list(map(_hooks, self._adapted)) != self._adapter_hooks:
            return "adapters of one call (adapter_names), or another hook on their layers"
        return None

    def passing(self) -> str | None:
        """Why KV that is computed now is not that of the tokens alone, though it may be later."""
        for module in self._modules:
            if module.training:
                return f"{type(module).__name__} is in training"
        return _last_positions(self._modules)

    def _tensors(self) -> list[torch.Tensor]:
        return [one for table, name in self._slots if (one := table.get(name)) is not None]

    def _weights_now(self) -> tuple | None:
        """Where the bytes of all parameters and buffers are, and how often they were written to."""
        if list(map(len, self._tables)) != self._sizes or not all(map(_is_meta, self._offloaded)):
            return None
        tensors = self._tensors()
        try:
            return (
                [storage._cdata for storage in map(torch.Tensor.untyped_storage, tensors)],
                list(map(torch.Tensor.storage_offset, tensors)),
                list(map(torch.Tensor.stride, tensors)),
                list(map(attrgetter("_version"), tensors)),
            )
        except RuntimeError:
            return None  # Of torch.inference_mode(): no writes to it are counted.


def refuse_last_positions(model: Any) -> None:
    """Raises ConfigError where a prompt with images would move the positions of the next."""
    if (stale := _last_positions(model.modules())) is not None:
        raise config_error("model", type(model).__name__, f"one that has no positions of images: {stale}")


def _last_positions(modules: Iterable[Any]) -> str | None:
    """What a module keeps of a prompt with images, if the next prompt's positions are moved by it."""
    for module in modules:
        for name in _LAST_POSITIONS:
            kept = module.__dict__.get(name)
            if kept is not None and bool((torch.as_tensor(kept) != 0).any()):
                return f"{type(module).__name__}.{name} is that of an earlier prompt with images; set it to None"
    return None


def _attention(model: Any) -> Any:
    return getattr(model.config, "_attn_implementation", None)


def _is_meta(slot: tuple[dict[str, Any], str]) -> bool:
    return getattr(slot[0].get(slot[1]), "is_meta", False)


def _hooks(module: Any) -> list[int]:
    """The hooks by which a call chooses among adapters, as peft has them."""
    return list(module._forward_pre_hooks)
