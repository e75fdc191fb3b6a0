"""kvhoist's GPU spec against the disk mode of vLLM's SimpleCPUOffloadConnector and a bare loop, on a CUDA device.

    python/test                                              # makes python/.venv, with vLLM's modules
    KVHOIST_VLLM=python/.venv/vllm-0.33.0 python python/bench/vllm_gpu.py [--dir DIR] [--chunks 512] [--rounds 5]

`python` is one with a torch that has CUDA. `--dir` may be given several times: kvhoist and the bare loop stripe over
all folders, `simple` takes the first. The KV cache is that of Llama-8B with 16 tokens a block: 32 layers of 64 KiB, one
block a chunk. Each round every entrant stores a job of new chunks from the GPU, and loads those of the round before
into blocks that were zeroed; every byte is compared. kvhoist's host tier is smaller than a round, and a check shows
that every chunk came from disk. `bare` reads and writes 2 MiB at a time with O_DIRECT from 16 threads, each with a
pinned buffer and a copy of its own: what drive and bus give without anything around them. `simple` is vLLM's own
DiskBackend with its default of two buffers. Ratios are within a round; medians and ranges are printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import torch  # noqa: E402
import vgpu  # noqa: E402

GIB = 1 << 30
THREADS = 16


class Kvhoist:
    """The spec's worker and manager, as vLLM's connector makes them."""

    name = "kvhoist"

    def __init__(self, folders: list[Path], gpu, options) -> None:
        extra = vgpu.settings(
            folders[0], route=options.route,
            capacity=(options.rounds + 2) * options.chunks * gpu.block_bytes + (64 << 20),
            host_bytes=options.host_bytes, store_bytes_queued_max=1 << 40, direct_io="require",
        )  # fmt: skip
        extra["path"] = [str(folder) for folder in folders]
        self.served = vgpu.Served(extra, gpu)
        self.worker = self.served.worker.connector_worker.worker
        self.jobs = 0

    def _run(self, keys, blocks, is_load: bool) -> float:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        from kvhoist.vllm.spec import Keys

        self.jobs += 1
        names = Keys(keys, resets=0)
        spec = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        started = time.perf_counter()
        if is_load:
            self.worker.submit_load(self.jobs, names, spec)
        else:
            self.worker.submit_store(self.jobs, spec, names)
        self.worker.wait({self.jobs})
        took = time.perf_counter() - started
        (result,) = self.worker.get_finished()
        assert result.job_id == self.jobs and not self.worker.take_failed()
        assert result.transfer_size == len(keys) * self.served.gpu.block_bytes, "not every chunk was moved"
        return took

    def store(self, keys, blocks) -> float:
        return self._run(keys, blocks, False)

    def load(self, keys, blocks) -> float:
        before = self.served.store.cache.stats()["tiers"]["disk"]["bytes_out"]
        took = self._run(keys, blocks, True)
        moved = self.served.store.cache.stats()["tiers"]["disk"]["bytes_out"] - before
        assert moved == len(keys) * self.served.gpu.block_bytes, "some of it came from host memory"
        return took

    def close(self) -> None:
        self.served.close()


class Slots:
    """Which slot of a file has which key."""

    def __init__(self) -> None:
        self.slots: dict[bytes, int] = {}

    def of(self, keys) -> list[int]:
        return [self.slots.setdefault(key, len(self.slots)) for key in keys]


class Simple:
    """vLLM's DiskBackend."""

    name = "simple"

    def __init__(self, folders: list[Path], gpu, options) -> None:
        from vllm.v1.simple_kv_offload import cuda_mem_ops, disk_backend

        # The platform is found by the package's metadata, which an unpacked wheel has not.
        platform = SimpleNamespace(set_device=torch.cuda.set_device, is_rocm=lambda: False)
        disk_backend.current_platform = cuda_mem_ops.current_platform = platform
        self.backend = disk_backend.DiskBackend()
        self.slots = Slots()
        caches = {f"l{n}": tensor for n, tensor in enumerate(gpu.tensors)}
        self.backend.init(
            caches, gpu.memory.device, torch.cuda.Stream(), torch.cuda.Stream(), str(folders[0] / "simple"),
            (options.rounds + 2) * options.chunks, gpu.block_bytes,
        )  # fmt: skip

    def _run(self, sources, targets, is_store: bool) -> float:
        events: list = []
        started = time.perf_counter()
        self.backend.launch_copy(sources, targets, is_store, 0, events)
        while not events or not events[0][1].query():
            time.sleep(0.0005)
        return time.perf_counter() - started

    def store(self, keys, blocks) -> float:
        return self._run(blocks, self.slots.of(keys), True)

    def load(self, keys, blocks) -> float:
        return self._run(self.slots.of(keys), blocks, False)

    def close(self) -> None:
        self.backend.shutdown()


