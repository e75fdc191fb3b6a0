"""Chunks of an engine's host memory on disk, moved by asynchronous jobs: the base of the vLLM tier. Needs no engine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Iterable, Mapping, Sequence

from . import figures
from ._native import chunk_keys
from .cache import Cache, slot_bytes, slots_on_each, store_bytes
from .config import DEFAULT_HOST_BYTES, HiCacheConfig, config_error
from .folders import make_store_folder
from .hicache import _slug

logger = logging.getLogger(__name__)

#: Most jobs under way. An engine has a few for each of its requests.
JOBS_MAX = 16_384

#: Host memory of a store whose chunks go straight between drive and engine. Unaligned chunks and write_back need more.
STRAIGHT_HOST_BYTES = 64 << 20

#: Seconds between log lines about a wait for jobs.
_LONG_WAIT_S = 10


def tier_settings(given: Mapping[str, Any]) -> HiCacheConfig:
    """Settings of a tier, checked: those of the HiCache backend without those of its pools."""
    given = dict(given)
    for name, why in (
        ("pool_shares", "the engine's memory is one pool"), ("capacity_total", "one store for all ranks has capacity"),
    ):  # fmt: skip
        if name in given:
            raise config_error(name, given[name], f"nothing: {why}")
    if "service" not in given and not os.environ.get("KVHOIST_SERVICE"):
        given["service"] = "off"
    if not {"host_bytes", "keep_in_host"} & given.keys() and not os.environ.get("KVHOIST_HOST_BYTES"):
        policy = given.get("write_policy") or os.environ.get("KVHOIST_WRITE_POLICY") or "write_through"
        given["host_bytes"] = STRAIGHT_HOST_BYTES if policy == "write_through" else DEFAULT_HOST_BYTES
    config = HiCacheConfig.load(given)
    if config.keep_in_host and config.service == "off":
        expected = "nothing, or a `service`: without one the engine's memory is the only tier of host memory"
        raise config_error("keep_in_host", given.get("keep_in_host", True), expected)
    return config


@dataclass
class Ended:
    """A job that has ended: each of its keys is in `good` or in `failed`."""

    job_id: int
    is_load: bool
    good: list
    #: The error of each other key; `False` for a key that was not found.
    failed: dict
    seconds: float


@dataclass
class _Job:
    is_load: bool
    started: float
    good: list = field(default_factory=list)
    failed: dict = field(default_factory=dict)
    #: The keys of each submission that has not ended.
    tickets: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where chunks are kept, by everything that their bytes depend on and that is not in their keys."""

    #: For people: the model and the replica.
    model: str
    replica: str
    #: Digested as JSON.
    identity: Mapping[str, Any]
    #: The number of this process among those of the model: which port of `metrics_port` is its own.
    rank: int = 0

    def digest(self) -> str:
        """64 hex characters."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True, default=str).encode()).hexdigest()

    def namespace(self) -> str:
        """The cache's namespace."""
        return f"{_slug(self.model)[:80]}/{_slug(self.replica)}/{self.digest()[:32]}"

    def directories(self, paths: Iterable[str]) -> list[str]:
        """A folder under each path."""
        name = f"{_slug(self.model)[:80]}-{self.digest()[:12]}"
        return [os.path.join(path, name, _slug(self.replica)) for path in paths]


