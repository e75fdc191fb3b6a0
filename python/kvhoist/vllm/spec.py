"""An offloading medium of vLLM's: the GPU's KV cache to and from NVMe, in the worker's process.

Use it as `kvhoist.vllm.KvhoistOffloadingSpec`, under `kvhoist.vllm.KvhoistConnector`. `docs/vllm.md` has the settings.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from .._values import config_error
from .device_chunks import ABSENT, DeviceChunks, Group, Page
from .device_settings import DeviceSettings, vllm_settings
from .engine_config import page_layout
from .figures import Figures, metric_definitions
from .hash_seed import warn_of_random_seed
from .hints import give_hint
from .prefix import Prefix, positions
from .tier import VERSION, place_of
from .windows import groups_with_holes, refuse_late_ends
from .worker import Keys, KvhoistWorker, Opened

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # Before vLLM tells hits apart by their source.
    CacheHitSource: Any = None

logger = logging.getLogger(__name__)

#: Changes whenever stored chunks would be read differently.
FORMAT = "vllm-gpu-v1"

#: What vLLM calls this medium in its metrics.
_LABEL = "KvhoistOffloadingSpec"

_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING

#: True while a connector is made that reports failed loads.
reports_failures: ContextVar[bool] = ContextVar("reports_failures", default=False)

#: What the engine's configuration says of the weights beside the model's name, while a connector is made. `None` where
#: the connector is not kvhoist's.
engine_weights: ContextVar[Mapping[str, Any] | None] = ContextVar("engine_weights", default=None)

#: Whether vLLM takes failed requests. Before, it took failed blocks, of models with one KV cache group, and continued
#: at the first of them.
TAKES_FAILED_REQUESTS = hasattr(connector_base, "KVConnectorTransferResults")


class KvhoistOffloadingSpec(OffloadingSpec):
    """GPU memory to NVMe, for an engine of one GPU. Raises what is wrong with its settings when it is made."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """This medium's metrics beside those that vLLM has."""
        return metric_definitions(
            {"cufile": "1 while libcufile moves chunks, 0 while they go through pinned host memory."},
            loads_failed="Chunks that could not be loaded; vLLM recomputed them.",
            stores_failed="Chunks that could not be stored.",
            stores_dropped="Chunks that were not stored because store_bytes_queued_max was reached.",
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        VERSION.warn()
        warn_of_random_seed(VERSION)
        parallel = config.parallel
        if parallel.world_size != 1:
            raise config_error(
                "world_size", f"{parallel.world_size} (tensor parallel {parallel.tp_size}, pipeline parallel "
                f"{parallel.pp_size})",
                "1, and data parallel replicas: KvhoistOffloadingSpec is for engines of one GPU. For more use "
                "OffloadingConnector with TieringOffloadingSpec and the tier KvhoistTier, which keeps the "
                "chunks of all ranks together",
            )  # fmt: skip
        if not reports_failures.get():
            raise config_error(
                "kv_connector", "one that cannot report a failed load",
                "'KvhoistConnector', with kv_connector_module_path 'kvhoist.vllm'",
            )  # fmt: skip
        freed = len(groups_with_holes(self))
        if not TAKES_FAILED_REQUESTS and (len(config.groups) > 1 or freed):
            raise config_error(
                "kv_cache_groups", f"{len(config.groups)}, of which {freed} have windows or states",
                "1 of full attention: after a failed load this version of vLLM goes on at the first failed block, "
                "which it knows in one group only, without the window or the state before it; use vLLM 0.33, or "
                "TieringOffloadingSpec with KvhoistTier",
            )  # fmt: skip
        refuse_late_ends(self)
        self.settings = vllm_settings(self.extra_config)
        self._weights = engine_weights.get()
        # Here: who makes the worker does not have it.
        self._layout = page_layout(self)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Opens the store over the tensors of the KV cache."""
        tensors = [canonical.tensor for canonical in kv_caches.tensors]
        device = _device(tensors, self.settings)
        groups = [
            Group(tuple(_page(tensors[ref.tensor_idx], ref.page_size_bytes) for ref in refs), self.blocks_per_chunk)
            for refs in kv_caches.group_data_refs
        ]
        cuts = [[page.nbytes for page in group.pages] for group in groups]
        place = place_of(self, {"format": FORMAT, "pages": cuts, **self._layout}, self.settings.store.revision, self._weights)
        former = Opened.all.pop(self.config.engine_id, None)
        if former is not None:
            # Its error does not keep the next store from opening.
            former.failures.guarded("close", None, former.store.close)
        where = tensors[0].device
        store = DeviceChunks(
            self.settings, place, groups, _regions(tensors), device,
            lambda nbytes: torch.zeros(nbytes, dtype=torch.int8, device=where),
        )  # fmt: skip
        if device is not None:
            # Nothing else waits for the stream that fills the spare memory.
            torch.cuda.synchronize(where)
        opened = Opened.all[self.config.engine_id] = Opened(store)
        name = torch.cuda.get_device_name(where) if device is not None else "host memory in place of the device"
        logger.info(
            "kvhoist: active between %s (%s) and NVMe: %d tensors of %d blocks, %s",
            where, name, len(tensors), tensors[0].shape[0], store.described(),
        )  # fmt: skip
        return KvhoistWorker(opened, _group_ids(self.config), self.config.engine_id)

    def get_manager(self) -> OffloadingManager:
        """The scheduler's half; the worker has opened the store before."""
        opened = Opened.all.get(self.config.engine_id)
        if opened is None:
            raise config_error(
                "distributed_executor_backend", "a worker in another process than the scheduler's",
                "'uni', whose worker is in the scheduler's process; else TieringOffloadingSpec with KvhoistTier",
            )  # fmt: skip
        return KvhoistManager(opened, self.settings)


def _device(tensors: list, settings: DeviceSettings) -> int | None:
    """The CUDA device of the KV cache; None with `device` `simulated`."""
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
    """(address, bytes) of each storage that the tensors are views of."""
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
        self._answer = opened.store.answers(_HIT, _MISS, opened.known)
        self.lookup = self._answer  # pyright: ignore[reportAttributeAccessIssue]
        #: Names that are being stored.
        self._storing: set[bytes] = set()
        queued_max = settings.store_bytes_queued_max or opened.store.kv_cache_bytes // 2
        self._storing_max = max(queued_max // opened.store.chunk_bytes, 1)
        #: Prefix of every name since the last `reset_cache`: this process must not find what it stored before. A
        #: restart loads the first weights again, and finds what was stored under them.
        self._salt = b""
        self._touched_by_vllm = False
        self._dropped = 0
        self._figures = Figures(_LABEL)

    def _name(self, key: bytes) -> bytes:
        return self._salt + key

    def add_blocks(self, job: Any, requests: Mapping[str, Any], blocks_per_chunk: int, whole: set[bytes]) -> None:
        """Adds the blocks of a store's chunks. Where that fails the job does, if vLLM offers it with blocks missing.
        `requests` have vLLM's keys and blocks; `whole` are the ends of the keys whose chunks need all of them."""
        job.dst_spec.blocks = {}
        self._guarded("add_blocks", None, lambda: self._add_blocks(job, requests, blocks_per_chunk, whole))

    def _add_blocks(self, job: Any, requests: Mapping[str, Any], each: int, whole: set[bytes]) -> None:
        keys, blocks = job.dst_spec, job.src_spec.block_ids
        if len(keys.names) == len(blocks) == 1 and keys.names[0][-4:] not in whole:
            # vLLM says which block has a state. The request's table may have it elsewhere, or no longer.
            keys.blocks[keys.names[0]] = [ABSENT] * (each - 1) + [int(blocks[0])]
            return
        for group in requests[job.req_id].group_states:
            end = group.offload_keys[0][-4:] if group.offload_keys else b""
            names, gone = {name for name in keys.names if name[-4:] == end}, 0 if end in whole else ABSENT
            # The job's are mostly the last that vLLM has begun to store; a prompt has thousands.
            begun, all_ = group.next_stored_chunk_idx, len(group.offload_keys)
            for at in chain(range(min(begun, all_) - 1, -1, -1), range(begun, all_)) if names else ():
                name = self._name(group.offload_keys[at])
                if name in names:
                    keys.blocks[name] = [block or gone for block in group.block_ids[at * each : (at + 1) * each]]
                    names.remove(name)
                if not names:
                    break

    def _keys(self, keys: list[bytes], parents: Mapping[bytes, bytes | None] | None = None) -> Keys:
        return Keys([self._name(key) for key in keys], self._opened.resets, parents)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT or MISS from the index, at once; HIT_PENDING while a store of the key is under way."""
        return self._answer(self._name(key), req_context)

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """What vLLM counts hits under."""
        return CacheHitSource.DISK

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts a use of chunks, also of those on the GPU."""
        self._touched_by_vllm = True
        self._guarded("touch", None, lambda: self._touch(list(keys), req_context))

    def _touch(self, keys: list[bytes], context: Any) -> None:
        Prefix.of(context).touch(keys, context)
        self._store.touch(map(self._name, keys))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No conditions for a request."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Counts a use of the request's chunks, unless vLLM does (0.33 never calls `touch`), and takes its hint."""
        if not self._touched_by_vllm:
            self._guarded("touch", None, lambda: self._touch_finished(positions(req_context)))
        self._guarded("hint", None, lambda: give_hint(self._store, req_context, self._name))

    def _touch_finished(self, places: Mapping[bytes, int]) -> None:
        if places:
            self._store.touch(map(self._name, sorted(places, key=places.__getitem__)))

    # Jobs

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Keys:
        """Names the chunks. A chunk that is evicted before its load is a failed load."""
        keys = list(keys)
        self._guarded("prepare_load", None, lambda: self._note_load(keys, req_context))
        return self._keys(keys)

    def _note_load(self, keys: list[bytes], context: Any) -> None:
        prefix = Prefix.of(context)
        prefix.loaded(prefix.by_group(keys, keys, context))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Names the chunks that are not stored yet, up to `store_bytes_queued_max`."""
        nothing = PrepareStoreOutput(keys_to_store=[], store_spec=self._keys([]), evicted_keys=[])
        return self._guarded("prepare_store", nothing, lambda: self._prepare_store(list(keys), req_context))

    def _prepare_store(self, keys: list[bytes], context: Any) -> PrepareStoreOutput:
        prefix = Prefix.of(context)
        wanted = () if prefix.is_outdated else dict.fromkeys(keys)
        new = [key for key in wanted if self._answer(self._name(key), None) is _MISS]
        taken = new[: max(self._storing_max - len(self._storing), 0)]
        self._dropped += len(new) - len(taken)
        chains = prefix.chains(prefix.by_group(taken, taken, context), context) if taken else []
        parents = {
            self._name(chain[0]): None if parent is None else self._name(parent) for parent, chain, _ in chains
        }
        spec = self._keys(taken, parents)
        for name in spec.names:
            self._storing.add(name)
            self._opened.known[name] = _PENDING
        return PrepareStoreOutput(keys_to_store=taken, store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Ends HIT_PENDING: stored chunks are in the index by now, others are a miss."""
        for key in keys:
            name = self._name(key)
            self._storing.discard(name)
            if self._opened.known.get(name) is _PENDING:
                del self._opened.known[name]

    def reset_cache(self) -> None:
        """Hides all chunks for as long as this process runs: the weights may change from here on.

        Waits for the jobs under way: vLLM unmaps their memory where it sleeps next. Jobs that have not begun never do.
        """
        self._opened.resets += 1
        self._guarded("reset_cache", None, self._store.wait)
        self._salt = secrets.token_bytes(32)
        self._storing.clear()
        self._opened.known.clear()
        # The native lookup does not know the salt.
        self.__dict__.pop("lookup", None)

    # Figures

    def get_stats(self) -> Any:
        """Changes since the last call, at most once a second."""
        if not self._figures.are_due():
            return None
        return self._guarded("get_stats", None, self._changes)

    def _changes(self) -> Any:
        counters, stats = self._opened.failures.counters, self._store.cache.stats()
        return self._figures.since(
            stats, {"cufile": int(stats["cufile"])}, loads_failed=counters["load chunks"],
            stores_failed=counters["store chunks"], stores_dropped=self._dropped,
        )  # fmt: skip

    def shutdown(self) -> None:
        """The worker closes the store; every lookup is a miss from here on."""
        self._opened.known.clear()
