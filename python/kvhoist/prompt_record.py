"""The tokens of a cache's rows, what is loaded for them, and what of them is stored. Needs torch and transformers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate

from .errors import ArgumentError
from .prefix_store import Group, PrefixStore, StateGroup, StateShape, chain

logger = logging.getLogger(__name__)

#: Inputs of a model's forward that change no KV, or that are checked.
_INPUTS = frozenset(
    "input_ids attention_mask position_ids past_key_values use_cache cache_position logits_to_keep labels return_dict "
    "output_attentions output_hidden_states output_router_logits".split()
)


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


@dataclass
class Known:
    """The prompts that a cache was made for."""

    input_ids: torch.Tensor
    mask: torch.Tensor | None
    rows: list[Row]

    @classmethod
    def of(cls, input_ids: Any, mask: Any) -> "Known":
        """Checked. Raises ArgumentError."""
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.numel():
            found = tuple(getattr(input_ids, "shape", ())) or type(input_ids).__name__
            raise ArgumentError(f"input_ids: found {found}, expected a tensor of [batch, tokens]")
        seen, pads = None, [0] * len(input_ids)
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
                found = tuple(getattr(mask, "shape", ())) or type(mask).__name__
                raise ArgumentError(f"attention_mask: found {found}, expected {tuple(input_ids.shape)}, as input_ids")
            seen = (mask != 0).cpu()
            if not bool((seen[:, 1:] >= seen[:, :-1]).all()) or not bool(seen[:, -1].all()):
                raise ArgumentError(
                    "attention_mask: found a token behind padding left out, expected padding on the left only"
                )
            pads = (~seen).sum(-1).tolist()
        rows = [Row(pad, ids[pad:]) for pad, ids in zip(pads, input_ids.tolist())]
        return cls(input_ids.cpu(), seen, rows)


class PromptRecord:
    """What a cache of `PrefixCache` knows of itself. It stops storing as soon as it cannot tell what KV belongs to."""

    def __init__(self, cache: Any, store: PrefixStore, known: Known) -> None:
        self.cache, self.store, self.known = cache, store, known
        #: Columns that were loaded, columns that the model need not be given, and columns whose tokens are known.
        self.loaded = self.prepared = self.columns = 0
        self._stores = True
        self._sliding = {
            layer.index
            for group in store.groups
            if isinstance(group, Group) and group.reach is not None
            for layer in group.layers
        }
        #: Of sliding layers: the keys and values of this forward, with those before that its window reaches.
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._ids: torch.Tensor | None = None

    def forget(self, why: str) -> None:
        """Stores nothing from here on."""
        if self._stores:
            logger.info("kvhoist: a cache stores nothing from token %d on: %s", self.columns, why)
        self._stores = False
        self._seen.clear()

    # Loading

    def load(self) -> None:
        """Loads the longest prefix that all rows have into the cache's layers."""
        with self.store.lock:
            columns = self._longest(self.known.input_ids.shape[1] - 1)
            while columns > 0:
                width = max(
                    row.pad + -(-(columns - row.pad) // self.store.block_tokens) * self.store.block_tokens
                    for row in self.known.rows
                )
                buffers = _Buffers(self.cache, self.store, self.known.rows, columns, width)
                if all(
                    self.store.load(row.keys, columns - row.pad, buffers.put(row_at, row))
                    for row_at, row in enumerate(self.known.rows)
                ):
                    buffers.fill()
                    break
                columns = self._longest(columns)
        self.loaded = self.prepared = self.columns = max(columns, 0)
        for row in self.known.rows:
            row.stored = max(0, self.loaded - row.pad) // self.store.block_tokens

    @torch.no_grad()
    def prepare(self, model: Any, input_ids: torch.Tensor) -> None:
        """Computes on to the last whole block before the last token, where its states can be stored."""
        until = (input_ids.shape[1] - 1) // self.store.block_tokens * self.store.block_tokens
        if self.columns < until and self.store.has_states and not self._padded():
            model(input_ids[:, self.columns : until], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.prepared = self.columns

    def _padded(self) -> bool:
        return any(row.pad for row in self.known.rows)

    def _longest(self, columns: int) -> int:
        """Columns, up to a number, that can be loaded for all rows."""
        if self.store.has_states and self._padded():
            # Whether a model's states see padding is its own affair.
            self.forget("a batch with padding has recurrent states")
            return 0
        while columns > 0:
            fewest = min(row.pad + self.store.longest(row.keys, max(0, columns - row.pad)) for row in self.known.rows)
            if fewest >= columns:
                break
            columns = fewest
        return columns if any(columns > row.pad for row in self.known.rows) else 0

    # A forward

    def begin(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """Before a forward: raises ArgumentError where what was loaded does not belong before its tokens."""
        ids, start = inputs.get("input_ids"), int(self.cache.get_seq_length())
        self._ids = None
        why = None
        if others := sorted(name for name, value in inputs.items() if name not in _INPUTS and value is not None):
            why = f"the model was given {others[0]}"
        elif ids is None:
            why = "the model was not given input_ids"
        elif start != self.columns:
            why = "tokens were computed that were not seen"
        elif model.training or torch.is_autocast_enabled(ids.device.type):
            why = "the model is in training or under autocast"
        if why is not None:
            if self.prepared and start == self.prepared:
                raise ArgumentError(f"found {self.prepared} loaded tokens, expected none: {why}")
            return self.forget(why)
        assert ids is not None
        if len(ids) != len(self.known.rows):
            raise ArgumentError(
                f"input_ids: found {len(ids)} rows, expected the {len(self.known.rows)} that the cache was made for; "
                "repeat them for beams and returned sequences before"
            )
        self._check_tokens(ids, start)
        if (why := self._unlike_known(model, inputs, ids, start)) is not None:
            self.forget(why)
        self._ids = ids

    def _check_tokens(self, ids: torch.Tensor, start: int) -> None:
        declared = self.known.input_ids[:, start : start + ids.shape[1]]
        if start >= self.known.input_ids.shape[1] or torch.equal(ids[:, : declared.shape[1]].cpu(), declared):
            return
        raise ArgumentError(
            f"input_ids: found other tokens at {start} than the cache was made for, expected the {declared.shape[1]} "
            "from there on: with a plain forward, pass input_ids[:, past.get_seq_length():]; generate must not chunk "
            "its prefill"
        )

    def _unlike_known(self, model: Any, inputs: Mapping[str, Any], ids: torch.Tensor, start: int) -> str | None:
        """Why KV that is computed now is not that of the tokens alone. Raises ArgumentError where what was loaded is
        looked at in another way than it was computed for."""
        count, pads = ids.shape[1], torch.tensor([row.pad for row in self.known.rows])
        padded, columns = bool(pads.any()), torch.arange(start, start + count)
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        expected = columns - pads[:, None]
        if positions is None:
            right = not padded
        elif positions.ndim == 2:
            right = bool(((positions.cpu() == expected) | (expected < 0)).all())
        else:
            right = False
        if not right:
            if padded and self.loaded:
                raise ArgumentError(
                    "position_ids: found none, or others than the tokens' places behind their padding, expected those: "
                    "(attention_mask.cumsum(-1) - 1).clamp(min=0)[:, past.get_seq_length():]"
                )
            return "positions are not those of the tokens alone"
        whole = torch.arange(start + count) >= pads[:, None]
        if mask is None:
            right = not padded
        elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
            right = mask.shape == whole.shape and torch.equal((mask != 0).cpu(), whole)
        else:
            make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
            like = torch.empty((*ids.shape, 0), dtype=model.dtype, device=ids.device)
            own = make(
                config=model.config, inputs_embeds=like, attention_mask=whole.to(ids.device, torch.long),
                past_key_values=self.cache, position_ids=positions,
            )  # fmt: skip
            # Neither raises: a mask of the caller's own is for this forward, and its KV is not stored.
            return None if _same(mask, own) else "the model was given a mask of its own"
        if not right and (padded or mask is not None):
            raise ArgumentError(
                "attention_mask: found none, or another than the cache was made with, expected that of all "
                f"{start + count} tokens; pass the tokenizer's both to the cache and to the model"
            )
        return None

    def seen(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What a layer's attention sees in this forward."""
        if self._ids is not None and self._stores and layer in self._sliding:
            self._seen[layer] = keys, values

    def end(self) -> None:
        """After a forward: stores whole blocks of what it computed."""
        ids, self._ids = self._ids, None
        if ids is None:
            return
        self.columns += ids.shape[1]
        if int(self.cache.get_seq_length()) != self.columns:
            self.forget("the model did not keep what it computed")
        start = self.columns - ids.shape[1]
        added = ids[:, max(0, self.known.input_ids.shape[1] - start) :]
        if added.shape[1]:
            for row, tokens in zip(self.known.rows, added.tolist()):
                row.tokens += tokens
        if self._stores:
            with self.store.lock:
                for at, row in enumerate(self.known.rows):
                    self._store_row(at, row)
        self._seen.clear()

    def _store_row(self, at: int, row: Row) -> None:
        blocks = max(0, self.columns - row.pad) // self.store.block_tokens
        if blocks <= row.stored:
            return
        chain(row.tokens, self.store.block_tokens, row.keys)

        def gather(group: Group | StateGroup, piece: torch.Tensor, first: int) -> bool:
            if isinstance(group, StateGroup):
                return self._gather_states(at, group, piece)
            return self._gather(at, row, group, piece, first)

        self.store.store(row.keys, row.stored, blocks, gather)
        row.stored = blocks
        generated = self.columns > self.known.input_ids.shape[1]
        if self.columns - row.pad == blocks * self.store.block_tokens and self.store.store_states(row.keys, gather):
            if row.last_states is not None:
                self.store.forget_states(row.last_states)
            row.last_states = row.keys[-1] if generated else None

    def _gather_states(self, at: int, group: StateGroup, piece: torch.Tensor) -> bool:
        for shape, into in group.views(piece):
            layer = self.cache.layers[shape.index]
            source = (layer.conv_states if shape.kind == "conv" else layer.recurrent_states)[shape.state]
            if layer.record_past or source is None or source.shape[1:] != shape.shape or source.dtype != shape.dtype:
                return False
            into.copy_(source[at].detach())
        return True

    def _gather(self, at: int, row: Row, group: Group, piece: torch.Tensor, first: int) -> bool:
        size = self.store.block_tokens
        begin, end = row.pad + first * size, row.pad + (first + len(piece)) * size
        for layer, keys_into, values_into in group.views(piece, size):
            found = self._tensors(group, layer.index)
            if found is None:
                return False
            keys, values, offset = found
            if begin < offset or keys.dtype != layer.dtype or keys.shape[1] != layer.heads:
                return False
            for into, source in ((keys_into, keys), (values_into, values)):
                some = source[at, :, begin - offset : end - offset].detach()
                into.copy_(some.unflatten(1, (len(piece), size)))
        return True

    def _tensors(self, group: Group, index: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """A layer's keys and values, and the column of the first."""
        layer = self.cache.layers[index]
        if group.reach is None:
            return layer.keys, layer.values, 0
        if index not in self._seen:
            return None
        keys, values = self._seen[index]
        # A static layer whose window is not full returns its memory, which begins with the first token.
        if isinstance(layer, StaticSlidingWindowLayer) and keys is layer.keys and self.columns <= keys.shape[2]:
            return keys, values, 0
        return keys, values, self.columns - keys.shape[2]


class _Buffers:
    """The keys and values of a prefix on their way into a cache's layers."""

    def __init__(self, cache: Any, store: PrefixStore, rows: list[Row], columns: int, width: int) -> None:
        self._cache, self._store, self._columns = cache, store, columns
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

    def put(self, at: int, row: Row) -> Any:
        """Takes blocks of one row."""
        size = self._store.block_tokens

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
            views = {device: list(group.views(some, size)) for device, some in pieces.items()}
            for n, layer in enumerate(group.layers):
                keys, values, begin, _ = self._tensors[layer.index]
                _, keys_from, values_from = views[keys.device][n]
                here = row.pad + first * size - begin
                for into, source in ((keys, keys_from), (values, values_from)):
                    into[at, :, here : here + len(piece) * size].unflatten(1, (len(piece), size)).copy_(source)

        return take

    def fill(self) -> None:
        """Gives the layers their keys and values."""
        for index, (keys, values, begin, group) in self._tensors.items():
            first = group.first_token(self._columns)
            _fill(self._cache.layers[index], keys[:, :, first - begin : self._columns - begin],
                  values[:, :, first - begin : self._columns - begin], self._columns)  # fmt: skip
        for shape, state in self._states:
            layer, n = self._cache.layers[shape.index], shape.state
            if shape.kind == "conv":
                layer.lazy_initialization(conv_states=state, state_idx=n)
                layer.conv_states[n].copy_(state)
                layer.has_previous_state[n] = True
            else:
                layer.update_recurrent_state(state, state_idx=n)


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is None and other is None
