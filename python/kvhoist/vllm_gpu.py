"""kvhoist as an offloading medium of vLLM's: the GPU's KV cache straight to and from NVMe, in the worker's process.

Use it as `kvhoist.vllm.KvhoistOffloadingSpec`, under `kvhoist.vllm.KvhoistConnector`. `docs/vllm.md` has the settings.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from .config import config_error
from .device_chunks import DeviceChunks, Group, Page, Part
from .device_settings import DeviceSettings, vllm_settings
from .failures import Failures
from .vllm import place_of, warn_of_version
from .vllm_figures import Figures, metric_definitions
from .vllm_prefix import Prefix, positions

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # Before vLLM tells hits apart by their source.
    CacheHitSource = None

logger = logging.getLogger(__name__)

#: Changes whenever stored chunks would be read differently.
FORMAT = "vllm-gpu-v1"

#: Keys that failed and are a miss until they are stored again, at most.
_LOST_MAX = 65_536

#: What vLLM calls this medium in its metrics.
_LABEL = "KvhoistOffloadingSpec"

_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING

#: Whether a connector that can tell of failed loads is being made.
failures_are_told: ContextVar[bool] = ContextVar("failures_are_told", default=False)

#: Whether vLLM takes failed requests, and not only failed blocks of a model with one KV cache group.
TAKES_FAILED_REQUESTS = hasattr(connector_base, "KVConnectorTransferResults")


class Keys(LoadStoreSpec):
    """Chunks of the store that a job moves, as chains: (parent of the first, keys in prefix order)."""

    def __init__(self, names: list[bytes], parents: Mapping[bytes, bytes | None] | None = None) -> None:
        #: In the order of the job's blocks.
        self.names = names
        #: The chunk before each one that begins a group's.
        self.parents = parents or {}


class Opened:
    """What the worker and the manager of one engine share: they are in one process."""

    #: By engine_id.
    all: dict[str, Opened] = {}

    def __init__(self, store: DeviceChunks) -> None:
        self.store = store
        #: Names that are answered for otherwise than the index has it: HIT_PENDING for those that are being stored,
        #: MISS for those whose last load failed, until they are stored again.
        self.known: dict[bytes, LookupResult] = {}
        self.failures = Failures(logger, "chunks")

    def loads_failed(self, names: Collection[bytes]) -> None:
        """Makes chunks a miss: a load that fails for ever must not be tried for ever."""
        self.known.update(dict.fromkeys(names, _MISS))
        if len(self.known) > _LOST_MAX:
            lost = (name for name, answer in self.known.items() if answer is _MISS)
            for name in list(itertools.islice(lost, len(self.known) - _LOST_MAX)):
                del self.known[name]


class KvhoistOffloadingSpec(OffloadingSpec):
    """GPU memory to NVMe, for an engine of one GPU. Raises what is wrong with its settings when it is made."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """This medium's metrics beside those that vLLM has."""
        return metric_definitions(
            loads_failed="Chunks that could not be loaded; vLLM computed them again.",
            stores_failed="Chunks that could not be stored.",
            stores_dropped="Chunks that were not stored because store_bytes_queued_max were under way.",
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        warn_of_version()
        parallel = config.parallel
        if parallel.world_size != 1:
            raise config_error(
                "world_size", f"{parallel.world_size} (tensor parallel {parallel.tp_size}, pipeline parallel "
                f"{parallel.pp_size})",
                "1, and data parallel replicas: KvhoistOffloadingSpec is for engines of one GPU. For more use "
                "OffloadingConnector with TieringOffloadingSpec and the tier KvhoistTier, which keeps the "
                "chunks of all ranks together",
            )  # fmt: skip
        if not failures_are_told.get():
            raise config_error(
                "kv_connector", "one that cannot tell of a failed load",
                "'KvhoistConnector', with kv_connector_module_path 'kvhoist.vllm'",
            )  # fmt: skip
        if not TAKES_FAILED_REQUESTS and len(config.groups) > 1:
            raise config_error(
                "kv_cache_groups", len(config.groups),
                "1: this version of vLLM cannot compute a request of a model with several KV cache groups again after "
                "a failed load; use vLLM 0.33, or TieringOffloadingSpec with KvhoistTier",
            )  # fmt: skip
        self.settings = vllm_settings(self.extra_config)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Opens the store over the tensors of the KV cache."""
        tensors = [canonical.tensor for canonical in kv_caches.tensors]
        device = _device(tensors, self.settings)
        groups = [
            Group(tuple(_page(tensors[ref.tensor_idx], ref.page_size_bytes) for ref in refs), self.blocks_per_chunk)
            for refs in kv_caches.group_data_refs
        ]
        cuts = [[page.nbytes for page in group.pages] for group in groups]
        place = place_of(self, {"format": FORMAT, "pages": cuts}, self.settings.store.revision)
        former = Opened.all.pop(self.config.engine_id, None)
        if former is not None:
            former.store.close()
        where = tensors[0].device
        store = DeviceChunks(
            self.settings, place, groups, _regions(tensors), device,
            lambda nbytes: torch.zeros(nbytes, dtype=torch.int8, device=where),
        )  # fmt: skip
        if device is not None:
            # The spare memory is written by a stream that nobody waits for otherwise.
            torch.cuda.synchronize(where)
        opened = Opened.all[self.config.engine_id] = Opened(store)
        name = torch.cuda.get_device_name(where) if device is not None else "host memory that plays the device"
        logger.info(
            "kvhoist: active between %s (%s) and NVMe: %d tensors of %d blocks, %s",
            where, name, len(tensors), tensors[0].shape[0], store.described(),
        )  # fmt: skip
        return KvhoistWorker(opened, _group_ids(self.config), self.config.engine_id)

    def get_manager(self) -> OffloadingManager:
        """The half of the scheduler; the worker has opened the store before."""
        opened = Opened.all.get(self.config.engine_id)
        if opened is None:
            raise config_error(
                "distributed_executor_backend", "a worker in another process than the scheduler's",
                "'uni', whose worker is in the scheduler's process; else TieringOffloadingSpec with KvhoistTier",
            )  # fmt: skip
        return KvhoistManager(opened, self.settings)


def _device(tensors: list, settings: DeviceSettings) -> int | None:
    """The CUDA device that the KV cache is on; None where host memory is to play one."""
    devices = {(tensor.device.type, tensor.device.index) for tensor in tensors}
    if len(devices) != 1:
        raise config_error("kv_caches", sorted(map(str, devices)), "tensors of one device")
    ((kind, index),) = devices
    if settings.device == "simulated" and kind == "cpu":
        return None
    if settings.device == "simulated" or kind != "cuda":
        raise config_error("device", f"{settings.device}, with a KV cache on {kind}", "'auto', with one on cuda")
    return torch.cuda.current_device() if index is None else index


def _page(tensor: Any, nbytes: int) -> Page:
    return Page(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), nbytes)


def _regions(tensors: list) -> list[tuple[int, int]]:
    """(address, bytes) of the memory that the tensors are views of, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sorted(storages.items())


def _group_ids(config: Any) -> list[int]:
    # Before 0.33 every group was offloaded.
    return [getattr(group, "group_id", at) for at, group in enumerate(config.groups)]


class KvhoistManager(OffloadingManager):
    """Which chunks are on NVMe, for the scheduler. Never raises into it."""

    def __init__(self, opened: Opened, settings: DeviceSettings) -> None:
        self._opened, self._store = opened, opened.store
        self._guarded = opened.failures.guarded
        # Instead of the method: a prompt has thousands of keys.
        self._answer = self.lookup = opened.store.answers(_HIT, _MISS, opened.known)
        #: Names that are being stored.
        self._storing: set[bytes] = set()
        self._storing_max = max(settings.store_bytes_queued_max // opened.store.chunk_bytes, 1)
        #: Goes before every key since the last `reset_cache`: what was stored before must not be found again, in this
        #: process. After a restart the first weights are there again, and what was stored under them.
        self._salt = b""
        self._touched_by_vllm = False
        self._dropped = 0
        self._figures = Figures(_LABEL)

    def _name(self, key: bytes) -> bytes:
        return self._salt + key

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT or MISS from the index, at once; HIT_PENDING while a store of the key is under way."""
        return self._answer(self._name(key), req_context)

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """What vLLM counts hits under."""
        return CacheHitSource.DISK

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts a use of chunks, which the GPU may have."""
        self._touched_by_vllm = True
        self._guarded("touch", None, lambda: self._touch(list(keys), req_context))

    def _touch(self, keys: list[bytes], context: Any) -> None:
        Prefix.of(context).touch(keys, context)
        self._store.touch(map(self._name, keys))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Chunks are taken as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Counts a use of the request's chunks, where vLLM does not (0.33 never calls `touch`)."""
        if not self._touched_by_vllm:
            self._guarded("touch", None, lambda: self._touch_finished(positions(req_context)))

    def _touch_finished(self, places: Mapping[bytes, int]) -> None:
        if places:
            self._store.touch(map(self._name, sorted(places, key=places.__getitem__)))

    # Jobs

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Keys:
        """Names the chunks. One that is evicted before it is loaded is a failed load."""
        keys = list(keys)
        self._guarded("prepare_load", None, lambda: self._note_load(keys, req_context))
        return Keys([self._name(key) for key in keys])

    def _note_load(self, keys: list[bytes], context: Any) -> None:
        prefix = Prefix.of(context)
        prefix.loaded(prefix.by_group(keys, keys, context))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Names the chunks that are not there, as many as may be under way."""
        nothing = PrepareStoreOutput(keys_to_store=[], store_spec=Keys([]), evicted_keys=[])
        return self._guarded("prepare_store", nothing, lambda: self._prepare_store(list(keys), req_context))

    def _prepare_store(self, keys: list[bytes], context: Any) -> PrepareStoreOutput:
        new = [key for key in dict.fromkeys(keys) if self._answer(self._name(key), None) is _MISS]
        taken = new[: max(self._storing_max - len(self._storing), 0)]
        self._dropped += len(new) - len(taken)
        prefix = Prefix.of(context)
        chains = prefix.chains(prefix.by_group(taken, taken, context), context) if taken else []
        parents = {
            self._name(chain[0]): None if parent is None else self._name(parent) for parent, chain, _ in chains
        }
        spec = Keys([self._name(key) for key in taken], parents)
        for name in spec.names:
            self._storing.add(name)
            self._opened.known[name] = _PENDING
        return PrepareStoreOutput(keys_to_store=taken, store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """What was stored is in the index by now; what was not is a miss."""
        for key in keys:
            name = self._name(key)
            self._storing.discard(name)
            if self._opened.known.get(name) is _PENDING:
                del self._opened.known[name]

    def reset_cache(self) -> None:
        """Forgets everything for as long as this process runs: the weights may be others from here on.

        What is under way goes on under the former names, where nobody looks for it.
        """
        self._salt = secrets.token_bytes(32)
        self._storing.clear()
        self._opened.known.clear()
        # The native answers know nothing of it.
        self.__dict__.pop("lookup", None)

    # What vLLM asks besides

    def get_stats(self) -> Any:
        """What has changed since the last call, once a second at most."""
        if not self._figures.are_due():
            return None
        counters = self._opened.failures.counters
        return self._guarded("get_stats", None, lambda: self._figures.since(
            self._store.cache, loads_failed=counters["load chunks"], stores_failed=counters["store chunks"],
            stores_dropped=self._dropped,
        ))  # fmt: skip

    def shutdown(self) -> None:
        """The worker closes the store; nothing is found from here on."""
        self._opened.known.clear()


class KvhoistWorker(OffloadingWorker):
    """Moves chunks between the GPU and NVMe. Never raises, and tells vLLM of no failure: its worker would assert.

    `take_failed` has the loads that failed; the connector tells the scheduler of them.
    """

    def __init__(self, opened: Opened, group_ids: list[int], engine_id: str) -> None:
        self._opened, self._store = opened, opened.store
        self._guarded, self._counters = opened.failures.guarded, opened.failures.counters
        self._groups = {group.to_bytes(4, "big"): at for at, group in enumerate(group_ids)}
        self._engine_id = engine_id
        #: Names of the chunks of each load under way, each with the blocks it goes to.
        self._targets: dict[int, dict[bytes, list[int]]] = {}
        self._failed: dict[int, set[int]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Keys) -> bool:
        """GPU to NVMe, once the GPU has done what it was given before."""
        return self._begun(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: Keys, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        """NVMe to GPU, once the GPU has done what it was given before: it may still write to the blocks."""
        return self._begun(job_id, dst_spec, src_spec, is_load=True)

    def _begun(self, job_id: int, blocks: GPULoadStoreSpec, keys: Keys, is_load: bool) -> bool:
        """Begins a job; one that cannot begin has failed, with every key."""
        method = "submit_load" if is_load else "submit_store"
        if is_load:
            self._targets[job_id] = {name: [int(block) for block in blocks.block_ids] for name in keys.names}
        begin = self._guarded(method, self, lambda: self._begin(job_id, blocks, keys, is_load), len(keys.names))
        if begin is self:
            self._store.fail(job_id, keys.names, is_load)
        return True

    def _begin(self, job_id: int, blocks: GPULoadStoreSpec, keys: Keys, is_load: bool) -> None:
        parts = self._parts(blocks, keys)
        if is_load:
            self._targets[job_id] = {name: ids for part in parts for name, ids in self._blocks_of(part)}
        submit = self._store.submit_load if is_load else self._store.submit_store
        submit(job_id, parts, self._now())

    def _now(self) -> Any:
        """An event of the stream that the model is computed in; None where there is no such thing."""
        if self._store.device is None:
            return None
        event = torch.cuda.Event()
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
            if chunks or count:
                skip = int(index) % self._store.groups[group].blocks_per_chunk
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
        """The jobs that have ended, every one as a success."""
        ended = self._guarded("get_finished", [], self._store.finished)
        # Each on its own: a job whose end is not told would be waited for for ever.
        return [
            self._guarded("get_finished", TransferResult(job.job_id, True), lambda job=job: self._result(job))
            for job in ended
        ]

    def _result(self, job: Any) -> TransferResult:
        targets = self._targets.pop(job.job_id, {})
        if job.failed:
            method = "load" if job.is_load else "store"
            why = next((error for error in job.failed.values() if error is not False), "evicted meanwhile")
            self._opened.failures.failed(method, why, len(job.failed))
            self._counters[f"{method} chunks"] += len(job.failed)
        if job.is_load and job.failed:
            self._opened.loads_failed(job.failed)
            self._failed[job.job_id] = {block for name in job.failed for block in targets.get(name, [])}
        moved = len(job.good) * self._store.chunk_bytes
        return TransferResult(job.job_id, True, moved, job.seconds)

    def take_failed(self) -> dict[int, set[int]]:
        """The loads that `get_finished` gave as ended and that failed since the last call, and their blocks."""
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
