"""The tokens of a cache's rows, what is loaded for them, and what of them is stored. Needs torch and transformers."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate

from ..errors import ArgumentError, CopyError
from .buffers import PrefixBuffers, Row
from .model_state import ModelState
from .shapes import Group, StateGroup
from .store import PrefixStore, chain

logger = logging.getLogger(__name__)

#: Inputs of a model's forward that change no KV, or that are checked.
_INPUTS = frozenset(
    "input_ids attention_mask position_ids cache past_key_values use_cache cache_position logits_to_keep labels return_dict "
    "output_attentions output_hidden_states output_router_logits".split()
)


#: What a model's forward calls its cache: `past_key_values` before transformers 5.24, and there still, with a warning.
_ARGUMENT = "cache" if "cache" in inspect.signature(create_masks_for_generate).parameters else "past_key_values"


def cache_argument(cache: Any) -> dict[str, Any]:
    """A cache as an argument of a model's forward."""
    return {_ARGUMENT: cache}


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """The cache among the inputs of a model's forward."""
    return inputs.get("cache", inputs.get("past_key_values"))


def inputs_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All inputs of a module's forward by their names."""
    # Only where there are some: a forward begins each token.
    names = inspect.signature(module.forward).parameters if args else ()
    return {**dict(zip(names, args)), **kwargs}


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
        # Copied: the caller may write other tokens where these are.
        return cls(input_ids.detach().to("cpu", copy=True), seen, rows)


class PromptRecord:
    """What a cache of `PrefixCache` knows of itself. It stops storing as soon as it cannot tell what KV belongs to."""

    def __init__(self, cache: Any, store: PrefixStore, known: Known, state: ModelState) -> None:
        self.cache, self.store, self.known, self._state = cache, store, known, state
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
        self._buffers: PrefixBuffers | None = None
        #: Why some layers have not what belongs into them, and never will.
        self._broken: str | None = None
        #: Whether a forward of the model, and one of its decoder, began and has not ended.
        self._in_model = self._in_decoder = False

    def forget(self, why: str) -> None:
        """Stores nothing from here on."""
        if self._stores:
            logger.info("kvhoist: a cache stores nothing from token %d on: %s", self.columns, why)
        self._stores = False
        self._seen.clear()

    # Loading

    def load(self, layerwise: bool) -> None:
        """Loads the longest prefix that all rows have into the layers; `layerwise` only begins to, if it can."""
        with self.store.lock:
            columns = self._longest(self.known.input_ids.shape[1] - 1)
            while columns > 0:
                width = max(
                    row.pad + -(-(columns - row.pad) // self.store.block_tokens) * self.store.block_tokens
                    for row in self.known.rows
                )
                buffers = PrefixBuffers(self.cache, self.store, self.known.rows, columns, width)
                if layerwise and buffers.begin():
                    self._buffers = buffers
                    buffers.fill()
                    break
                if all(
                    self.store.load(row.keys, columns - row.pad, buffers.put(row_at))
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
            some = input_ids[:, self.columns : until]
            model(some, use_cache=True, logits_to_keep=1, **cache_argument(self.cache))
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

    def arrive(self, layer: int) -> None:
        """Before a layer's KV is looked at: what the current stream does next waits for it. Raises CopyError where a
        block is known to be missing."""
        self._refuse_broken()
        if self._buffers is not None:
            if torch.compiler.is_compiling():
                raise ArgumentError("layerwise: found a compiled model, expected one that is not")
            if not self._buffers.arrive(layer):
                self.arrive_all()

    def arrive_all(self) -> None:
        """Waits for all layers. Raises CopyError where a block is not there: what the model computed is of no use, and
        neither is the cache."""
        self._refuse_broken()
        if self._buffers is None:
            return
        # An interrupt loses which blocks are not there.
        self._broken = "a prefix whose load did not end"
        self._broken = self._buffers.end()
        self._buffers = None
        if self._broken is not None:
            self.forget("blocks could not be loaded")
            self._refuse_broken()

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise CopyError(f"found {self._broken}; make another cache")

    # A forward

    def _refuse_unended(self) -> None:
        """Stores nothing after a forward that did not end. Raises ArgumentError where its recurrent states may have
        seen tokens that its length does not count, or where it was to wait for layers."""
        self._refuse_broken()
        if not self._in_model and not self._in_decoder:
            return
        if self._buffers is not None or self.store.has_states:
            raise ArgumentError(
                f"{_ARGUMENT}: found a cache whose last forward did not end, expected one whose layers have seen the "
                "same tokens; make another cache"
            )
        self.forget("its last forward did not end")
        self._in_model = self._in_decoder = False

    def begin_decoder(self) -> None:
        """Before the decoder's forward, within the model's or by itself: raises ArgumentError where its last one did
        not end."""
        if self._in_decoder:
            self._refuse_unended()
        self._in_decoder = True

    def end_decoder(self) -> None:
        """After the decoder's forward: all layers are there. Raises CopyError where a block is not."""
        self.arrive_all()
        self._in_decoder = False

    def begin(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """Before a forward: raises ArgumentError where what was loaded does not belong before its tokens, or where the
        last forward did not end; CopyError where blocks did not arrive."""
        self._refuse_unended()
        self._check(model, inputs)
        self._in_model = True

    def _check(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """Of a forward's inputs: whether what it computes can be stored."""
        ids, start = inputs.get("input_ids"), int(self.cache.get_seq_length())
        self._ids = None
        why = None
        if others := sorted(name for name, value in inputs.items() if name not in _INPUTS and value is not None):
            why = f"the model was given {others[0]}"
        elif ids is None:
            why = "the model was not given input_ids"
        elif start != self.columns:
            why = "tokens were computed that were not seen"
        elif torch.is_autocast_enabled(ids.device.type):
            why = "the model is under autocast"
        elif (change := self._state.change()) is not None:
            why = f"the model has {change}"
        else:
            why = self._state.passing()
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
            "from there on: with a plain forward, pass input_ids[:, past.get_seq_length():]; generate must neither "
            "chunk its prefill nor have an assistant_model or prompt_lookup_num_tokens"
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
        elif positions.ndim in (2, 3):  # Of text all kinds of positions of a token are one.
            right = bool(((positions.cpu() == expected) | (expected < 0)).all())
        else:
            right = False
        if not right:
            if self.prepared:
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
                position_ids=positions, **cache_argument(self.cache),
            )  # fmt: skip
            if _same(mask, own):
                return None
            if self.prepared:
                raise ArgumentError(
                    "attention_mask: found one of the caller's own over loaded tokens, expected the tokenizer's or none"
                )
            return "the model was given a mask of its own"
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
        self.arrive_all()
        ids, self._ids = self._ids, None
        if ids is not None:
            self._keep(ids)
        # Not before: an interrupt leaves tokens that are counted, and are not among those of the rows.
        self._in_model = False

    def _keep(self, ids: torch.Tensor) -> None:
        """Stores whole blocks that end among these tokens, the last of the cache."""
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
        # The states are those after the cache's columns. The keys are those of the whole prompt.
        keys = row.keys[:blocks]
        if self.columns - row.pad == blocks * self.store.block_tokens and self.store.store_states(keys, gather):
            if row.last_states is not None:
                self.store.forget_states(row.last_states)
            row.last_states = keys[-1] if generated else None

    def _gather_states(self, at: int, group: StateGroup, piece: torch.Tensor) -> bool:
        for shape, into in group.views(piece):
            layer = self.cache.layers[shape.index]
            source = shape.of(layer)
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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is None and other is None