def open_store(
    config: HiCacheConfig, place: Place, block_bytes: int, *, bypass_host: bool = True, **more: Any
) -> Cache:
    """Opens the cache of an engine with memory of its own, and serves its figures. `more` are further settings of the
    cache.

    `bypass_host`: the engine's memory is the host tier, and blocks that direct I/O can reach need no copy here.
    """
    directories, slot = place.directories(config.path), slot_bytes(block_bytes)
    slots = slots_on_each(config.capacity, len(directories), block_bytes)
    for path, directory in zip(config.path, directories):
        make_store_folder(path, directory, store_bytes(slots, block_bytes))
    figures.serve(config.metrics_port, place.rank)
    return Cache(
        directories,
        block_bytes=block_bytes,
        host_bytes=max(config.host_bytes, slot),
        capacity=config.capacity,
        namespace=place.namespace(),
        write_policy=config.write_policy,
        write_budget=config.write_budget,
        direct_io=config.direct_io,
        storage=config.storage,
        bypass_host=bypass_host,
        deadline_ms=config.deadline_ms,
        read_bytes_in_flight_max=config.read_bytes_in_flight_max,
        write_bytes_in_flight_max=config.write_bytes_in_flight_max,
        **more,
    )


class Jobs:
    """The chunks of a cache, and the jobs that move them.

    Methods raise, and the adapter handles it. Only `drain` waits. One thread at a time.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self._queue = cache.queue(JOBS_MAX)
        self._jobs: dict[int, _Job] = {}
        self._owner: dict[int, int] = {}
        self._ended: list[Ended] = []

    def contains(self, name: bytes) -> bool:
        """Whether one chunk is there. No I/O."""
        return self.cache.contains(*chunk_keys([name]))

    def answers(
        self,
        resident: Any,
        absent: Any,
        known: dict[bytes, Any],
        prefix: Callable[[Any], Collection[bytes]] | None = None,
    ) -> Callable[[bytes, Any], Any]:
        """A fast `contains` with the engine's own objects as answers, for every key of every prompt.

        Answers in `known` override the index. `prefix` names all keys of a request, for a store that asks for them at
        once.
        """
        return self.cache.answers(resident, absent, known).answer

    def touch(self, names: Iterable[bytes]) -> None:
        """Counts a use of chunks, given in the order of their prefix. No I/O."""
        self.cache.touch(chunk_keys(list(names)))

    def release(self, names: Iterable[bytes]) -> None:
        """Releases a chain, given in the order of its prefix. No I/O."""
        self.cache.release(chunk_keys(list(names)))

    def keep(self, names: Iterable[bytes], seconds: float) -> None:
        """Keeps a chain, given in the order of its prefix, for so many seconds. No I/O."""
        self.cache.keep(chunk_keys(list(names)), seconds)

    # Jobs

    def begin(self, job_id: int, is_load: bool, parts: Iterable[tuple[Sequence[bytes], Callable[[Any], int]]]) -> None:
        """Begins a job of submissions: (keys, function that submits them to a queue and returns the ticket).

        The job ends when all submissions have ended. A submission that cannot begin fails its keys.
        """
        job = self._jobs[job_id] = _Job(is_load, time.monotonic())
        for keys, submit in parts:
            try:
                ticket = submit(self._queue)
            except Exception as error:
                job.failed.update(dict.fromkeys(keys, error))
                continue
            job.tickets[ticket] = list(keys)
            self._owner[ticket] = job_id
        self._end_if_done(job_id, job)

    def fail(self, job_id: int, keys: Sequence[bytes], is_load: bool) -> None:
        """Ends a job that did not begin."""
        self._ended.append(Ended(job_id, is_load, [], dict.fromkeys(keys, "not begun"), 0.0))

    def finished(self) -> list[Ended]:
        """The jobs that have ended since the last call. Does not wait."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def _collect(self) -> None:
        for ticket, results in self._queue.drain():
            # Each on its own: an engine waits for ever for a job whose end is not reported.
            try:
                self._take(ticket, results)
            except Exception:
                logger.exception("kvhoist: the end of submission %d could not be taken", ticket)

    def _take(self, ticket: int, results: list) -> None:
        job_id = self._owner.pop(ticket)
        job = self._jobs[job_id]
        for key, result in zip(job.tickets.pop(ticket), results):
            if result is True:
                job.good.append(key)
            else:
                job.failed[key] = result
        self._end_if_done(job_id, job)

    def _end_if_done(self, job_id: int, job: _Job) -> None:
        if not job.tickets:
            del self._jobs[job_id]
            self._ended.append(Ended(job_id, job.is_load, job.good, job.failed, time.monotonic() - job.started))

    def drain(self, job_ids: Collection[int] | None = None) -> None:
        """Waits until none of these jobs is under way, or no job at all; `finished` has their results.

        It has no deadline: the drive may still write to the memory.
        """
        poll = select.poll()
        poll.register(self._queue.event_fd, select.POLLIN)
        waited = 0
        while True:
            self._collect()
            if not (self._jobs if job_ids is None else self._jobs.keys() & set(job_ids)):
                return
            if not poll.poll(_LONG_WAIT_S * 1000):
                waited += _LONG_WAIT_S
                logger.warning("kvhoist: %d jobs still under way after %d s", len(self._jobs), waited)


