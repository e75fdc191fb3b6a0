"""The tier under vLLM's real OffloadingConnectorScheduler and its workers' half, with copies in place of a GPU's."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

vtier.boot()

import torch  # noqa: E402
from vtier import Engine, cell_of, made, rows_of, tier_config  # noqa: E402

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading."
scheduler_side = importlib.import_module(CONNECTOR + "scheduler")
worker_side = importlib.import_module(CONNECTOR + "worker")
interface = importlib.import_module("vllm.v1.kv_cache_interface")
requests = importlib.import_module("vllm.v1.request")
outputs = importlib.import_module("vllm.v1.outputs")

TOKENS = 16
CHUNKS = 6
CELL = 4096


class Copies:
    """An OffloadingWorker of one rank: blocks of its "GPU" to and from its cells of vLLM's memory, at once."""

    def __init__(self, gpu, view) -> None:
        self.gpu, self.view, self.done = gpu, view, []
        self.result = vtier.boot().base.TransferResult

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        for block, row in zip(rows_of(src_spec), rows_of(dst_spec)):
            self.view[row] = self.gpu[block]
        return self._end(job_id)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool:
        for row, block in zip(rows_of(src_spec), rows_of(dst_spec)):
            self.gpu[block] = self.view[row]
        return self._end(job_id)

    def _end(self, job_id) -> bool:
        self.done.append(self.result(job_id, True, CELL, 0.001))
        return True

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Served:
    """vLLM's two halves of the connector over one engine, and the blocks of its GPUs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        group = interface.KVCacheGroupSpec(
            ["l0"], interface.FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        )
        caches = made(interface.KVCacheConfig, num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[group])
        config = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_cache_retention_interval=0, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(world_size=len(engine.views), decode_context_parallel_size=1),
            speculative_config=None,
        )
        self.scheduler = scheduler_side.OffloadingConnectorScheduler(engine.spec, config, caches)
        self.gpus = [torch.zeros((64, CELL), dtype=torch.int8) for _ in engine.views]
        self.workers = []
        for gpu, view in zip(self.gpus, engine.views):
            worker = worker_side.OffloadingConnectorWorker(engine.spec, config, caches)
            worker.worker = Copies(gpu, view)
            self.workers.append(worker)
        self.blocks, self.names = itertools.count(1), itertools.count()
        #: Steps in which a request was told to come again.
        self.retries = 0

    def step(self, new=(), tokens=None, finished=()):
        """One step: the scheduler's plan, what the workers do, and what they report."""
        plan = SimpleNamespace(
            scheduled_new_reqs=list(new), num_scheduled_tokens=tokens or {}, finished_req_ids=set(finished),
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            preempted_req_ids=set(), kv_cache_block_copies=None, kv_connector_block_state=None,
            partial_tail_offloads=None,
        )  # fmt: skip
        plan = self.scheduler.build_connector_meta(plan)
        received = set()
        for worker in self.workers:
            worker.handle_preemptions(plan)
            worker.start_kv_transfers(plan)
            worker.prepare_store_kv(plan)
            received |= worker.get_finished(set())[1]
            meta = worker.build_connector_worker_meta()
            self.scheduler.update_connector_output(
                made(outputs.KVConnectorOutput, finished_recving=set(), kv_connector_worker_meta=meta)
            )
        return received

    def serve(self, prompt: str) -> int:
        """Serves a prompt: loads chunks that are there, computes and offers the rest; returns how many it loaded."""
        keys = vtier.keys_of(prompt, CHUNKS)
        request = SimpleNamespace(
            request_id=f"request {next(self.names)}", block_hashes=[key[:-4] for key in keys], kv_transfer_params=None,
            kv_hints=None, num_prompt_tokens=CHUNKS * TOKENS + 1, num_tokens=CHUNKS * TOKENS + 1, num_computed_tokens=0,
            skip_reading_prefix_cache=False, shared_prefix_boundary=None, status=requests.RequestStatus.WAITING,
            lora_request=None, is_finished=lambda: request.status > requests.RequestStatus.PREEMPTED,
        )  # fmt: skip
        self.scheduler.on_new_request(request)
        while (found := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            self.retries += 1
            self.step()
            self.engine.wait()
        hits = found[0] // TOKENS
        ids = [next(self.blocks) for _ in range(CHUNKS + 1)]
        blocks = [SimpleNamespace(block_id=n, is_null=False, block_hash=None) for n in ids]
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=(blocks,)), found[0])
        if hits:
            assert self.step() == {request.request_id}
        for n, (key, block) in enumerate(zip(keys, ids)):
            for rank, gpu in enumerate(self.gpus):
                if n < hits:
                    assert torch.equal(gpu[block], cell_of(key, rank, CELL)), "other bytes reached the GPU"
                else:
                    gpu[block] = cell_of(key, rank, CELL)
        request.num_computed_tokens = hits * TOKENS
        new = SimpleNamespace(req_id=request.request_id, block_ids=(ids,))
        self.step([new], {request.request_id: request.num_tokens - request.num_computed_tokens})
        request.num_computed_tokens = request.num_tokens
        request.status = requests.RequestStatus.FINISHED_STOPPED
        self.scheduler.request_finished(request)
        self.step(finished=[request.request_id])
        self.step()
        while self.scheduler.has_pending_push_work():
            self.engine.wait()
            self.step()
        self.blocks = itertools.count(1)
        return hits


def test_a_prompt_comes_back_to_the_gpus_over_restarts(store_dir):
    for restart in range(3):
        with Engine([tier_config(store_dir)]) as engine:
            served = Served(engine)
            assert [served.serve(prompt) for prompt in ("a", "b")] == ([0, 0] if restart == 0 else [CHUNKS, CHUNKS])


def wait_for_fs(tier) -> None:
    """Returns when `fs` has done what it was asked for: transfers, and look-ups, which its thread answers."""
    tier.drain_jobs()
    lookups = tier._lookup_manager
    if any(getattr(state, "result", state) is None for state in lookups._lookup_state.values()):
        lookups._pending_results.put(lookups._pending_results.get(timeout=60))


def test_a_prompt_is_usable_a_step_earlier_than_with_fs(store_dir):
    retries = {}
    for config in (tier_config(store_dir / "kvhoist"), {"type": "fs", "root_dir": str(store_dir / "fs")}):
        # Another engine than the one that stored it: nothing is in vLLM's own memory.
        for hits in (0, CHUNKS):
            with Engine([config]) as engine:
                if config["type"] == "fs":
                    engine.wait = lambda tier=engine.tier: wait_for_fs(tier)
                served = Served(engine)
                assert served.serve("a") == hits
        retries[config["type"]] = served.retries
    assert retries["KvhoistTier"] + 1 == retries["fs"], "steps from the first look-up to the use of the blocks"


def test_a_damaged_chunk_is_computed_again_and_nothing_stops(store_dir):
    with Engine([tier_config(store_dir)]) as engine:
        assert Served(engine).serve("a") == 0
    (path,) = store_dir.rglob("kvhoist.store")
    damaged = bytes(cell_of(vtier.keys_of("a", CHUNKS)[2], 1, CELL).numpy())
    data = path.read_bytes()
    assert damaged in data
    path.write_bytes(data.replace(damaged, bytes(CELL)))
    with Engine([tier_config(store_dir)]) as engine:
        served = Served(engine)
        assert served.serve("a") == 2, "what comes before it was loaded, and the rest computed"
    with Engine([tier_config(store_dir)]) as engine:
        assert Served(engine).serve("a") == CHUNKS
