"""KV of prompts in blocks of tokens, in one store for each kind of attention. Needs torch, and no engine.

A block has the keys and values of so many tokens in all layers of its group: for each layer the keys, `[heads, tokens,
dim]`, then the values. A block of recurrent states has those of all layers after its last token. The key of a block is
the digest of all tokens to its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import os
import threading
from array import array
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Callable, Generator, Iterable, Sequence

import torch

from .._stores import Place
from .._values import config_error, parse_bytes
from ..cache import Cache, slot_bytes, store_bytes
from ..errors import Error, UnavailableError
from .layers import Arriving

logger = logging.getLogger(__name__)

#: Memory that blocks pass through between the store and the layers.
STAGING_BYTES = 512 << 20
#: Loads that are under way at once, each into its part of that memory: while one ends, drives work for the other. Each
#: part costs launches of every layer's copies: many small ones cost more than they gain.
PARTS = 2
#: Blocks of tokens for which room is made for one of recurrent states: they are stored at the ends of turns only.
BLOCKS_A_STATE = 32


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
    """Layers whose attention sees as far: `reach` tokens before the next one, or all."""

    layers: tuple[LayerShape, ...]
    reach: int | None

    @property
    def name(self) -> str:
        """A folder's."""
        return "full" if self.reach is None else f"window-{self.reach}"

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


@dataclass(frozen=True)
class StateGroup:
    """The recurrent states of all layers: what follows needs those after its last token, and no others."""

    layers: tuple[StateShape, ...]
    reach = 1
    name = "state"

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


def chain(tokens: Sequence[int], block_tokens: int, keys: list[bytes]) -> list[bytes]:
    """Extends the keys of a prompt's first blocks by those of its further whole blocks."""
    for at in range(len(keys) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        block = array("q", tokens[at : at + block_tokens]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else bytes(32)) + block).digest())
    return keys


