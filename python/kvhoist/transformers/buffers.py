"""The keys, values and states of a prefix on their way into a cache's layers. Needs torch and transformers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticLayer, StaticSlidingWindowLayer

from ..errors import UnavailableError
from .layers import Arriving
from .shapes import Group, StateGroup, StateShape
from .store import PrefixStore

logger = logging.getLogger(__name__)


@dataclass
class Row:
    """One prompt: its padding, its tokens, and the keys of its whole blocks."""

    pad: int
    tokens: list[int]
    keys: list[bytes] = field(default_factory=list)
    #: Blocks that are stored, or were given up.
    stored: int = 0
    #: The block whose states were stored last while tokens were generated.
    last_states: bytes | None = None


class PrefixBuffers:
    """The keys and values of a prefix on their way into a cache's layers."""

    def __init__(self, cache: Any, store: PrefixStore, rows: list[Row], columns: int, width: int) -> None:
        self._cache, self._store, self._rows, self._columns = cache, store, rows, columns
        #: Loads that are under way, with the group, the row and the first block of each.
        self._arriving: list[tuple[Arriving, int, int, int]] = []
        #: Layers that have not come, with their places in these loads.
        self._missing: dict[int, int] = {}
        padded = any(row.pad for row in rows)
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, int, Group]] = {}
        self._states: list[tuple[StateShape, torch.Tensor]] = []
        devices = store.devices
        for group in store.groups:
            if isinstance(group, StateGroup):
                for state in group.layers:
                    made = torch.empty((len(rows), *state.shape), dtype=state.dtype, device=devices[state.index])
                    self._states.append((state, made))
                continue
            # From the first block that any row needs of this group.
            begin = min(
                row.pad + group.first_token(max(0, columns - row.pad)) // store.block_tokens * store.block_tokens
                for row in rows
            ) if not padded else 0  # fmt: skip
            make = torch.zeros if padded else torch.empty
            for layer in group.layers:
                shape, device = (len(rows), layer.heads, width - begin), devices[layer.index]
                keys = make((*shape, layer.key_dim), dtype=layer.dtype, device=device)
                values = make((*shape, layer.value_dim), dtype=layer.dtype, device=device)
                self._tensors[layer.index] = keys, values, begin, group

    def put(self, at: int) -> Any:
        """Takes blocks of one row."""

        def take(group: Group | StateGroup, piece: torch.Tensor, first: int) -> None:
            if isinstance(group, StateGroup):
                for (_, into), (_, source) in zip(self._states, group.views(piece)):
                    into[at].copy_(source[0])
                return
            pieces = {piece.device: piece}
            for layer in group.layers:
                device = self._tensors[layer.index][0].device
                if device not in pieces:
                    pieces[device] = piece.to(device)
            views = {device: list(group.views(some, self._store.block_tokens)) for device, some in pieces.items()}
            for n, layer in enumerate(group.layers):
                keys, values, begin, _ = self._tensors[layer.index]
                _, keys_from, values_from = views[keys.device][n]
                for into, source in ((keys, keys_from), (values, values_from)):
                    self._put(into, source, at, first, begin)

        return take

    def begin(self) -> bool:
        """Begins to load all layers. False where that cannot be: the cache is no `DynamicCache`, there are states, or
        there is no room."""
        if self._store.has_states or not isinstance(self._cache, DynamicCache):
            return False
        store = self._store
        rows = [(at, row.keys, self._columns - row.pad) for at, row in enumerate(self._rows) if row.pad < self._columns]
        # By row, then by group.
        held = [store.hold(keys, tokens) for _, keys, tokens in rows]
        if not all(held):
            _release(held)
        try:
            for n, group in enumerate(store.groups):
                self._missing |= {layer.index: at for at, layer in enumerate(group.layers)}
                for (at, keys, tokens), its in zip(rows, held):
                    first, arriving = store.arriving(n, keys, tokens, its.pop(0) if its else None)
                    self._arriving.append((arriving, n, at, first))
        except UnavailableError as error:
            logger.debug("kvhoist: a prefix is not loaded layer by layer: %s", error)
            _release(held)
            self.end()
            return False
        return True

    def arrive(self, layer: int) -> bool:
        """Puts a layer where it belongs, once. False where a block is known to be missing. It can be interrupted, and
        called again."""
        if (place := self._missing.get(layer)) is None:
            return True
        keys, values, begin, group = self._tensors[layer]
        for arriving, n, at, first in self._arriving:
            if self._store.groups[n] is group:
                for into, source in zip((keys, values), arriving.layer(place)):
                    self._put(into, source, at, first, begin)
        # Not before it is there: until then the layer has memory that nothing was written to.
        del self._missing[layer]
        return not any(arriving.failed for arriving, *_ in self._arriving)

    def _put(self, into: torch.Tensor, source: torch.Tensor, at: int, first: int, begin: int) -> None:
        """Copies `[heads, blocks, tokens, dim]` from a block's number on into a row."""
        size, blocks = self._store.block_tokens, source.shape[1]
        here = self._rows[at].pad + first * size - begin
        into[at, :, here : here + blocks * size].unflatten(1, (blocks, size)).copy_(source)

    def end(self) -> str | None:
        """Puts all layers that are missing, and lets the loads' memory go: why not all could be loaded."""
        for layer in list(self._missing) if self._arriving else ():
            self.arrive(layer)
        arriving, self._arriving, self._missing = self._arriving, [], {}
        why = None
        for load, n, at, first in arriving:
            if failed := {self._rows[at].keys[first + block]: result for block, result in load.end().items()}:
                why = f"{len(failed)} blocks of a prefix that could not be loaded: {self._store.mark_bad(n, failed)}"
        return why

    def fill(self) -> None:
        """Gives the layers their keys and values."""
        for index, (keys, values, begin, group) in self._tensors.items():
            first = group.first_token(self._columns)
            fill_layer(self._cache.layers[index], keys[:, :, first - begin : self._columns - begin],
                       values[:, :, first - begin : self._columns - begin], self._columns)  # fmt: skip
        for shape, state in self._states:
            fill_state(self._cache.layers[shape.index], shape, state)


def _release(held: list[list[Any]]) -> None:
    """Lets go what is held of all rows."""
    for row in held:
        while row:
            row.pop().release()


def fill_state(layer: Any, shape: StateShape, state: torch.Tensor) -> None:
    """Gives a layer one of its recurrent states."""
    if shape.kind == "conv":
        layer.lazy_initialization(conv_states=state, state_idx=shape.state)
        layer.conv_states[shape.state].copy_(state)
        layer.has_previous_state[shape.state] = True
    else:
        layer.update_recurrent_state(state, state_idx=shape.state)


def fill_layer(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """Gives a layer the keys and values of its last tokens, of `length` in all."""
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    if isinstance(layer, StaticSlidingWindowLayer):
        # A window that is full has a token more than attention reaches: it is dropped before it is looked at.
        skip = max(0, min(length, layer.max_cache_len) - keys.shape[2])
        layer.keys[:, :, skip : skip + keys.shape[2]] = keys
        layer.values[:, :, skip : skip + keys.shape[2]] = values
        layer.cumulative_length_int = length
        layer.cumulative_length.fill_(min(length, layer.max_cache_len))
    elif isinstance(layer, StaticLayer):
        layer.update(keys, values)
    else:
        layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
