"""KV of prompts in blocks of tokens, in one store for each kind of attention. Needs torch, and no engine.

`shapes.py` has what a block contains. The key of a block is the digest of all tokens to its end, and the part's number.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import threading
from array import array
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, Generator, Iterable, Iterator, Mapping, Sequence

import torch

from .._folders import make_store_folder
from .._stores import Place, close_all
from .._values import config_error, parse_bytes
from ..cache import Cache, slot_bytes, slots_on_each, store_bytes
from ..errors import Error, UnavailableError
from .layers import Arriving
from .shapes import Group, StateGroup

logger = logging.getLogger(__name__)

#: Memory that blocks pass through between the store and the layers.
STAGING_BYTES = 512 << 20
#: Loads that are under way at once, each into its part of that memory: while one ends, drives work for the other. Each
#: part costs launches of every layer's copies: many small ones cost more than they gain.
PARTS = 2
#: Most blocks of a group that are remembered as a miss because they could not be read.
BAD_MAX = 65_536
#: Blocks of tokens for which room is made for one of recurrent states: they are stored at the ends of turns only.
BLOCKS_A_STATE = 32


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
        #: By store: its share of all sizes, and the bytes of its blocks.
        weights: dict[str, float] = {}
        nbytes_of = {group.name: nbytes for group, nbytes in zip(groups, self.block_bytes)}
        for group, nbytes in zip(groups, self.block_bytes):
            weight = nbytes / BLOCKS_A_STATE if isinstance(group, StateGroup) else nbytes
            weights[group.name] = weights.get(group.name, 0) + weight
        #: By group: the place of its store among the caches.
        self._store_of = [list(weights).index(group.name) for group in groups]
        self.lock = threading.Lock()
        self.caches: list[Cache] = []
        #: Blocks that could not be read, by group, the oldest first: misses until they are stored again.
        self._bad: list[dict[bytes, None]] = [{} for _ in groups]
        self._regions: list[Any] = []
        self._calls = ThreadPoolExecutor(PARTS, "kvhoist-prefix")
        self._reached = settings.get("device") in ("cuda", "simulated")
        try:
            for name, weight in weights.items():
                share, nbytes = weight / sum(weights.values()), nbytes_of[name]
                least = {"host_bytes": 2 * slot_bytes(nbytes), "capacity": len(paths or ()) * store_bytes(2, nbytes)}
                sized = {key: max(int(parse_bytes(size, key) * share), least[key]) for key, size in sizes.items()}
                folders = None
                if paths is not None:
                    folders = [os.path.join(folder, name) for folder in place.directories(paths)]
                    file_bytes = store_bytes(slots_on_each(sized["capacity"], len(folders), nbytes), nbytes)
                    for path, folder in zip(paths, folders):
                        make_store_folder(path, folder, file_bytes)
                namespace = f"{place.namespace()}/{name}"
                own = {**settings, **_budget(settings, share)}
                self.caches.append(Cache(folders, block_bytes=nbytes, namespace=namespace, **sized, **own))
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
        for n, group in enumerate(self.groups):
            present = self._contains(n, keys)
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

    def _contains(self, n: int, keys: Sequence[bytes]) -> list[bool]:
        """Whether the store has a group's blocks, but for those that could not be read."""
        found = self._cache(n).contains_each(list(map(self.groups[n].key, keys)))
        return [here and key not in self._bad[n] for key, here in zip(keys, found)]

    def _cache(self, n: int) -> Cache:
        """The store of a group."""
        return self.caches[self._store_of[n]]

    def _range(self, n: int, tokens: int) -> tuple[int, int]:
        """The first block that so many tokens need of a group, and the one behind the last: none of none."""
        tokens = max(0, tokens)
        return self.groups[n].first_token(tokens) // self.block_tokens, -(-tokens // self.block_tokens)

    # Movement

    def load(self, keys: Sequence[bytes], tokens: int, put: Callable[[Any, torch.Tensor, int], None]) -> bool:
        """Loads what `tokens` of a prompt need. `put` gets blocks as bytes, `[blocks, bytes]`, and the number of the
        first. False where a block was not there; what was put then is of no use."""
        with contextlib.closing(self._loaded(keys, tokens)) as loaded:
            for n, first, piece, failed in loaded:
                if failed:
                    self.mark_bad(n, failed)
                    return False
                put(self.groups[n], piece, first)
                self._settle()
        return True

    def mark_bad(self, n: int, failed: Mapping[bytes, Any]) -> str:
        """Makes misses of a group's blocks that could not be loaded; why they could not."""
        bad = self._bad[n]
        bad.update(dict.fromkeys(failed))
        for key in list(itertools.islice(bad, max(0, len(bad) - BAD_MAX))):
            del bad[key]
        why = str(next((result for result in failed.values() if result is not False), "not there any more"))
        logger.warning("kvhoist: %d blocks of a prefix could not be loaded: %s", len(failed), why)
        return why

    def hold(self, keys: Sequence[bytes], tokens: int) -> list[Any]:
        """Holds in host memory what `tokens` of a prompt need, group by group. Nothing where not all of it is there:
        what comes from drives needs that memory."""
        held: list[Any] = []
        for n, group in enumerate(self.groups):
            first, end = self._range(n, tokens)
            held.append(self._cache(n).hold(list(map(group.key, keys[first:end])), end - first))
            if len(held[-1]) < end - first:
                for one in held:
                    one.release()
                return []
        return held

    def arriving(self, n: int, keys: Sequence[bytes], tokens: int, held: Any) -> tuple[int, Arriving]:
        """Begins to load what `tokens` of a prompt need of a group, layer by layer: the number of the first block, and
        its load, which lets go what is `held`. Raises UnavailableError where there is no room."""
        (first, end), group, cache = self._range(n, tokens), self.groups[n], self._cache(n)
        mine = list(map(group.key, keys[first:end]))
        return first, Arriving(cache, self._register(cache), group, mine, self.block_tokens, self.device, held)

    def _loaded(
        self, keys: Sequence[bytes], tokens: int
    ) -> Generator[tuple[int, int, torch.Tensor, dict[bytes, Any]], None, None]:
        """Pieces of all groups, in order: the group, the number of the first block, the blocks, and those that failed.
        The next pieces are under way until the generator is closed, which waits for them."""
        under_way: deque[tuple[int, int, torch.Tensor, Sequence[bytes], Future]] = deque()
        most = max(self.block_bytes)
        parts = min(PARTS, self.staging.numel() // most)
        room = self.staging.numel() // most // parts * most
        places = itertools.cycle(range(0, parts * room, room))

        def oldest() -> tuple[int, int, torch.Tensor, dict[bytes, Any]]:
            n, at, piece, wanted, load = under_way.popleft()
            return n, at, piece, {key: result for key, result in zip(wanted, load.result()) if result is not True}

        try:
            for n, group in enumerate(self.groups):
                for at, until, piece in self._pieces(n, *self._range(n, tokens), room, places):
                    wanted = keys[at:until]
                    mine = list(map(group.key, wanted))
                    load = self._calls.submit(self._cache(n).load, mine, self._places(n, piece), errors="return")
                    under_way.append((n, at, piece, wanted, load))
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
        n = len(self.groups) - 1
        if not self.has_states or self._contains(n, keys[-1:]) == [True]:
            return False
        self._store(n, self.groups[n], keys, len(keys) - 1, len(keys), fill)
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
        for start, end in _runs([not here for here in self._contains(n, keys[first:last])], first):
            for at, until, piece in self._pieces(n, start, end, self.staging.numel(), itertools.repeat(0)):
                if not fill(group, piece, at):
                    continue
                self._settle()
                # States have no parents: those of a shorter prefix are not worth more than those of a longer one.
                parent = group.key(keys[at - 1]) if at and isinstance(group, Group) else None
                mine = list(map(group.key, keys[at:until]))
                storing = self._calls.submit(self._cache(n).store, mine, self._places(n, piece), parent=parent)
                try:
                    storing.result()
                except Error as error:
                    logger.warning("kvhoist: %d blocks of a prefix were not stored: %s", until - at, error)
                    return
                finally:
                    # Where this thread is interrupted, it goes on to read the staging memory.
                    wait([storing])
                for key in keys[at:until]:
                    self._bad[n].pop(key, None)

    def _pieces(
        self, n: int, first: int, last: int, room: int, places: Iterator[int]
    ) -> Iterable[tuple[int, int, torch.Tensor]]:
        """Ranges of blocks that fit into so many bytes, each with those at the next place of the staging memory."""
        nbytes = self.block_bytes[n]
        most = room // nbytes
        for at in range(first, last, most):
            until, begin = min(at + most, last), next(places)
            yield at, until, self.staging[begin : begin + (until - at) * nbytes].view(until - at, nbytes)

    def _places(self, n: int, piece: torch.Tensor) -> list[tuple[int, int]]:
        nbytes = self.block_bytes[n]
        return [(piece.data_ptr() + at * nbytes, nbytes) for at in range(len(piece))]

    def _settle(self) -> None:
        """Waits for what the device does with the staging memory: the caches have streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Writes what is dirty and closes the stores. Raises the first error when all are closed. Again: the same."""
        with self.lock:
            self._calls.shutdown()
        for region in self._regions:
            region.unregister()
        self._regions = []
        close_all(self.caches)


def _budget(settings: Mapping[str, Any], share: float) -> dict[str, Any]:
    """What of the settings limits the writes of all stores together: a store's share of it."""
    budget: dict[str, Any] = {}
    if (nbytes := settings.get("write_budget")) is not None:
        budget["write_budget"] = int(parse_bytes(nbytes, "write_budget") * share)
    # The caches refuse what is no number.
    if isinstance(writes := settings.get("drive_writes_per_day"), (int, float)):
        budget["drive_writes_per_day"] = writes * share
    return budget


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