class PrefixStore:
    """The stores of all groups, and the memory that blocks pass through. From any thread."""

    def __init__(
        self, groups: Sequence[Group | StateGroup], block_tokens: int, place: Place, paths: Sequence[str] | None,
        device: torch.device, devices: dict[int, torch.device], sizes: dict[str, Any], settings: dict[str, Any],
    ) -> None:  # fmt: skip
        """Opens the stores. `device` has the staging memory, `devices` each layer; `sizes` are `capacity` and
        `host_bytes` of all together, `settings` those of the caches."""
        self.devices = devices
        self.groups, self.block_tokens, self.device = tuple(groups), block_tokens, device
        self.has_states = any(isinstance(group, StateGroup) for group in groups)
        self.block_bytes = [group.block_bytes(block_tokens) for group in groups]
        weights = [
            nbytes / BLOCKS_A_STATE if isinstance(group, StateGroup) else nbytes
            for group, nbytes in zip(groups, self.block_bytes)
        ]
        self.lock = threading.Lock()
        self.caches: list[Cache] = []
        #: Blocks that could not be read, by group: misses until they are stored again.
        self._bad: list[set[bytes]] = [set() for _ in groups]
        self._regions: list[Any] = []
        self._loads = ThreadPoolExecutor(PARTS, "kvhoist-prefix")
        self._reached = settings.get("device") in ("cuda", "simulated")
        try:
            for group, nbytes, weight in zip(self.groups, self.block_bytes, weights):
                share = weight / sum(weights)
                least = {"host_bytes": 2 * slot_bytes(nbytes), "capacity": len(paths or ()) * store_bytes(2, nbytes)}
                sized = {
                    name: max(int(parse_bytes(size, name) * share), least[name]) for name, size in sizes.items()
                }
                folders = None
                if paths is not None:
                    folders = [os.path.join(folder, group.name) for folder in place.directories(paths)]
                    for folder in folders:
                        os.makedirs(folder, mode=0o700, exist_ok=True)
                self.caches.append(
                    Cache(
                        folders, block_bytes=nbytes, namespace=f"{place.namespace()}/{group.name}", **sized, **settings
                    )
                )
            most = max(self.block_bytes)
            self.staging = torch.empty(max(1, STAGING_BYTES // most) * most, dtype=torch.uint8, device=device)
            for cache in self.caches:
                self._regions.append(self._register(cache)(self.staging.data_ptr(), self.staging.numel()))
        except BaseException:
            self.close()
            raise

    def _register(self, cache: Cache) -> Callable[[int, int], Any]:
        return cache.register_device if self._reached else cache.register_host

    # Lookup

    def longest(self, keys: Sequence[bytes], tokens: int) -> int:
        """The most of these tokens that can be loaded, of a prompt with these keys. No I/O."""
        size = self.block_tokens
        found = []
        for group, cache, bad in zip(self.groups, self.caches, self._bad):
            present = [here and key not in bad for key, here in zip(keys, cache.contains_each(list(keys)))]
            found.append(present)
            if group.reach is None:
                tokens = min(tokens, size * next((n for n, here in enumerate(present) if not here), len(present)))
        tokens = min(tokens, size * len(keys))
        if self.has_states:
            tokens -= tokens % size
        last = [(group, present) for group, present in zip(self.groups, found) if group.reach is not None]
        while tokens > 0:
            end = -(-tokens // size)
            if all(all(present[group.first_token(tokens) // size : end]) for group, present in last):
                break
            tokens = (end - 1) * size
        return tokens

    # Movement

    def load(self, keys: Sequence[bytes], tokens: int, put: Callable[[Any, torch.Tensor, int], None]) -> bool:
        """Loads what `tokens` of a prompt need. `put` gets blocks as bytes, `[blocks, bytes]`, and the number of the
        first. False where a block was not there; what was put then is of no use."""
        end = -(-tokens // self.block_tokens)
        for n, group in enumerate(self.groups):
            first_block = group.first_token(tokens) // self.block_tokens
            with contextlib.closing(self._loaded(n, keys, first_block, end)) as loaded:
                for first, piece, failed in loaded:
                    if failed:
                        self._bad[n] |= failed.keys()
                        why = next((result for result in failed.values() if result is not False), "not there any more")
                        logger.warning("kvhoist: %d blocks of a prefix could not be loaded: %s", len(failed), why)
                        return False
                    put(group, piece, first)
                    self._settle()
        return True

    def arriving(self, n: int, keys: Sequence[bytes], tokens: int) -> tuple[int, Arriving]:
        """Begins to load what `tokens` of a prompt need of a group, layer by layer: the number of the first block, and
        its load. Raises UnavailableError where not all of it is in host memory."""
        group = self.groups[n]
        first, end = group.first_token(tokens) // self.block_tokens, -(-tokens // self.block_tokens)
        register = self._register(self.caches[n])
        return first, Arriving(self.caches[n], register, group, keys[first:end], self.block_tokens, self.device)

    def _loaded(
        self, n: int, keys: Sequence[bytes], first: int, last: int
    ) -> Generator[tuple[int, torch.Tensor, dict[bytes, Any]], None, None]:
        """Pieces in order: the number of the first block, the blocks, and those that failed. The next pieces are under
        way until the generator is closed, which waits for them."""
        under_way: deque[tuple[int, torch.Tensor, list[bytes], Future]] = deque()
        parts = min(PARTS, self.staging.numel() // self.block_bytes[n])

        def oldest() -> tuple[int, torch.Tensor, dict[bytes, Any]]:
            at, piece, wanted, load = under_way.popleft()
            return at, piece, {key: result for key, result in zip(wanted, load.result()) if result is not True}

        try:
            for at, until, piece in self._pieces(n, first, last, parts):
                wanted = list(keys[at:until])
                load = self._loads.submit(self.caches[n].load, wanted, self._places(n, piece), errors="return")
                under_way.append((at, piece, wanted, load))
                if len(under_way) == parts:
                    yield oldest()
            while under_way:
                yield oldest()
        finally:
            wait([load for *_, load in under_way])

    def store(
        self, keys: Sequence[bytes], first: int, last: int, fill: Callable[[Any, torch.Tensor, int], bool]
    ) -> None:
        """Stores blocks of a prompt that are not there, without states. `fill` writes blocks from a number on, or
        returns False where it has not the bytes. Failures are logged: what is not stored is a miss later."""
        for n, group in enumerate(self.groups):
            if not isinstance(group, StateGroup):
                self._store(n, group, keys, first, last, fill)

    def store_states(self, keys: Sequence[bytes], fill: Callable[[Any, torch.Tensor, int], bool]) -> bool:
        """Stores the states after the last of these blocks. False where they were there, or there are none."""
        if not self.has_states or self.caches[-1].contains(keys[-1]):
            return False
        self._store(len(self.groups) - 1, self.groups[-1], keys, len(keys) - 1, len(keys), fill)
        return True

    def forget_states(self, key: bytes) -> None:
        """Removes the states of a block: those of a later one serve whatever goes on from there."""
        try:
            self.caches[-1].remove(key)
        except Error as error:
            logger.warning("kvhoist: states of a prefix were not removed: %s", error)

    def _store(
        self, n: int, group: Group | StateGroup, keys: Sequence[bytes], first: int, last: int,
        fill: Callable[[Any, torch.Tensor, int], bool],
    ) -> None:  # fmt: skip
        cache = self.caches[n]
        for start, end in _runs([not here for here in cache.contains_each(list(keys[first:last]))], first):
            for at, until, piece in self._pieces(n, start, end, 1):
                if not fill(group, piece, at):
                    continue
                self._settle()
                # States have no parents: those of a shorter prefix are not worth more than those of a longer one.
                parent = keys[at - 1] if at and isinstance(group, Group) else None
                try:
                    cache.store(list(keys[at:until]), self._places(n, piece), parent=parent)
                except Error as error:
                    logger.warning("kvhoist: %d blocks of a prefix were not stored: %s", until - at, error)
                    return
                self._bad[n].difference_update(keys[at:until])

    def _pieces(self, n: int, first: int, last: int, parts: int) -> Iterable[tuple[int, int, torch.Tensor]]:
        """Ranges of blocks that fit into one of so many parts of the staging memory, each with the next part as blocks."""
        nbytes = self.block_bytes[n]
        most = max(1, self.staging.numel() // parts // nbytes)
        turns = itertools.cycle(range(0, self.staging.numel() // nbytes // most * most * nbytes, most * nbytes))
        for at, begin in zip(range(first, last, most), turns):
            until = min(at + most, last)
            yield at, until, self.staging[begin : begin + (until - at) * nbytes].view(until - at, nbytes)

    def _places(self, n: int, piece: torch.Tensor) -> list[tuple[int, int]]:
        nbytes = self.block_bytes[n]
        return [(piece.data_ptr() + at * nbytes, nbytes) for at in range(len(piece))]

    def _settle(self) -> None:
        """Waits for what the device does with the staging memory: the caches have streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Writes what is dirty and closes the stores. Again: does nothing."""
        self._loads.shutdown()
        for region in self._regions:
            region.unregister()
        self._regions = []
        for cache in self.caches:
            cache.close()


def _runs(wanted: Sequence[bool], offset: int) -> Iterable[tuple[int, int]]:
    """Ranges of neighbors that are wanted, counted from `offset`."""
    start = None
    for n, want in enumerate([*wanted, False]):
        if want and start is None:
            start = n
        elif not want and start is not None:
            yield offset + start, offset + n
            start = None


def block_tokens_of(value: Any) -> int:
    """Checked: tokens of a block."""
    if not isinstance(value, int) or isinstance(value, bool) or not 16 <= value <= 4096 or value % 16:
        raise config_error("block_tokens", value, "a multiple of 16 from 16 to 4096")
    return value


def staging_device(devices: set[torch.device], settings: dict[str, Any]) -> torch.device:
    """Where blocks are staged: on the GPU that has all layers, if the cache reaches it; else in host memory."""
    if "device" not in settings and len(devices) == 1:
        device = next(iter(devices))
        if device.type == "cuda":
            settings.update(device="cuda", device_ordinal=device.index or 0, device_blocks=1)
            return device
    elif settings.get("device") == "cuda":
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise UnavailableError(
                f"device: found cuda, and layers on {sorted(map(str, devices))}; leave the setting out"
            )
        return next(iter(devices))
    return torch.device("cpu")