class Bare:
    """Threads that read or write 2 MiB and copy it, each with a buffer and a stream."""

    name = "bare"

    def __init__(self, folders: list[Path], gpu, options) -> None:
        self.gpu, self.slots = gpu, Slots()
        size = gpu.block_bytes
        self.fds = [os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600) for folder in folders]
        for fd in self.fds:
            os.posix_fallocate(fd, 0, -(-(options.rounds + 2) * options.chunks // len(folders)) * size)
        raw = torch.zeros((THREADS + 1) * size, dtype=torch.int8).pin_memory()
        start = -raw.data_ptr() % 4096
        self.buffers = raw[start : start + THREADS * size].view(THREADS, size)
        # One piece of the GPU's memory a slot: the least that a copy can be.
        self.device = torch.zeros((options.chunks, size), dtype=torch.int8, device=gpu.memory.device)
        self.streams = [torch.cuda.Stream() for _ in range(THREADS)]

    def _run(self, keys, blocks, is_load: bool) -> float:
        slots, size = self.slots.of(keys), self.gpu.block_bytes

        def run(thread: int) -> None:
            buffer, stream = self.buffers[thread], self.streams[thread]
            view = memoryview(buffer.numpy())
            with torch.cuda.stream(stream):
                for at in range(thread, len(keys), THREADS):
                    fd, offset = self.fds[slots[at] % len(self.fds)], slots[at] // len(self.fds) * size
                    if is_load:
                        assert os.preadv(fd, [view], offset) == size
                        self.device[at].copy_(buffer, non_blocking=True)
                        stream.synchronize()
                    else:
                        buffer.copy_(self.device[at], non_blocking=True)
                        stream.synchronize()
                        assert os.pwritev(fd, [view], offset) == size

        if not is_load:
            for at, block in enumerate(blocks):
                self.device[at] = torch.cat([tensor[block] for tensor in self.gpu.tensors])
        else:
            self.device.zero_()
        torch.cuda.synchronize()
        threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - started
        if is_load:
            for at, block in enumerate(blocks):
                for tensor, part in zip(self.gpu.tensors, self.device[at].split(self.gpu.page)):
                    tensor[block] = part
            torch.cuda.synchronize()
        return took

    def store(self, keys, blocks) -> float:
        return self._run(keys, blocks, False)

    def load(self, keys, blocks) -> float:
        return self._run(keys, blocks, True)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, action="append", help="a folder on the drive; may be given again")
    parser.add_argument("--route", default="bounce", help="kvhoist's setting")
    parser.add_argument("--chunks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-bytes", default="256MiB", help="kvhoist's host tier")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("python/bench/vllm_gpu.py: found no CUDA device, expected one")
    folders = [Path(tempfile.mkdtemp(prefix="kvhoist-bench-", dir=folder)) for folder in options.dir or [None]]
    gpu = vgpu.Gpu(layers=32, heads=8, head_size=128, blocks=options.chunks + 1)
    blocks = list(range(1, options.chunks + 1))
    total = options.chunks * gpu.block_bytes
    places = ", ".join(map(str, folders))
    print(f"{options.chunks} chunks of {gpu.block_bytes} bytes in {places}, {torch.cuda.get_device_name()}")
    entrants = [kind(folders, gpu, options) for kind in (Bare, Kvhoist, Simple)]
    print(entrants[1].served.store.route())
    rates: dict[tuple[str, str], list[float]] = {}
    contents: dict[int, torch.Tensor] = {}
    try:
        for turn in range(options.rounds + 1):
            contents[turn] = torch.randint_like(gpu.memory, -128, 128)
            contents.pop(turn - 2, None)
            for entrant in entrants[turn % 3 :] + entrants[: turn % 3]:
                keys = [key + bytes(4) for key in vgpu.names_of(turn, options.chunks)]
                gpu.memory.copy_(contents[turn])
                torch.cuda.synchronize()
                stored = entrant.store(keys, blocks)
                if turn == 0:
                    continue
                gpu.memory.zero_()
                torch.cuda.synchronize()
                before = [key + bytes(4) for key in vgpu.names_of(turn - 1, options.chunks)]
                loaded = entrant.load(before, blocks)
                for tensor, at in zip(gpu.tensors, range(len(gpu.tensors))):
                    wanted = contents[turn - 1].view(len(gpu.tensors), options.chunks + 1, gpu.page)[at]
                    assert torch.equal(tensor[1:], wanted[1:]), f"{entrant.name}: other bytes"
                for what, took in (("store", stored), ("load", loaded)):
                    rates.setdefault((entrant.name, what), []).append(total / took / GIB)
    finally:
        for entrant in entrants:
            entrant.close()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{'GiB/s':<10}{'store':>24}{'load':>24}")
    for entrant in entrants:
        cells = []
        for what in ("store", "load"):
            mine, bare = rates[entrant.name, what], rates["bare", what]
            ratio = statistics.median(a / b for a, b in zip(mine, bare))
            cells.append(f"{statistics.median(mine):6.2f} ({min(mine):.2f}-{max(mine):.2f}) {ratio:5.2f}")
        print(f"{entrant.name:<10}{cells[0]:>24}{cells[1]:>24}")
    print("the last number is the ratio to bare in the same round")


if __name__ == "__main__":
    main()
