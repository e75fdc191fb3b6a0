"""vLLM's OffloadingConnector with failed loads recomputed. Use it as `kvhoist.vllm.KvhoistConnector`."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from .._values import config_error
from .engine_config import weights_of
from .prefix import Prefix
from .spec import TAKES_FAILED_REQUESTS, engine_weights, reports_failures
from .windows import whole_groups

logger = logging.getLogger(__name__)

SPEC = "KvhoistOffloadingSpec"


class KvhoistConnector(OffloadingConnector):
    """OffloadingConnector for KvhoistOffloadingSpec.

    OffloadingConnector asserts that every transfer succeeds. This one reports requests whose loads failed, and vLLM
    recomputes them with `kv_load_failure_policy` `recompute`. It refuses to start with another policy.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise config_error(
                "kv_load_failure_policy", transfer.kv_load_failure_policy,
                "'recompute': a request whose blocks cannot be read from the drive is then computed, and not failed",
            )  # fmt: skip
        _name_spec(vllm_config)
        told, named = reports_failures.set(True), engine_weights.set(weights_of(vllm_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            reports_failures.reset(told)
            engine_weights.reset(named)
        self._whole = whole_groups(kv_cache_config)
        #: vLLM's blocks of the GPU, in the scheduler.
        self._gpu_blocks: Any = None
        #: They had some at the last reset, which vLLM then keeps.
        self._has_former_blocks = False
        #: The request of each load under way.
        self._requests: dict[int, str] = {}
        #: Failed loads to report: requests, or blocks where vLLM does not take requests.
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's. Stores from a sliding window say which blocks of their chunks are gone."""
        scheduler = self.connector_scheduler
        meta = super().build_connector_meta(scheduler_output)
        each = scheduler.config.blocks_per_chunk
        for job in meta.store_jobs.values() if each > 1 and scheduler._sliding_window_groups else ():
            scheduler.manager.add_blocks(job, scheduler._req_status, each, self._whole)
        return meta

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Notes vLLM's blocks of the GPU."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._gpu_blocks = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's. Of a request that may have found blocks of before a reset on the GPU nothing is stored."""
        scheduler = self.connector_scheduler
        # States are found within a block, of which vLLM does not tell.
        if self._has_former_blocks and (num_computed_tokens or scheduler._cow_source_groups):
            Prefix.of(scheduler._req_status[request.request_id].req_context).is_outdated = True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def reset_cache(self) -> bool | None:
        """Hides all chunks. Of requests with blocks from before nothing is stored: the weights may change, and vLLM
        would offer these blocks again, also those that a sliding window has left to others."""
        # vLLM has reset its own cache before, unless blocks of it were in use, beside its null block.
        pool = self._gpu_blocks
        self._has_former_blocks = pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() > 1
        if self._has_former_blocks:
            logger.warning(
                "kvhoist: a reset found blocks of the GPU in use, which vLLM keeps: nothing is stored of requests that "
                "find some there, until a reset that finds none in use"
            )
        for status in self.connector_scheduler._req_status.values():
            # For good: what it computes again may find blocks of before on the GPU.
            Prefix.of(status.req_context).is_outdated |= status.req.num_computed_tokens > 0
        return super().reset_cache()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Offloads of a finished request what was computed."""
        self._leave_out_last(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """As `request_finished`."""
        self._leave_out_last(request)
        return super().request_finished_all_groups(request, block_ids)

    def _leave_out_last(self, request: Any) -> None:
        """Has the last sampled token left out, whose KV nobody computes: vLLM 0.28 offloads the chunk that ends with it.

        Later versions leave it out themselves.
        """
        status = getattr(self.connector_scheduler, "_req_status", {}).get(request.request_id)
        if status is not None and hasattr(status, "max_offload_tokens"):
            computed = max(request.num_prompt_tokens, request.num_tokens - 1)
            limit = status.max_offload_tokens
            status.max_offload_tokens = computed if limit is None else min(limit, computed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads of a step."""
        for job_id, job in self._connector_metadata.load_jobs.items():
            self._requests[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended, also failed ones, as vLLM expects."""
        sent, received = super().get_finished(finished_req_ids)
        for job_id, blocks in self.connector_worker.worker.take_failed().items():
            request = self._requests.get(job_id)
            if request is None:
                continue
            logger.warning("kvhoist: request %s is computed: %d blocks could not be loaded", request, len(blocks))
            if TAKES_FAILED_REQUESTS:
                self._failed_requests.add(request)
            else:
                self._failed_blocks |= blocks
        ended = {job_id for job_id, request in self._requests.items() if request in received}
        for job_id in ended:
            del self._requests[job_id]
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, and which of them failed (0.33)."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._failed_requests
        self._failed_requests = set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of failed loads, where vLLM does not take requests."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *more: Any, **others: Any) -> Any:
        """vLLM's metrics and those of the medium."""
        # Runs in the server's process, where no connector is made.
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *more, **others)


def _name_spec(vllm_config: Any) -> None:
    """Sets the spec of this connector where the configuration names none."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if extra.setdefault("spec_name", SPEC) != SPEC:
        raise config_error("spec_name", extra["spec_name"], f"{SPEC!r}; for others use OffloadingConnector")
    extra.setdefault("spec_module_path", "kvhoist.vllm")
