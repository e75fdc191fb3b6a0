"""vLLM's own Scheduler over kvhoist's GPU spec: an engine without a model."""

from __future__ import annotations

import importlib
import select
from types import SimpleNamespace

import vgpu
import vtier
from vgpu import TOKENS, Gpu, made, outputs, requests, vllm_config

import kvhoist.vllm

scheduling = importlib.import_module("vllm.v1.core.sched.scheduler")
sampling = importlib.import_module("vllm.sampling_params")
hashes = importlib.import_module("vllm.v1.core.kv_cache_utils")
hashing = importlib.import_module("vllm.utils.hashing")
hashes.init_none_hash(hashing.sha256)


NEW = vtier.version() >= (0, 33)


class Unset(SimpleNamespace):
    """Settings; those that are not set are None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Engine:
    """An EngineCore without a model: the scheduler, and the worker's half of the connector."""

    def __init__(
        self, extra: dict, gpu: Gpu | None = None, max_num_batched_tokens: int = 4096, cache: dict | None = None, **more
    ) -> None:
        """`cache` and `more`: what vLLM's configuration says of the KV cache, and else."""
        self.gpu = gpu or Gpu()
        config = vllm_config(extra, cache=cache)
        for part in ("cache_config", "parallel_config", "model_config", "kv_transfer_config"):
            setattr(config, part, Unset(**vars(getattr(config, part))))
        config.cache_config.num_gpu_blocks = self.gpu.config.num_blocks
        config.kv_transfer_config.is_kv_consumer = config.kv_transfer_config.is_kv_transfer_instance = True
        config.model_config.runner_type = "generate"
        self.config = Unset(
            **vars(config), max_concurrent_batches=1, observability_config=Unset(), num_speculative_tokens=0,
            num_lookahead_tokens=0, num_prefill_lookahead_tokens=0, num_hash_lookahead_tokens=0,
            max_in_flight_tokens=4096, aux_output_config=Unset(),
            ec_manager_config=Unset(get_encoder_cache_manager_obj=lambda: None),
            scheduler_config=Unset(
                max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, policy="fcfs",
                long_prefill_token_threshold=0,
                enable_chunked_prefill=True, watermark=0.0, async_scheduling=False, prefill_schedule_interval=0,
            ),
        )  # fmt: skip
        vars(self.config).update(more)
        role, make = vgpu.connectors.KVConnectorRole, kvhoist.vllm.KvhoistConnector
        self.worker = make(self.config, role.WORKER, self.gpu.config)
        self.worker.register_kv_caches(self.gpu.caches)
        self.scheduler = scheduling.Scheduler(
            self.config, self.gpu.config, Unset(accept_tokens=lambda *_: True, should_advance=lambda *_, **__: False),
            max(group.kv_cache_spec.block_size for group in self.gpu.config.kv_cache_groups), hash_block_size=TOKENS,
            mm_registry=Unset(supports_multimodal_inputs=lambda *_: False),
        )  # fmt: skip
        self.store = self.worker.connector_worker.worker._store
        self.ended: dict[str, str] = {}
        #: Tokens of each request that were not computed here.
        self.found: dict[str, int] = {}

    def add(self, name: str, tokens: list[int], new_tokens: int = 2):
        request = requests.Request(
            request_id=name, prompt_token_ids=tokens, pooling_params=None,
            sampling_params=sampling.SamplingParams(max_tokens=new_tokens, ignore_eos=True),
            block_hasher=hashes.get_request_block_hasher(TOKENS, hashing.sha256),
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def names(self, request) -> list[bytes]:
        return [bytes(name) + b"\0" for name in request.block_hashes]

    def step(self) -> None:
        """One step: the plan, what a model would compute, what the worker reports."""
        plan, worker = self.scheduler.schedule(), self.worker
        meta = plan.kv_connector_metadata
        worker.bind_connector_metadata(meta)
        worker.handle_preemptions(meta)
        ids = list(plan.num_scheduled_tokens)
        for name in ids:
            self._compute(self.scheduler.requests[name], plan.num_scheduled_tokens[name])
        worker.start_load_kv(None)
        worker.wait_for_save()
        if NEW:
            results = vars(worker.get_transfer_results(plan.finished_req_ids))
        else:
            results = {"finished_recving": worker.get_finished(plan.finished_req_ids)[1]}
        output = made(
            outputs.KVConnectorOutput, **results,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )  # fmt: skip
        worker.clear_connector_metadata()
        sampled = [[7] for _ in ids]
        self.scheduler.update_from_output(plan, made(
            outputs.ModelRunnerOutput, req_ids=ids, req_id_to_index={name: at for at, name in enumerate(ids)},
            sampled_token_ids=sampled, prompt_logprobs_dict={}, pooler_output=[], kv_connector_output=output,
        ))  # fmt: skip

    def _compute(self, request, count: int) -> None:
        """Checks every block that the model would read, and fills those that it computes."""
        names = self.names(request)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        # The plan has counted these tokens already.
        end = request.num_computed_tokens
        start = end - count
        self.found.setdefault(request.request_id, start)
        # Block 0 is in place of those that a sliding window has left.
        window = getattr(self.gpu.config.kv_cache_groups[0].kv_cache_spec, "sliding_window", None) or start + 1
        for at in range(max(start - window + 1, 0) // TOKENS, start // TOKENS):
            assert self.gpu.holds(blocks[at], names[at]), "the model would read other bytes"
        for at in range(start // TOKENS, min(end // TOKENS, len(names))):
            self.gpu.fill(blocks[at], names[at])

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.scheduler.has_requests() or self.scheduler.connector.has_pending_push_work():
            if self.store.jobs.under_way and not self.store.jobs.has_ended:
                select.select([self.store.jobs.queue.event_fd], [], [])
            self.step()

    def serve(self, name: str, tokens: list[int]) -> int:
        """Serves a prompt to its end; how many of its tokens were not computed."""
        request = self.add(name, tokens)
        self.run()
        assert request.status is requests.RequestStatus.FINISHED_LENGTH_CAPPED
        return self.found[name]

    def forget(self) -> None:
        """Empties the GPU's own prefix cache, and its memory."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.gpu.memory.zero_()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()
