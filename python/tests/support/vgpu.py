"""kvhoist's GPU spec under vLLM's real connector, both halves in one process as vLLM has them for an engine of one GPU.

The KV cache is in torch's memory: on a CUDA device where there is one, else in host memory that plays it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import select
import threading
from types import SimpleNamespace

import vtier
from vtier import made

vtier.boot()

import torch  # noqa: E402

import kvhoist.vllm  # noqa: E402

connectors = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
interface = importlib.import_module("vllm.v1.kv_cache_interface")
outputs = importlib.import_module("vllm.v1.outputs")
requests = importlib.import_module("vllm.v1.request")

TOKENS = 16
BLOCKS = 128

_engines = itertools.count()


def on_gpu() -> bool:
    return torch.cuda.is_available()


def settings(path, capacity="16MiB", **more) -> dict:
    """What an operator writes as kv_connector_extra_config."""
    given = {"path": str(path), "capacity": capacity, "host_bytes": "8MiB", "direct_io": "prefer", **more}
    return given if on_gpu() else {"device": "simulated", **given}


def vllm_config(
    extra: dict, *, policy="recompute", world=1, replica=0, engine_id=None, groups=1, weights=None, cache=None
):
    """As much of vLLM's configuration as the connector looks at. `weights`: what it says of them beside their name;
    `cache`: what it says of the KV cache."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KvhoistConnector", kv_connector_module_path="kvhoist.vllm", kv_role="kv_both",
            kv_connector_extra_config=extra, kv_load_failure_policy=policy,
            engine_id=engine_id or f"kvhoist-gpu-{next(_engines)}",
        ),
        parallel_config=SimpleNamespace(
            rank=0, world_size=world, tensor_parallel_size=world, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1, data_parallel_index=replica,
            data_parallel_size=replica + 1, data_parallel_rank_local=None, cp_kv_cache_interleave_size=1,
            distributed_executor_backend="uni", nnodes_within_dp=1,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, block_size=TOKENS,
            kv_cache_layout="LBHNC", hash_block_size=None, prefix_match_unit=None,
            # vLLM's default. `None` keeps what a window needs at every boundary.
            **{
                "cache_dtype": "auto", "prefix_cache_retention_interval": 0, "mamba_cache_mode": "none", **(cache or {})
            },
        ),
        model_config=SimpleNamespace(
            use_mla=False, model="meta/tiny", get_total_num_kv_heads=lambda: 2,
            **{"dtype": torch.bfloat16, "max_model_len": 4096, **(weights or {})},
        ),
        use_v2_model_runner=False, kv_events_config=None, speculative_config=None,
    )  # fmt: skip


FINISHED = requests.RequestStatus.FINISHED_STOPPED


class Gpu:
    """The KV cache of a small model: `layers` has a tensor a layer, `packed` has all layers of a block in one piece."""

    def __init__(
        self, layout="layers", layers=4, groups=1, blocks=BLOCKS, heads=2, head_size=64, padding=0, window=0,
        specs=None,
    ) -> None:  # fmt: skip
        """`window`: tokens of a sliding window of all layers. `specs`: the groups, whose pages have one size."""
        kind = interface.SlidingWindowSpec if window else interface.FullAttentionSpec
        specs = specs or [
            kind(
                block_size=TOKENS, num_kv_heads=heads, head_size=head_size, dtype=torch.bfloat16,
                **({"page_size_padded": padding} if padding else {}),
                **({"sliding_window": window} if window else {}),
            )
            for _ in range(groups)
        ]  # fmt: skip
        self.page = specs[0].page_size_bytes
        names = [[f"g{group}.l{layer}" for layer in range(layers)] for group in range(len(specs))]
        device = torch.device("cuda") if on_gpu() else torch.device("cpu")
        packed = layout == "packed"
        # Groups of one model share its tensors: layer n of each lies in the n-th.
        self.memory = torch.zeros(blocks * layers * self.page, dtype=torch.int8, device=device)
        self.tensors = []
        for layer in range(layers):
            shape, start = (blocks, self.page), layer * blocks * self.page
            strides = (self.page, 1)
            if packed:
                start, strides = layer * self.page, (layers * self.page, 1)
            self.tensors.append(self.memory.as_strided(shape, strides, start))
        caches = {name: self.tensors[at] for group in names for at, name in enumerate(group)}
        self.caches = caches
        stride = {"block_stride": layers * self.page if packed else self.page * (vtier.version() >= (0, 33))}
        whole = blocks * layers * self.page
        self.config = made(
            interface.KVCacheConfig,
            num_blocks=blocks,
            kv_cache_tensors=[
                made(
                    interface.KVCacheTensor, size=whole if vtier.version() >= (0, 33) else blocks * self.page,
                    shared_by=[group[layer] for group in names], layers=[group[layer] for group in names],
                    layer_stride=self.page if packed else blocks * self.page, **stride,
                    offset=layer * (self.page if packed else blocks * self.page * (vtier.version() >= (0, 33))),
                )
                for layer in range(layers)
            ],
            kv_cache_groups=[
                interface.KVCacheGroupSpec(group, spec) for group, spec in zip(names, specs)
            ],
        )  # fmt: skip
        self.block_bytes = layers * self.page

    @functools.cache
    def data(self, name: bytes):
        """The bytes of the block of that name."""
        data = hashlib.shake_128(name).digest(self.block_bytes)
        return torch.frombuffer(bytearray(data), dtype=torch.int8).to(self.memory.device)

    def fill(self, block: int, name: bytes) -> None:
        """Computes the block of that name, in the current stream."""
        for tensor, part in zip(self.tensors, self.data(name).split(self.page)):
            tensor[block] = part

    def holds(self, block: int, name: bytes) -> bool:
        return torch.equal(torch.cat([tensor[block] for tensor in self.tensors]), self.data(name))


