"""What layers keep of tokens, and how the blocks of a store contain it. Needs torch, and no engine.

A block has the keys and values of so many tokens in all layers of its group: for each layer the keys, `[heads, tokens,
dim]`, then the values. A block of recurrent states has those of all layers after its last token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterable

import torch

#: Bytes of a part's block, at least: smaller ones cost the processor more for each byte.
PART_BYTES = 2 << 20
#: The most parts of a group: each is a load of its own.
GROUP_PARTS = 8


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token."""

    index: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Layers whose attention sees as far: `reach` tokens before the next one, or all. `part` numbers groups that share
    a store: each has some of its layers, and blocks of its own, so that a model computes with the first while the
    others are read."""

    layers: tuple[LayerShape, ...]
    reach: int | None
    part: int = 0

    @property
    def name(self) -> str:
        """A folder's."""
        return "full" if self.reach is None else f"window-{self.reach}"

    def parts(self, block_tokens: int) -> list[Group]:
        """The group divided by layers: into parts of one size, as many as `PART_BYTES` and `GROUP_PARTS` allow."""
        layers, most = self.layers, min(GROUP_PARTS, self.block_bytes(block_tokens) // PART_BYTES)
        if len({layer.token_bytes for layer in layers}) > 1:
            return [self]
        count = next((n for n in range(most, 1, -1) if len(layers) % n == 0), 1)
        size = len(layers) // count
        return [Group(layers[n * size : (n + 1) * size], self.reach, n) for n in range(count)]

    def key(self, key: bytes) -> bytes:
        """The key of the part's block, of a block's."""
        return key[:-1] + bytes([key[-1] ^ self.part])

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of a block."""
        return block_tokens * sum(layer.token_bytes for layer in self.layers)

    def first_token(self, tokens: int) -> int:
        """The first token that is needed to go on after so many."""
        return 0 if self.reach is None else max(0, tokens - self.reach)

    def views(self, blocks: torch.Tensor, block_tokens: int) -> Iterable[tuple[LayerShape, torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values in blocks of bytes: `[heads, blocks, tokens, dim]`."""
        at = 0
        for layer in self.layers:
            parts = []
            for dim in (layer.key_dim, layer.value_dim):
                nbytes = layer.heads * block_tokens * dim * layer.dtype.itemsize
                part = blocks[:, at : at + nbytes].view(layer.dtype)
                parts.append(part.unflatten(1, (layer.heads, block_tokens, dim)).permute(1, 0, 2, 3))
                at += nbytes
            yield layer, parts[0], parts[1]


@dataclass(frozen=True)
class StateShape:
    """One recurrent state of a layer, of one row."""

    index: int
    #: Which of the layer's states, and `conv` or `recurrent`.
    state: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, layer: Any) -> torch.Tensor | None:
        """The state that a layer of a cache has."""
        return (layer.conv_states if self.kind == "conv" else layer.recurrent_states)[self.state]


@dataclass(frozen=True)
class StateGroup:
    """The recurrent states of all layers: what follows needs those after its last token, and no others."""

    layers: tuple[StateShape, ...]
    reach = 1
    name = "state"

    def key(self, key: bytes) -> bytes:
        """The key of its block, of a block's."""
        return key

    def block_bytes(self, _block_tokens: int) -> int:
        """Bytes of a block: each state begins at a multiple of 16."""
        return sum(-(-math.prod(layer.shape) * layer.dtype.itemsize // 16) * 16 for layer in self.layers)

    def first_token(self, tokens: int) -> int:
        """The first token whose block is needed to go on after so many."""
        return max(0, tokens - self.reach)

    def views(self, blocks: torch.Tensor) -> Iterable[tuple[StateShape, torch.Tensor]]:
        """Each state in blocks of bytes: `[blocks, *shape]`."""
        at = 0
        for layer in self.layers:
            nbytes = math.prod(layer.shape) * layer.dtype.itemsize
            yield layer, blocks[:, at : at + nbytes].view(layer.dtype).unflatten(1, layer.shape)
            at += -(-nbytes // 16) * 16
