"""The worker's half of `kvhoist.vllm.KvhoistOffloadingSpec`: jobs between the KV cache on the GPU and NVMe."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, LookupResult, OffloadingWorker, TransferResult

from .._guard import Failures
from .._misses import Misses
from .device_chunks import DeviceChunks, Part

logger = logging.getLogger(__name__)

#: Most keys of failed loads that are remembered as a miss until they are stored again.
_LOST_MAX = 65_536

_MISS = LookupResult.MISS


class Keys(LoadStoreSpec):
    """The chunks of a job, by their names in the store."""

    def __init__(self, names: list[bytes], resets: int, parents: Mapping[bytes, bytes | None] | None = None) -> None:
        #: How often the cache had been reset when the job was made.
        self.resets = resets
        #: In the order of the job's blocks.
        self.names = names
        #: For the first chunk of each group: the chunk before it in the prefix.
        self.parents = parents or {}
        #: For a store beside sliding windows or states: the blocks of each chunk, 0 for one that is gone, `ABSENT` for
        #: one that no load asks for.
        self.blocks: dict[bytes, list[int]] | None = None


class Opened:
    """State that the worker and the manager of one engine share: both are in one process."""

    #: By engine_id.
    all: dict[str, Opened] = {}

    def __init__(self, store: DeviceChunks) -> None:
        self.store = store
        #: Answers that override the index: HIT_PENDING for a name while it is stored, MISS after its load failed, until
        #: it is stored again.
        self.known: dict[bytes, LookupResult] = {}
        #: How often the cache was reset. vLLM begins a store with the next step, and may sleep in between, after which
        #: the blocks of a job from before hold anything.
        self.resets = 0
        self.failures = Failures(logger, "chunks")
        self.misses = Misses(store.cache)

    def loads_failed(self, names: Collection[bytes]) -> None:
        """Makes chunks a miss, so that no request retries a load that always fails."""
        self.known.update(dict.fromkeys(names, _MISS))
        if len(self.known) > _LOST_MAX:
            lost = (name for name, answer in self.known.items() if answer is _MISS)
            for name in list(itertools.islice(lost, len(self.known) - _LOST_MAX)):
                del self.known[name]


class KvhoistWorker(OffloadingWorker):
    """Moves chunks between the GPU and NVMe. Never raises, and reports every job as a success, because vLLM's worker
    asserts it.

    `take_failed` has the loads that failed; the connector reports them to the scheduler.
    """

    def __init__(self, opened: Opened, group_ids: list[int], engine_id: str) -> None:
        self._opened, self._store = opened, opened.store
        self._guarded, self._counters = opened.failures.guarded, opened.failures.counters
        self._groups = {group.to_bytes(4, "big"): at for at, group in enumerate(group_ids)}
        self._engine_id = engine_id
        #: For each load under way: its blocks, and its parts once it has begun.
        self._targets: dict[int, tuple[Any, list[Part]]] = {}
        self._failed: dict[int, set[int]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Keys) -> bool:
        """Begins a store, after the work that the GPU's stream holds now."""
        return self._begun(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: Keys, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        """Begins a load, after the work that the GPU's stream holds now: that may still write to the blocks."""
        return self._begun(job_id, dst_spec, src_spec, is_load=True)

    def _begun(self, job_id: int, blocks: GPULoadStoreSpec, keys: Keys, is_load: bool) -> bool:
        """Begins a job. A job that cannot begin fails, with every key."""
        method = "submit_load" if is_load else "submit_store"
        if keys.resets != self._opened.resets:
            logger.debug("kvhoist: a job that was made before a reset does not begin: %d chunks", len(keys.names))
            if is_load:
                # The request is computed. No chunk has failed, so none is counted.
                self._failed[job_id] = set(map(int, blocks.block_ids))
            self._store.fail(job_id, [], is_load)
            return True
        if is_load:
            self._targets[job_id] = (blocks.block_ids, [])
        begin = self._guarded(method, self, lambda: self._begin(job_id, blocks, keys, is_load), len(keys.names))
        if begin is self:
            self._store.fail(job_id, keys.names, is_load)
        return True

    def _begin(self, job_id: int, blocks: GPULoadStoreSpec, keys: Keys, is_load: bool) -> None:
        parts = self._parts(blocks, keys)
        if is_load:
            self._targets[job_id] = (blocks.block_ids, parts)
        submit = self._store.submit_load if is_load else self._store.submit_store
        submit(job_id, parts, self._now())

    def _now(self) -> Any:
        """An event in the stream of the model; None without a CUDA device."""
        if self._store.device is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._store.device))
        return event

    def _parts(self, blocks: GPULoadStoreSpec, keys: Keys) -> list[Part]:
        """A job's chunks and blocks by their groups."""
        names: dict[int, list[bytes]] = {}
        for name in keys.names:
            names.setdefault(self._groups[name[-4:]], []).append(name)
        parts, start = [], 0
        for group, (count, index) in enumerate(zip(blocks.group_sizes, blocks.block_indices)):
            ids = blocks.block_ids[start : start + count]
            start += count
            chunks = names.pop(group, [])
            each = self._store.groups[group].blocks_per_chunk
            skip = int(index) % each
            if keys.blocks is not None and (skip or count < len(chunks) * each):
                # vLLM leaves out blocks that are gone, and does not say which. Another request may load them.
                known = [block for name in chunks for block in keys.blocks.get(name, ()) if block > 0]
                if known != list(map(int, ids)):
                    raise ValueError(f"found blocks {known} of {len(chunks)} chunks, expected vLLM's, {list(ids)}")
                chunks = [name for name in chunks if 0 not in keys.blocks[name]]
                ids, skip = [block for name in chunks for block in keys.blocks[name]], 0
            if chunks or len(ids):
                parts.append(Part(group, chunks, ids, skip, keys.parents.get(chunks[0]) if chunks else None))
        if names or start != len(blocks.block_ids):
            raise ValueError(f"found chunks of groups {sorted(names)} without blocks, expected some for each")
        return parts

    def _blocks_of(self, part: Part) -> list[tuple[bytes, list[int]]]:
        """Which blocks each chunk of a part is in."""
        each = self._store.groups[part.group].blocks_per_chunk
        ids = [int(block) for block in part.blocks]
        starts = [max(at * each - part.skip, 0) for at in range(len(part.keys) + 1)]
        return [(name, ids[start:end]) for name, start, end in zip(part.keys, starts, starts[1:])]

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended, each as a success."""
        ended = self._guarded("get_finished", [], self._store.finished)
        # Each on its own: vLLM waits for ever for a job whose end is not reported.
        return [
            self._guarded("get_finished", TransferResult(job.job_id, True), lambda job=job: self._result(job))
            for job in ended
        ]

    def _result(self, job: Any) -> TransferResult:
        blocks, parts = self._targets.pop(job.job_id, ((), []))
        if job.failed:
            method = "load" if job.is_load else "store"
            why = next((error for error in job.failed.values() if error is not False), None)
            why = why or self._opened.misses.why()
            self._opened.failures.failed(method, why, len(job.failed))
            self._counters[f"{method} chunks"] += len(job.failed)
        if job.is_load and job.failed:
            self._opened.loads_failed(job.failed)
            targets = {name: ids for part in parts for name, ids in self._blocks_of(part)}
            # All blocks of a load that did not begin.
            lost = [targets[name] for name in job.failed] if parts else [map(int, blocks)]
            self._failed[job.job_id] = {block for ids in lost for block in ids}
        moved = len(job.good) * self._store.chunk_bytes
        return TransferResult(job.job_id, True, moved, job.seconds)

    def take_failed(self) -> dict[int, set[int]]:
        """The blocks of each load that `get_finished` returned since the last call and that failed."""
        failed, self._failed = self._failed, {}
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Returns when these jobs use the GPU's memory no longer."""
        self._guarded("wait", None, lambda: self._store.wait(job_ids))

    def shutdown(self) -> None:
        """Waits for the jobs, and closes the store."""
        if Opened.all.get(self._engine_id) is self._opened:
            del Opened.all[self._engine_id]
        self._guarded("shutdown", None, self._store.close)