class Served:
    """vLLM's connector in both roles, and its calls in the order in which scheduler and model runner make them."""

    def __init__(self, extra: dict, gpu: Gpu | None = None, **config) -> None:
        self.gpu = gpu or Gpu()
        self.vllm_config = vllm_config(extra, **config)
        role, make = connectors.KVConnectorRole, kvhoist.vllm.KvhoistConnector
        self.worker = make(self.vllm_config, role.WORKER, self.gpu.config)
        try:
            self.worker.register_kv_caches(self.gpu.caches)
            self.scheduler = make(self.vllm_config, role.SCHEDULER, self.gpu.config)
        except BaseException:
            self.worker.shutdown()
            raise
        self.store = self.worker.connector_worker.worker._store
        self.manager = self.scheduler.connector_scheduler.manager
        self.per_chunk = self.manager._store.groups[0].blocks_per_chunk
        self._names = itertools.count()
        self._free = list(range(1, self.gpu.config.num_blocks))

    # Blocks of the GPU

    def take(self, count: int) -> list[list[int]]:
        """Blocks for each KV cache group."""
        groups = len(self.gpu.config.kv_cache_groups)
        taken, self._free = self._free[: count * groups], self._free[count * groups :]
        assert len(taken) == count * groups, "the GPU is full"
        return [taken[group::groups] for group in range(groups)]

    # Steps

    def step(self, new=(), tokens=None, finished=(), preempted=()):
        """One step; the requests whose loads have ended, and those of them that failed."""
        plan = SimpleNamespace(
            scheduled_new_reqs=list(new), num_scheduled_tokens=tokens or {}, finished_req_ids=set(finished),
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            preempted_req_ids=set(preempted), kv_cache_block_copies=None, kv_connector_block_state=None,
            partial_tail_offloads=None,
        )  # fmt: skip
        meta = self.scheduler.build_connector_meta(plan)
        worker = self.worker
        worker.bind_connector_metadata(meta)
        worker.handle_preemptions(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        if hasattr(connectors, "KVConnectorTransferResults"):
            results = worker.get_transfer_results(set(finished))
            received, failed = results.finished_recving, results.failed_recving
        else:
            received, failed = worker.get_finished(set(finished))[1], set()
        blocks = worker.get_block_ids_with_load_errors()
        output = made(
            outputs.KVConnectorOutput, finished_recving=received, invalid_block_ids=blocks,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )  # fmt: skip
        worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return received, failed, blocks

    def wait(self) -> None:
        """Returns when a job may have ended."""
        jobs = self.store.jobs
        if jobs.under_way and not jobs.has_ended and not self.store._waiting:
            select.select([jobs.queue.event_fd], [], [])

    def settle(self) -> None:
        """Steps until no job is under way."""
        while self.scheduler.has_pending_push_work():
            self.wait()
            self.step()

    def request(self, names: list[bytes], extra_tokens=1):
        """A request whose prompt has these blocks, and a few tokens more."""
        count = len(names) * TOKENS + extra_tokens
        request = SimpleNamespace(
            request_id=f"request {next(self._names)}", block_hashes=list(names), kv_transfer_params=None, kv_hints=None,
            num_prompt_tokens=count, num_tokens=count, num_computed_tokens=0, skip_reading_prefix_cache=False,
            shared_prefix_boundary=None, status=requests.RequestStatus.WAITING, lora_request=None,
            is_finished=lambda: request.status > requests.RequestStatus.PREEMPTED,
        )  # fmt: skip
        self.scheduler.on_new_request(request)
        return request

    def matched(self, request, computed=0):
        """Tokens that can be loaded; steps while the scheduler is to ask again."""
        while (found := self.scheduler.get_num_new_matched_tokens(request, computed))[0] is None:
            self.wait()
            self.step()
        return found[0]

    def load(self, request, ids: list[list[int]], tokens: int, computed=0):
        """Loads what was matched; (received, failed, failed blocks) of the step that says that it has ended."""
        held = computed // TOKENS
        blocks = tuple(
            [
                SimpleNamespace(block_id=n, is_null=False, block_hash=None if at >= held else b"known")
                for at, n in enumerate(group)
            ]
            for group in ids
        )
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=blocks), tokens)
        bad: set[int] = set()
        while True:
            received, failed, blocks = self.step()
            bad |= blocks
            if request.request_id in received:
                return failed, bad
            self.wait()

    def compute(self, request, ids: list[list[int]], names: list[bytes], computed: int = 0, settle=True) -> None:
        """Computes the blocks from `computed` tokens on, ends the request, and lets its stores end."""
        for number, group in enumerate(ids):
            for at in range(computed // TOKENS, len(names)):
                self.gpu.fill(group[at], names[at] + bytes([number]))
        request.num_computed_tokens = computed
        new = SimpleNamespace(req_id=request.request_id, block_ids=tuple(ids))
        self.step([new], {request.request_id: request.num_tokens - computed})
        request.num_computed_tokens = request.num_tokens
        request.status = FINISHED
        self.scheduler.request_finished_all_groups(request, tuple(ids))
        self.step(finished=[request.request_id])
        if settle:
            self.settle()

    def serve(self, names: list[bytes], settle=True) -> int:
        """Serves a prompt: loads what is there, every byte of it checked, computes the rest; blocks that it loaded."""
        request, ids = self.request(names), self.take(len(names) + 1)
        for block in sum(ids, []):
            self.gpu.fill(block, b"what others left")
        while tokens := self.matched(request):
            failed, bad = self.load(request, ids, tokens)
            if not failed and not bad:
                break
            # The scheduler begins anew; what failed is a miss by now.
        loaded = tokens // TOKENS
        self.check(ids, names[:loaded])
        self.compute(request, ids, names, loaded * TOKENS, settle)
        if settle:
            self._free += sum(ids, [])
        return loaded

    def check(self, ids: list[list[int]], names: list[bytes]) -> None:
        """Every byte of blocks."""
        for number, group in enumerate(ids):
            for block, name in zip(group, names):
                assert self.gpu.holds(block, name + bytes([number])), "other bytes reached the GPU"

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()


def names_of(prompt, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{prompt}/{n}".encode()).digest() for n in range(count)]


def files(folder):
    return sorted(folder.rglob("kvhoist.store"))


def damage(folder, served, name: bytes):
    """Overwrites what is stored of one block, in every place that has it, and forgets what is in host memory."""
    gpu = served.gpu
    block = served.take(1)[0][0]
    gpu.fill(block, name + b"\0")
    data = b"".join(tensor[block].cpu().numpy().tobytes() for tensor in gpu.tensors)
    (path,) = files(folder)
    found = path.read_bytes()
    assert data in found, "the block is not on disk"
    with open(path, "r+b") as file:
        file.seek(found.index(data))
        file.write(bytes(len(data)))


def serve_again(served, names) -> None:
    """Has blocks stored again that were lost: 0.28 does not offer them for the request that failed to load them."""
    if vtier.version() < (0, 33):
        served.serve(names)


class Gate:
    """An event of the GPU that happens when it is told to."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._happened.is_set()

    def open(self) -> None:
        self._happened.set()

    def open_soon(self) -> None:
        """Opens while the caller waits for it."""
        threading.Timer(0.05, self.open).start()

    def synchronize(self) -> None:
        assert self._happened.wait(60), "nobody has opened it"
