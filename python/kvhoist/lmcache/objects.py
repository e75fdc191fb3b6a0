"""Objects of any size on disk, in blocks of one size, moved by asynchronous tasks: the base of the LMCache adapter.

Needs no engine. An object is a sequence of blocks; the last one is filled up with zeros. An object is stored when all
of its blocks are.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

from .._jobs import Ended, JobTable, Submission
from .._store_settings import StoreSettings
from .._stores import Place, open_store
from .._values import config_error
from ..cache import slot_bytes
from ..client import SharedMemory
from ..errors import UnavailableError
from ..service.space import ServiceSpace

logger = logging.getLogger(__name__)

#: Most submissions under way: a task has one, or one for each of its chains.
SUBMISSIONS_MAX = 65_536

#: Bytes of a key that are the object's digest; the rest is the number of the block.
DIGEST_BYTES = 28

#: Seconds between log lines about a wait for tasks.
_LONG_WAIT_S = 10


@dataclass(frozen=True)
class StoredObject:
    """An object's name, of `DIGEST_BYTES`, and its size."""

    digest: bytes
    nbytes: int


class ObjectStore:
    """One engine's memory, registered once, its store on disk or a service's space, and the tasks between the two.

    Methods raise, and may be called from any thread. A thread of the store, or the one that submits, calls `ended` with
    each task that has ended, whose names are the places of its objects; it must not call `close`.
    """

    def __init__(
        self,
        config: StoreSettings,
        place: Place,
        block_bytes: int,
        memory: Sequence[tuple[int, int, bool]],
        ended: Callable[[Ended], None],
    ) -> None:
        """Opens the store. `memory`: address, bytes, and whether the ring pins it; it stays mapped until `close` has
        returned."""
        if slot_bytes(block_bytes) != block_bytes:
            raise config_error("block_bytes", block_bytes, "a multiple of 4096 bytes")
        self.block_bytes = block_bytes
        self.directories = place.directories(config.path)
        if config.service == "off":
            self.cache: Any = open_store(config, place, block_bytes)
        else:
            self.cache = ServiceSpace(config, place.namespace(), block_bytes)
            self.directories = [self.cache.socket]
        try:
            self._regions = [self.cache.register_host(address, nbytes, pin=pin) for address, nbytes, pin in memory]
            # The rest of an object's last block is written from the first, and read into the second.
            self._spare = SharedMemory(2 * block_bytes)
            region = self.cache.register_host(self._spare.view if config.service == "off" else self._spare)
            self._regions.append(region)
            self._zeros_at, self._rest_at = region.address, region.address + block_bytes
            self.jobs = JobTable(self.cache.queue(SUBMISSIONS_MAX))
        except BaseException:
            self.cache.close()
            raise
        if any(getattr(region, "copied", False) for region in self._regions[: len(memory)]):
            logger.warning("kvhoist: the service cannot map the engine's memory: each block is copied once more")
        self._edges = [region.address for region in self._regions[1 : len(memory)]]
        self.pinned = sum(region.nbytes for region in self._regions[: len(memory)] if region.pinned)
        self._ended = ended
        #: Guards `jobs`: what is submitted is in the table before its end is taken.
        self._lock = threading.Lock()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._relay, name="kvhoist-objects", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake)
            self.cache.close()
            raise UnavailableError(
                f"thread: none could be started to report ended tasks: {error}; raise `ulimit -u`, or the container's "
                "limit of processes"
            ) from error

    # Lookup

    def blocks(self, nbytes: int) -> int:
        """Blocks of an object of so many bytes."""
        return -(-nbytes // self.block_bytes)

    def keys(self, stored: StoredObject) -> list[bytes]:
        """The keys of an object's blocks."""
        return [stored.digest + number for number in _numbers(self.blocks(stored.nbytes))]

    def contains_each(self, objects: Sequence[StoredObject]) -> list[bool]:
        """Which objects are stored. No I/O."""
        keys = [self.keys(one) for one in objects]
        found = iter(self.cache.contains_each([key for some in keys for key in some]))
        # A list: `found` moves on by all blocks of an object, also behind a missing one.
        return [bool(some) and all([next(found) for _ in some]) for some in keys]

    def starts_each(self, objects: Sequence[StoredObject]) -> list[bool]:
        """Of which objects the first block is stored. No I/O."""
        return list(self.cache.contains_each([one.digest + _numbers(1)[0] for one in objects]))

    def touch(self, objects: Sequence[StoredObject]) -> None:
        """Counts a use of objects, given in the order of their prefix. No I/O."""
        self.cache.touch([key for one in objects for key in self.keys(one)])

    def remove(self, stored: StoredObject) -> bool:
        """Forgets an object; True if any block of it was stored."""
        # From its end: the rest of the prefix stays usable.
        return any([self.cache.remove(key) for key in reversed(self.keys(stored))])

    # Tasks

    def submit_load(self, task_id: int, objects: Sequence[StoredObject], addresses: Sequence[int]) -> None:
        """Begins to read objects to their addresses in the memory."""
        self._submit(task_id, True, [(None, list(zip(range(len(objects)), objects, addresses)))])

    def submit_store(
        self,
        task_id: int,
        objects: Sequence[StoredObject],
        addresses: Sequence[int],
        after: Sequence[StoredObject | None],
    ) -> None:
        """Begins to store objects from their addresses. `after`: the object that each follows in its prefix."""
        chains: list[tuple[StoredObject | None, list]] = []
        last = None
        for n, (one, address, before) in enumerate(zip(objects, addresses, after)):
            if before is None or before != last:
                chains.append((before, []))
            chains[-1][1].append((n, one, address))
            last = one
        self._submit(task_id, False, chains)

    def _submit(self, task_id: int, is_load: bool, chains: Iterable[tuple]) -> None:
        """A submission for each chain. The task ends when all have ended or could not begin."""
        submissions = []
        for before, chain in chains:
            blocks = [self.blocks(one.nbytes) for _, one, _ in chain]
            submit = functools.partial(self._begin, is_load, before, chain)
            submissions.append(Submission([n for n, *_ in chain], submit, blocks))
        with self._lock:
            if self._closed:
                raise ValueError("the store is closed")
            self.jobs.begin(task_id, is_load, submissions)
            ended = self.jobs.take()
        self._tell(ended)

    def _begin(self, is_load: bool, before: StoredObject | None, chain: list[tuple], queue: Any) -> int:
        keys, blocks = [], []
        for _, one, address in chain:
            keys += self.keys(one)
            blocks += self._places(address, one.nbytes, self._rest_at if is_load else self._zeros_at)
        if is_load:
            return queue.submit_load(keys, blocks)
        return queue.submit_store(keys, blocks, None if before is None else self.keys(before)[-1])

    def _places(self, address: int, nbytes: int, rest_at: int) -> list:
        """Where the blocks of an object lie: (address, bytes), or a list of these."""
        size, end = self.block_bytes, address + nbytes
        places: list = [(at, size) for at in range(address, end - size + 1, size)]
        if nbytes % size:
            used = nbytes % size
            places.append([(end - used, used), (rest_at, size - used)])
        for edge in self._edges:
            if address < edge < end and (edge - address) % size:
                # A segment lies in one region.
                n = (edge - address) // size
                places[n] = [part for segment in _parts(places[n]) for part in _cut(segment, edge)]
        return places

    def _relay(self) -> None:
        """The thread: reports ended tasks until the store is closed and no task is under way."""
        poll = select.poll()
        poll.register(self.jobs.queue.event_fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(fd)
            with self._lock:
                self.jobs.drain()
                ended = self.jobs.take()
                over = self._closed and not self.jobs.under_way
            self._tell(ended)
            if over:
                return

    def _tell(self, ended: list[Ended]) -> None:
        for one in ended:
            try:
                self._ended(one)
            except Exception:
                logger.exception("kvhoist: the end of task %d could not be reported", one.job_id)

    @property
    def tasks(self) -> tuple[int, int]:
        """Stores and loads under way."""
        with self._lock:
            return len(self.jobs.under_way) - self.jobs.loads, self.jobs.loads

    def close(self) -> None:
        """Waits for the tasks, unregisters the memory, and closes the store. Again: waits for the same."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            os.eventfd_write(self._wake, 1)
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LONG_WAIT_S)
            if self._thread.is_alive():
                waited = time.monotonic() - began
                logger.warning("kvhoist: %d tasks still under way after %.0f s", len(self.jobs.under_way), waited)
        if first:
            os.close(self._wake)
        try:
            for region in self._regions:
                region.unregister()
        finally:
            self.cache.close()


@functools.lru_cache(maxsize=64)
def _numbers(blocks: int) -> tuple[bytes, ...]:
    """The ends of an object's keys: the numbers of its blocks."""
    return tuple(n.to_bytes(4, "big") for n in range(blocks))


def _parts(place: tuple | list) -> list[tuple[int, int]]:
    return [place] if isinstance(place, tuple) else place


def _cut(segment: tuple[int, int], edge: int) -> list[tuple[int, int]]:
    address, nbytes = segment
    if not address < edge < address + nbytes:
        return [segment]
    return [(address, edge - address), (edge, address + nbytes - edge)]
