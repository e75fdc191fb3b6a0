"""kvhoist as a tier of vLLM's KV offloading: a secondary tier under TieringOffloadingSpec.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368, "secondary_tiers": [
          {"type": "KvhoistTier", "module_path": "kvhoist.vllm", "path": "/mnt/nvme/kvhoist", "capacity": "200GiB"}]}}'

`KvhoistOffloadingSpec` and `KvhoistConnector` move chunks between the GPU and NVMe, for engines of one GPU.
`docs/vllm.md` has the settings.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any, Callable, Collection, Iterable, Mapping

import vllm

from .._versions import supported

VERSION = supported(vllm, "KV offloading kvhoist.vllm")
VERSION.check()
try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadingManager,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise ImportError(f"{VERSION.refusal()} ({error})") from error

from .._guard import Failures  # noqa: E402
from .._jobs import Ended  # noqa: E402
from .._misses import Misses  # noqa: E402
from .._native import __version__  # noqa: E402
from .._store_settings import StoreSettings  # noqa: E402
from .._stores import Place, tier_settings  # noqa: E402
from .._values import config_error, warn_of_keywords  # noqa: E402
from .chunks import ChunkStore  # noqa: E402
from .engine_config import page_layout, seen_weights  # noqa: E402
from .figures import Figures, metric_definitions  # noqa: E402
from .hash_seed import warn_of_random_seed  # noqa: E402
from .hints import give_hint  # noqa: E402
from .longest_request import is_independent_of_longest_request  # noqa: E402
from .prefix import Prefix, positions  # noqa: E402
from .shared_chunks import SharedChunkStore  # noqa: E402
from .windows import refuse_holes, refuse_late_ends  # noqa: E402

logger = logging.getLogger(__name__)

#: Changes whenever stored chunks would be read differently.
FORMAT = "vllm-tier-v2"

#: Most keys of failed loads that are remembered as a miss until they are stored again.
_LOST_MAX = 65_536

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class KvhoistTier(SecondaryTierManager):
    """Chunks of vLLM's host memory on NVMe.

    The constructor raises for wrong settings. No method raises into the scheduler: a failure is a miss or a failed job,
    a line in the log, and a count in ``counters``.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        enable_kv_events: bool = False,
        locality: str | None = "LOCAL",
        **settings: Any,
    ) -> None:
        # The detector exists since 0.33.
        more = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        VERSION.warn()
        warn_of_random_seed(VERSION)
        if not _HOLDS_PROMOTIONS and not getattr(offloading_spec, "offload_prompt_only", True):
            expected = "true: before 0.33 vLLM offloads the last token of an answer, whose KV it has not computed"
            raise config_error("offload_prompt_only", False, expected)
        refuse_late_ends(offloading_spec)
        refuse_holes(offloading_spec)
        self.locality = None if locality is None else Locality(locality)
        self.config = tier_settings(_own(settings, offloading_spec))
        rows, row_bytes = primary_kv_view.shape  # pyright: ignore[reportGeneralTypeIssues]
        if primary_kv_view.strides != (row_bytes, 1):
            raise config_error("primary_kv_view", primary_kv_view.strides, f"strides of ({row_bytes}, 1), rows in line")
        chunk = {"format": FORMAT, "row_bytes": row_bytes, **page_layout(offloading_spec)}
        chunk |= seen_weights(offloading_spec)
        self.place = place_of(offloading_spec, chunk, self.config.revision)
        kind = ChunkStore if self.config.service == "off" else SharedChunkStore
        self.store = kind(self.config, self.place, row_bytes, primary_kv_view)
        #: Answers that override the index: RETRY for a key while its load is under way; MISS after its load failed,
        #: until it is stored again.
        self._known: dict[bytes, LookupResult] = {}
        # The native function replaces the method: every step looks up thousands of keys.
        self._answer = self.store.answers(_HIT, _MISS, self._known, positions)
        self.lookup = self._answer  # pyright: ignore[reportAttributeAccessIssue]
        #: Steps for which every key is a miss.
        self._missing_for = 0
        # The step after a reset begins these copies; as many steps are under way as there are stages, and one more.
        stages = getattr(getattr(getattr(offloading_spec, "config", None), "parallel", None), "pp_size", 1)
        self._steps_to_flush = max(3, stages + 1)
        self._touched_by_vllm = False
        #: Requests that have not finished.
        self._contexts: dict[str, Any] = {}
        #: A reset was after the last step.
        self._was_reset = False
        self._events: list | None = [] if enable_kv_events and _events_wanted(offloading_spec) else None
        failures = Failures(logger, "chunks")
        self._guarded, self._failed = failures.guarded, failures.failed
        #: Failed calls by method; `chunks` counts failed chunks.
        self.counters = failures.counters
        # A space has a history, and counts for all replicas: the first one reports it.
        before = None if self.config.service == "off" else self.store.cache.stats()
        self._figures = Figures(tier_type, before, counts=before is None or self.place.rank == 0)
        self._misses = Misses(self.store.cache)
        logger.info(
            "kvhoist: tier %s %s; chunks go %s; %d rows of vLLM's memory registered, %s by the ring",
            tier_type, self.store.description(),
            "straight to vLLM's memory" if self.store.goes_straight() else "through the cache's memory",
            rows, "pinned" if self.store.region.pinned else "not pinned",
        )  # fmt: skip

    # Lookup

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT or MISS from the index, at once; RETRY while a load of the key is under way."""
        return self._answer(key, req_context)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts a use of chunks, also of those in vLLM's memory."""
        self._touched_by_vllm = True
        self._guarded("touch", None, lambda: self._touch(list(keys), req_context))

    def _touch(self, keys: list[bytes], context: Any) -> None:
        self.store.touch(keys)
        Prefix.of(context).touch(keys, context)

    # Jobs

    def submit_load(self, job_metadata: Any) -> None:
        """Begins to read chunks into vLLM's memory."""
        job, keys = job_metadata, list(job_metadata.keys)
        self._begun("submit_load", job, keys, lambda: self._load(job, keys))

    def _load(self, job: Any, keys: list[bytes]) -> None:
        prefix, offsets = Prefix.of(job.req_context), self._offsets(job)
        prefix.loaded(prefix.by_group(keys, offsets, job.req_context))
        self._known.update(dict.fromkeys(keys, _RETRY))
        self.store.submit_load(job.job_id, keys, offsets)

    def submit_store(self, job_metadata: Any) -> None:
        """Begins to store chunks from vLLM's memory, one chain in prefix order for each KV cache group."""
        job, keys = job_metadata, list(job_metadata.keys)
        if Prefix.of(job.req_context).is_outdated:
            self.store.fail(job.job_id, [], False)
        else:
            self._begun("submit_store", job, keys, lambda: self._store(job, keys))

    def _store(self, job: Any, keys: list[bytes]) -> None:
        prefix = Prefix.of(job.req_context)
        chains = prefix.chains(prefix.by_group(keys, self._offsets(job), job.req_context), job.req_context)
        self.store.submit_store(job.job_id, chains)

    def _begun(self, method: str, job: Any, keys: list[bytes], begin: Callable[[], None]) -> None:
        """Begins a job. If `begin` raises, the job fails with every key; `begin` submits in its last step."""
        if self._guarded(method, self, begin, len(keys)) is self:
            self.store.fail(job.job_id, keys, method == "submit_load")

    def _offsets(self, job: Any) -> list[int]:
        # `block_ids` before 0.33.
        chunks = getattr(job, "chunk_ids", None)
        if chunks is None:
            chunks = job.block_ids
        return [int(chunk) * self.store.chunk_bytes for chunk in chunks]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call. Does not wait."""
        # Each on its own: vLLM waits for ever for a job whose end is not reported.
        return [
            self._guarded("get_finished_jobs", JobResult(job.job_id, success=False), lambda job=job: self._result(job))
            for job in self._guarded("get_finished_jobs", [], self.store.finished)
        ]

    def _result(self, job: Ended) -> JobResult:
        if job.failed:
            why = next((error for error in job.failed.values() if error is not False), None) or self._misses.why()
            self._failed("load" if job.is_load else "store", why, len(job.failed))
        if job.is_load:
            for key in job.good:
                self._known.pop(key, None)
            # A miss until stored again, so that no request retries a load that always fails.
            self._known.update(dict.fromkeys(job.failed, _MISS))
            if len(self._known) > _LOST_MAX:
                lost = (key for key, answer in self._known.items() if answer is _MISS)
                for key in list(itertools.islice(lost, len(self._known) - _LOST_MAX)):
                    del self._known[key]
        else:
            for key in job.good:
                if self._known.get(key) is _MISS:
                    del self._known[key]
            if self._events is not None and job.good:
                self._events.append(OffloadingEvent(job.good, self.medium, removed=False, locality=self.locality))
        more = {"transfer_bytes": len(job.good) * self.store.chunk_bytes} if _HAS_BYTES else {}
        return JobResult(
            job.job_id,
            success=not job.failed,
            successful_keys=tuple(job.good) if job.is_load and job.failed and job.good else None,
            transfer_time=job.seconds,
            **more,
        )

    def drain_jobs(self) -> None:
        """Returns when no transfer uses vLLM's memory; `get_finished_jobs` has the results. vLLM calls it at a reset.

        It then offers all chunks of running requests again, also of blocks that a sliding window has left to others.
        """
        for prefix in map(Prefix.of, self._contexts.values()):
            prefix.is_outdated |= prefix.has_run
        self._was_reset = True
        self._guarded("drain_jobs", None, self.store.drain)
        if not _HOLDS_PROMOTIONS:
            self._missing_for = self._steps_to_flush
            self.lookup = lambda key, req_context: _MISS

    # Requests

    def on_schedule_end(self, context: Any) -> None:
        """The end of a step."""
        self.store.step_ended()
        for name in self._contexts.keys() & context.new_req_ids:
            Prefix.of(self._contexts[name]).has_run = True
        if self._was_reset:
            self._was_reset = False
            # They begin anew, and vLLM has offered nothing of theirs since.
            for name in self._contexts.keys() & context.preempted_req_ids:
                Prefix.of(self._contexts[name]).is_outdated = False
        if self._missing_for:
            self._missing_for -= 1
            if not self._missing_for:
                self.lookup = self._answer  # pyright: ignore[reportAttributeAccessIssue]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No conditions for a request."""
        self._contexts[req_context.req_id] = req_context
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Counts a use of the request's chunks, unless vLLM does (0.33 never calls `touch`), and takes its hint."""
        self._contexts.pop(req_context.req_id, None)
        if not self._touched_by_vllm:
            self._guarded("touch", None, lambda: self._touch_finished(positions(req_context)))
        self._guarded("hint", None, lambda: give_hint(self.store, req_context))

    def _touch_finished(self, places: Mapping[bytes, int]) -> None:
        if places:
            self.store.touch(sorted(places, key=places.__getitem__))

    # Events and figures

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Stored chunks since the last call, with `enable_kv_events`."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """This tier's metrics beside vLLM's own."""
        return metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Changes since the last call, at most once a second."""
        if not self._figures.are_due():
            return None
        return self._guarded("get_stats", None, lambda: self._figures.since(self.store.cache.stats()))

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Labels of vLLM's info metric (0.33)."""
        return ("kvhoist_version", "kvhoist_slots", "kvhoist_storage", "kvhoist_direct_io")

    def config_info(self) -> Mapping[str, Any]:
        """Their values."""
        return self._guarded("config_info", {}, self._info)

    def _info(self) -> Mapping[str, Any]:
        stats = self.store.cache.stats()
        values = (__version__, stats["tiers"]["disk"]["slots"], stats["storage"], stats["direct_io"])
        return dict(zip(self.config_info_keys({}), values))

    def shutdown(self) -> None:
        """Waits for the jobs, releases vLLM's memory, and closes the store."""
        self._guarded("shutdown", None, self.store.close)
        # The index of a closed store is empty.
        self._known.clear()


