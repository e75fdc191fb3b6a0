"""Chunks kept by a node's service: one space for all replicas of a model on the node. Needs no engine."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Any, Callable, Collection, Iterable, Mapping

from ._native import chunk_keys
from .chunks import ChunkJobs, Place
from .client import connect, mapped_from
from .config import HiCacheConfig
from .errors import Error
from .hicache_service import Keeper

logger = logging.getLogger(__name__)

#: A call of the scheduler waits no longer for the service; what it asked for is then a miss.
_ASK_MS = 1000

#: Seconds without questions after one that failed.
_AWAY_S = 1.0

#: Loads and stores have no deadline: after one, the service could still write to the engine's memory.
_NO_DEADLINE_MS = 86_400_000

_BOUNCE_BYTES_MAX = 256 << 20


class SharedChunkStore(ChunkJobs):
    """As `ChunkStore`, with the store in a service's space. Replicas with the same `Place` but their name share it."""

    def __init__(self, config: HiCacheConfig, place: Place, chunk_bytes: int, memory: Any) -> None:
        """Connects, and lends the service the memory. `memory` is a writable buffer object, kept until `close`."""
        self._keeper = Keeper(config)
        self.directories = [self._keeper.socket]
        options = dict(
            space=replace(place, replica="shared").namespace(), block_bytes=chunk_bytes, capacity=config.capacity,
            host_bytes=config.host_bytes, bounce_bytes=max(chunk_bytes, min(config.host_bytes, _BOUNCE_BYTES_MAX)),
        )  # fmt: skip
        cache = connect(self._keeper.socket, **options, deadline_ms=_NO_DEADLINE_MS)
        try:
            self._index = connect(self._keeper.socket, **options, deadline_ms=_ASK_MS)
        except BaseException:
            cache.close()
            raise
        self._away_until = 0.0
        self._figures: dict[str, Any] = {}
        self._step: StepAnswers | None = None
        try:
            self.region = self._lend(cache, memory)
            super().__init__(cache, chunk_bytes)
        except BaseException:
            self._index.close()
            cache.close()
            raise

    def _lend(self, cache: Any, memory: Any) -> Any:
        """Registers the memory: with the file that it is mapped from, if the service can map that."""
        fd = _file_of(memory)
        try:
            region = cache.register_host(memory, pin=True, fd=fd)
        finally:
            if fd is not None:
                os.close(fd)
        if region.copied:
            logger.warning("kvhoist: the service cannot map the engine's memory: each chunk is copied once more")
        return region

    def goes_straight(self) -> bool:
        """Whether chunks go between drive and memory without a copy."""
        return not self.region.copied

    # Lookup

    def answers(
        self,
        resident: Any,
        absent: Any,
        known: dict[bytes, Any],
        prefix: Callable[[Any], Collection[bytes]] = lambda _context: (),
    ) -> Callable[[bytes, Any], Any]:
        """As `Jobs.answers`: one question for all keys of a request in a step, which `prefix` names."""
        self._step = StepAnswers(self.contains_each, resident, absent, known, prefix)
        return self._step.answer

    def step_ended(self) -> None:
        """Forgets the answers of this step: replicas store chunks, too."""
        if self._step is not None:
            self._step.forget()

    def contains(self, name: bytes) -> bool:
        """Whether one chunk is there. Asks the service."""
        return self.contains_each([name])[0]

    def contains_each(self, names: list[bytes]) -> list[bool]:
        """Which chunks are there; none while the service does not answer."""
        found = self._asked(lambda: self._index.contains_each(chunk_keys(names)))
        return [False] * len(names) if found is None else found

    def touch(self, names: Iterable[bytes]) -> None:
        """Counts a use of chunks, given in the order of their prefix."""
        keys = chunk_keys(list(names))
        self._asked(lambda: self._index.touch(keys))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """An answer of the service; None while it is away."""
        if time.monotonic() < self._away_until:
            return None
        try:
            return ask()
        except Error as error:
            self._away_until = time.monotonic() + _AWAY_S
            self._keeper.missed()
            logger.warning("kvhoist: the service does not answer: %s", error)
            return None

    # Figures

    def figures(self) -> Mapping[str, Any]:
        """The space's figures, of all replicas; the last ones while the service does not answer."""
        found = self._asked(self._index.stats)
        if found is not None:
            self._figures = {**found, "disk_retired": found["disk_trouble"], "disk_read_only": None}
        if not self._figures:
            return _NO_FIGURES
        return self._figures

    def description(self) -> str:
        """Where chunks are, for the line in the log at the start."""
        return f"by the service at {self._keeper.socket}, space {self.cache.namespace}"

    def close(self) -> None:
        """Waits for the jobs, takes the memory back, and hangs up. Again: does nothing."""
        if not self._closed:
            super().close()
            self._index.close()


class StepAnswers:
    """Answers of one step of the scheduler, from one question a request."""

    def __init__(
        self,
        ask: Callable[[list[bytes]], list[bool]],
        resident: Any,
        absent: Any,
        known: dict[bytes, Any],
        prefix: Callable[[Any], Collection[bytes]],
    ) -> None:
        self._ask, self._resident, self._absent, self._known, self._prefix = ask, resident, absent, known, prefix
        self._found: dict[bytes, Any] = {}

    def answer(self, key: bytes, context: Any = None) -> Any:
        """The answer for one chunk. Never raises."""
        answer = self._known.get(key)
        if answer is None:
            answer = self._found.get(key)
        return self._look_up(key, context) if answer is None else answer

    def _look_up(self, key: bytes, context: Any) -> Any:
        names = [key]
        if context is not None:
            names += [name for name in self._prefix(context) if name != key and name not in self._found]
        for name, there in zip(names, self._ask(names)):
            self._found[name] = self._resident if there else self._absent
        return self._found[key]

    def forget(self) -> None:
        """Begins a new step."""
        self._found.clear()


_NO_FIGURES: Mapping[str, Any] = {
    **dict.fromkeys(("checksum_failures", "read_errors", "write_errors", "writes_refused"), 0),
    "tiers": {"disk": {"resident": 0, "slots": 0, "evictions": 0}},
    "disk_retired": None,
    "disk_read_only": None,
}


def _file_of(memory: Any) -> int | None:
    """A descriptor of the file that shared memory is mapped from; None if there is none."""
    import numpy

    view = numpy.asarray(memory)
    address, nbytes = view.__array_interface__["data"][0], view.nbytes
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _offset, _device, _inode, *path = line.split(maxsplit=5)
            start, stop = (int(number, 16) for number in span.split("-"))
            if start <= address < stop and access[3] == "s" and path:
                try:
                    fd = os.open(path[0].rstrip("\n"), os.O_RDWR | os.O_CLOEXEC)
                except OSError:
                    return None
                if mapped_from(address, nbytes, fd) is not None:
                    return fd
                os.close(fd)
                return None
    return None