class ChunkJobs(Jobs):
    """The chunks of one engine's memory, which is one registered region.

    As `Jobs`; `close` waits, too.
    """

    region: Any
    #: Paths of the store, for people.
    directories: list[str]

    def __init__(self, cache: Any, chunk_bytes: int) -> None:
        super().__init__(cache)
        self.chunk_bytes = chunk_bytes
        self._closed = False

    def submit_load(self, job_id: int, keys: Sequence[bytes], offsets: Iterable[int]) -> None:
        """Begins to read chunks to their offsets in the memory."""
        self._begin(job_id, True, [(None, keys, offsets)])

    def submit_store(self, job_id: int, chains: Iterable[tuple[bytes | None, Sequence[bytes], Iterable[int]]]) -> None:
        """Begins to store chunks from their offsets: (parent of the first, keys in prefix order, offsets) a chain."""
        self._begin(job_id, False, chains)

    def _begin(self, job_id: int, is_load: bool, chains: Iterable) -> None:
        """A submission for each chain."""
        self.begin(job_id, is_load, [self._part(is_load, *chain) for chain in chains])

    def _part(self, is_load: bool, parent: bytes | None, keys: Sequence[bytes], offsets: Iterable[int]) -> tuple:
        keys = list(keys)

        def submit(queue: Any) -> int:
            base, size = self.region.address, self.chunk_bytes
            blocks = [(base + offset, size) for offset in offsets]
            if is_load:
                return queue.submit_load(chunk_keys(keys), blocks)
            return queue.submit_store(chunk_keys(keys), blocks, None if parent is None else chunk_keys([parent])[0])

        return keys, submit

    def close(self) -> None:
        """Waits for the jobs, unregisters the memory, and closes the store. Again: does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self.drain()
        finally:
            self.region.unregister()
            self.cache.close()


class ChunkStore(ChunkJobs):
    """One engine's memory, registered once, its own store on disk, and the jobs between the two."""

    def __init__(self, config: HiCacheConfig, place: Place, chunk_bytes: int, memory: Any) -> None:
        """Opens the store. `memory` is a writable buffer object, kept until `close`."""
        self.directories = place.directories(config.path)
        cache = open_store(config, place, chunk_bytes)
        try:
            self.region = cache.register_host(memory, pin=True)
            super().__init__(cache, chunk_bytes)
        except BaseException:
            cache.close()
            raise

    def goes_straight(self) -> bool:
        """Whether chunks go between drive and memory without a copy."""
        return self.region.address % 4096 == 0 and self.chunk_bytes % 4096 == 0

    def step_ended(self) -> None:
        """The index is asked for every key: nothing is remembered over a step."""

    def description(self) -> str:
        """Where chunks are, for the line in the log at the start."""
        stats = self.cache.stats()
        disk = stats["tiers"]["disk"]
        return (
            f"in {self.directories}: {disk['slots']} slots of {self.chunk_bytes}-byte chunks, {disk['resident']} "
            f"resident; storage {stats['storage']}, direct I/O {stats['direct_io']}"
        )