#: After a reset vLLM may still copy from the GPU into chunks that it took before. Before 0.33 it loads into them at once.
_HOLDS_PROMOTIONS = hasattr(OffloadingManager, "on_reset_flushed")

#: 0.28 reports no bytes.
_HAS_BYTES = "transfer_bytes" in {field.name for field in dataclasses.fields(JobResult)}


def _own(settings: Mapping[str, Any], spec: Any) -> dict[str, Any]:
    """The settings, without keywords of which a later vLLM has made some of its own.

    What the operator has written stays, so that a misspelt setting is refused.
    """
    tiers = getattr(spec, "extra_config", {}).get("secondary_tiers", ())
    written = {name for tier in tiers if isinstance(tier, Mapping) for name in tier}
    more = settings.keys() - written - StoreSettings.__dataclass_fields__.keys()
    warn_of_keywords("KvhoistTier", more)
    return {name: value for name, value in settings.items() if name not in more}


def place_of(spec: Any, chunk: Mapping[str, Any], revision: str, weights: Mapping[str, Any] | None = None) -> Place:
    """The place of this engine's chunks, apart from all engines whose chunks would have other bytes.

    `chunk` is what an adapter knows of a chunk's bytes: format, size, `page_layout`, and a tier's `seen_weights`.
    `weights` is what a connector knows of the weights beside the model's name, the longest request included where that
    decides them; `None` where none says whether it does.
    """
    config = spec.config
    # In the direct layout a chunk has the bytes of each worker tensor by tensor, whose order changes with the number of
    # workers, although vLLM's `is_parallelism_agnostic` may say otherwise.
    agnostic = getattr(config, "canonical_layout", False) or getattr(config, "replicated_layout", False)
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=agnostic
    )
    longest = getattr(config.model, "max_model_len", 0)
    if longest and (weights is not None or is_independent_of_longest_request(config.model.name)):
        longest = None
    identity = {
        **chunk,
        # The layout of a block depends on the version.
        "vllm": VERSION.layout(),
        "kv_cache_layout": _kv_cache_layout(config),
        "revision": revision,
        **mapper.fields,
        # Where KV depends on it, or may do so.
        **({"max_model_len": longest} if longest else {}),
        **({"weights": dict(weights)} if weights else {}),
    }
    # Replicas share keys and bytes, but a store of its own belongs to one process.
    replica = getattr(config.parallel, "data_parallel_index", 0)
    return Place(config.model.name, f"dp{replica}", identity, replica)


def _kv_cache_layout(config: Any) -> str | None:
    """The order of tokens and heads in a block; `None` where nobody says it.

    The configuration of 0.28 lacks it. There a function has what is set by the environment, or by the worker where it
    is in this process.
    """
    if hasattr(config, "kv_cache_layout"):
        return config.kv_cache_layout
    try:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return get_kv_cache_layout()
    except Exception as error:
        logger.debug("kvhoist: vLLM does not say the layout of its KV cache: %s", error)
        return None


def _events_wanted(spec: Any) -> bool:
    wanted = spec.kv_events_config.enable_kv_cache_events
    if not wanted:
        logger.warning("kvhoist: enable_kv_events is set, but vLLM's KV cache events are off: none will be sent")
    return wanted
