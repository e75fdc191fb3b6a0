"""Chunks of an engine's KV cache in device memory, and their store on disk. Needs no engine.

A block of the KV cache has a page in each tensor of its group. A chunk is a number of blocks, so it has blocks x pages
segments, in the order of the blocks. Chunks of groups with fewer bytes are padded to the size of the largest.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Collection, Sequence

import numpy

from .._folders import make_folder
from .._native import chunk_keys
from .._stores import Place, open_store
from ..cache import Cache, slot_bytes
from .cufile_probe import probe
from .device_settings import DeviceSettings
from .jobs import ChunkJobs

logger = logging.getLogger(__name__)

#: In place of a block that a store has zeros for.
ABSENT = -1

#: Chunk-sized places that loads write unwanted pages to, used in turn.
_SPARES = 4


@dataclass(frozen=True)
class Page:
    """One block's bytes in one tensor: block `n` has `nbytes` at `address + n * stride`."""

    address: int
    stride: int
    nbytes: int


@dataclass(frozen=True)
class Group:
    """How the chunks of one KV cache group are cut."""

    pages: tuple[Page, ...]
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.blocks_per_chunk * sum(page.nbytes for page in self.pages)


@dataclass(frozen=True)
class Part:
    """The chunks of one group in a job, and their blocks of the KV cache.

    `blocks` are the blocks of all chunks in order, from block `skip` of the first chunk on. A store writes zeros for
    those before it and those that are `ABSENT`. The last chunk of a load may end early.
    """

    group: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    skip: int = 0
    #: The chunk before the first one.
    parent: bytes | None = None


