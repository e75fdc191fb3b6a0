"""Chunks of an engine's host memory on disk, moved by asynchronous jobs: the base of the vLLM tier. Needs no engine."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from .._native import chunk_keys
from .._store_settings import StoreSettings
from .._stores import Place, open_store
from .jobs import ChunkJobs


class HostChunks(ChunkJobs):
    """The chunks of one engine's memory, which is one registered region.

    As `ChunkJobs`; `close` waits, too.
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


class ChunkStore(HostChunks):
    """One engine's memory, registered once, its own store on disk, and the jobs between the two."""

    def __init__(self, config: StoreSettings, place: Place, chunk_bytes: int, memory: Any) -> None:
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