class DeviceChunks(ChunkJobs):
    """One KV cache in device memory, its store on disk, and the jobs between the two.

    As `ChunkJobs`; `wait` and `close` wait, too. A job with an event of a device's stream is begun by a thread once that has
    happened: an engine calls once a step, which may take a second. Events come in the order of their stream.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        place: Place,
        groups: Sequence[Group],
        regions: Collection[tuple[int, int]],
        device: int | None,
        spare: Callable[[int], Any],
    ) -> None:
        """Opens the store.

        ``regions`` are (address, bytes) of all memory that pages lie in; it stays allocated until `close`. ``device``
        is the CUDA device's number, or None for host memory in its place. ``spare`` allocates zeros on the device, as
        an object with `data_ptr()`.
        """
        self.settings, self.groups, self.device = settings, tuple(groups), device
        self.kv_cache_bytes = sum(nbytes for _, nbytes in regions)
        self.chunk_bytes = max(group.chunk_bytes for group in self.groups)
        self.directories = place.directories(settings.store.path)
        cache = self._open(place)
        try:
            self._spare = None
            self._zeros, self._unwanted = 0, [0]
            if any(group.blocks_per_chunk > 1 or group.chunk_bytes < self.chunk_bytes for group in self.groups):
                self._spare = spare((1 + _SPARES) * self.chunk_bytes)
                self._zeros = self._spare.data_ptr()
                self._unwanted = [self._zeros + n * self.chunk_bytes for n in range(1, 1 + _SPARES)]
                regions = [*regions, (self._zeros, (1 + _SPARES) * self.chunk_bytes)]
            self.regions = [cache.register_device(address, nbytes) for address, nbytes in regions]
            super().__init__(cache)
        except BaseException:
            cache.close()
            raise
        self._cuts = [self._cut(group) for group in self.groups]
        self._turn = 0
        #: Begins jobs behind their events.
        self._begins = ThreadPoolExecutor(1, "kvhoist-begin")
        self._lock = threading.Lock()
        #: Those that it has not begun.
        self._waiting: dict[int, Future[None]] = {}
        self._closed = False

    def _open(self, place: Place) -> Cache:
        """Opens the store with its route. `auto` takes libcufile if its self-test shows a direct path."""
        settings, cufile, self._why_bounce = self.settings, "off", ""
        if settings.route == "cufile":
            cufile = "on"
        elif settings.route == "auto" and self.device is not None:
            paths = settings.store.path
            for path in paths:
                make_folder(path, settings.store.capacity // len(paths))
            direct, self._why_bounce = probe(paths, self.device)
            cufile = "auto" if direct else "off"
        # libcufile moves chunks between the drives and these; without it, the cache keeps nothing in device memory.
        staged = 1
        if cufile != "off":
            in_flight = settings.store.read_bytes_in_flight_max + settings.store.write_bytes_in_flight_max
            staged = max(in_flight // slot_bytes(self.chunk_bytes), 2)
        return open_store(
            settings.store, place, self.chunk_bytes, device="simulated" if self.device is None else "cuda",
            device_ordinal=self.device or 0, device_blocks=staged, copy_blocks_max=settings.copy_blocks_max,
            cufile=cufile,
        )  # fmt: skip

    def _cut(self, group: Group) -> tuple:
        """How the segments of a group's chunks are cut: addresses, strides, offsets in the chunk, bytes."""
        sizes = [page.nbytes for page in group.pages] * group.blocks_per_chunk
        filler = self.chunk_bytes - sum(sizes)
        offsets = numpy.concatenate(([0], numpy.cumsum(sizes)[:-1])).astype(numpy.int64)
        return (
            numpy.array([page.address for page in group.pages], dtype=numpy.int64),
            numpy.array([page.stride for page in group.pages], dtype=numpy.int64),
            offsets,
            sizes + [filler] * (filler > 0),
        )

    def _addresses(self, part: Part, is_load: bool) -> tuple[Any, list[int]]:
        """The addresses of all segments of a part's chunks, and the bytes of each segment of a chunk."""
        group, (bases, strides, offsets, sizes) = self.groups[part.group], self._cuts[part.group]
        count = len(part.keys)
        end = part.skip + len(part.blocks)
        # The last chunk of a load may be loaded in part. A store of fewer blocks has a hole somewhere.
        least = (count - 1) * group.blocks_per_chunk + 1 if is_load else count * group.blocks_per_chunk
        if not least <= end <= count * group.blocks_per_chunk:
            raise ValueError(
                f"found {len(part.blocks)} blocks from block {part.skip} on, expected those of {count} chunks of "
                f"{group.blocks_per_chunk}"
            )
        blocks = numpy.full(count * group.blocks_per_chunk, ABSENT, dtype=numpy.int64)
        blocks[part.skip : end] = part.blocks
        addresses = (bases + blocks[:, None] * strides).reshape(count, -1)
        spare = self._zeros
        if is_load:
            self._turn = (self._turn + 1) % len(self._unwanted)
            spare = self._unwanted[self._turn]
        if (blocks == ABSENT).any():
            absent = numpy.repeat(blocks == ABSENT, len(group.pages)).reshape(count, -1)
            addresses = numpy.where(absent, spare + offsets, addresses)
        if len(sizes) > len(offsets):
            filler = numpy.full((count, 1), spare + group.chunk_bytes, dtype=numpy.int64)
            addresses = numpy.concatenate((addresses, filler), axis=1)
        return numpy.ascontiguousarray(addresses, dtype=numpy.int64), sizes

    # Jobs

    def submit_load(self, job_id: int, parts: Sequence[Part], after: Any = None) -> None:
        """Begins to load chunks, after an event of the device."""
        self._submit(job_id, True, parts, after)

    def submit_store(self, job_id: int, parts: Sequence[Part], after: Any = None) -> None:
        """Begins to store chunks, after an event of the device."""
        self._submit(job_id, False, parts, after)

    def _submit(self, job_id: int, is_load: bool, parts: Sequence[Part], after: Any) -> None:
        submissions = [(part.keys, self._submission(part, is_load)) for part in parts]
        if after is None:
            return self.begin(job_id, is_load, submissions)
        with self._lock:
            self._waiting[job_id] = self._begins.submit(self._begin_behind, after, job_id, is_load, submissions)

    def _begin_behind(self, after: Any, job_id: int, is_load: bool, submissions: list) -> None:
        """Begins a job when its event has happened. One whose event cannot be waited for fails."""
        try:
            after.synchronize()
        except Exception as error:
            logger.warning("kvhoist: an event of the device cannot be waited for: %s", error)
            self.fail(job_id, [key for keys, _ in submissions for key in keys], is_load)
        else:
            self.begin(job_id, is_load, submissions)
        with self._lock:
            del self._waiting[job_id]

    def _submission(self, part: Part, is_load: bool) -> Callable[[Any], int]:
        def submit(queue: Any) -> int:
            addresses, sizes = self._addresses(part, is_load)
            keys = chunk_keys(list(part.keys))
            if is_load:
                return queue.submit_load_pages(keys, addresses, sizes)
            parent = None if part.parent is None else chunk_keys([part.parent])[0]
            return queue.submit_store_pages(keys, addresses, sizes, parent)

        return submit

    @property
    def under_way(self) -> int:
        """Jobs that have not ended."""
        with self._lock:
            return len({*self._waiting, *self.jobs.under_way})

    def wait(self, job_ids: Collection[int] | None = None) -> None:
        """Returns when these jobs, or all, no longer use the device's memory."""
        with self._lock:
            waiting = [begun for job_id, begun in self._waiting.items() if job_ids is None or job_id in job_ids]
        for begun in waiting:
            begun.result()
        self.drain(job_ids)

    def close(self) -> None:
        """Waits for the jobs, unregisters the memory, and closes the store. Again: does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._begins.shutdown()
            self.drain()
        finally:
            for region in self.regions:
                region.unregister()
            self.cache.close()
            self._spare = None

    def route(self) -> str:
        """The active route, and why it is not another: it falls back to `bounce` if libcufile keeps failing."""
        stats, settings = self.cache.stats(), self.settings
        if stats["cufile"]:
            return f"cufile ({stats['cufile_reason']})"
        why = self._why_bounce or (stats["cufile_reason"] if settings.route != "bounce" else "")
        asked = f"{settings.route_from} is {settings.route}" + (f": {why}" if why else "")
        return f"bounce (through pinned host memory, {settings.store.host_bytes >> 20} MiB of it; {asked})"

    def described(self) -> str:
        """The active route and the sizes, for the line in the log at the start."""
        stats, store = self.cache.stats(), self.settings.store
        disk = stats["tiers"]["disk"]
        segments = ", ".join(str(len(cut[3])) for cut in self._cuts)
        return (
            f"chunks of {self.chunk_bytes} bytes in {segments} segments, {len(self.regions)} regions registered; "
            f"route {self.route()}; {disk['slots']} slots in {self.directories}, {disk['resident']} resident; "
            f"storage {stats['storage']}, direct I/O {stats['direct_io']}; in flight at most "
            f"{store.read_bytes_in_flight_max >> 20} MiB of reads, {store.write_bytes_in_flight_max >> 20} MiB of "
            "writes"
        )
