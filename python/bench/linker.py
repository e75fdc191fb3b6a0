#!/usr/bin/env python3
"""Loads of SGLang's linker into device memory, layer by layer, beside one long copy of as many bytes and plain reads.

    python bench/linker.py --path /mnt/nvme0/kv [--sizes 64,1024] [--repeats 7] [--copy-blocks 16]
    python bench/linker.py --path /tmp/kv --device simulated --sizes 2      # without a GPU: that it works
    python bench/linker.py --path /mnt/nvme0/kv --service                   # through a node's service, beside in process

For each geometry of a model, pages of 64 tokens are stored from the layers' buffers, then loaded into other places of
them: out of host memory, and out of the drive after a restart. In the first load of each kind, kernels that wait for
their layer only compare every byte; it is not timed. A row has the medians of the others: the whole load over one copy
from pinned memory, the first layer's share of the load, the time of the calling thread to begin and in all waits, and
from a drive the load over 16 threads of `pread`. With `--service` each size is loaded out of host memory in process and
through a service in turn; a row has the times in process over those through the service, of the whole load and of the
first layer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from kvhoist import Cache, SharedMemory, connect, service
from kvhoist.sglang.linker_pages import Batch, Pages, Part, Piece

MIB = 1 << 20
TOKENS = 64  # of a page
#: Layers, buffers of a layer, bytes of a token in a buffer.
GEOMETRIES = {"llama-8b": (32, 2, 8 * 128 * 2), "70b-tp8": (80, 2, 128 * 2), "deepseek-v3-mla": (61, 1, 576 * 2)}


class Clock:
    """Moments on the device's stream, or of this thread where there is no device."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def now(self) -> torch.cuda.Event | float:
        """A moment."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Between two moments that have come."""
        return start.elapsed_time(end) if self.cuda else (end - start) * 1e3

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize()

    @property
    def stream(self) -> int | None:
        """What a load makes wait."""
        return torch.cuda.current_stream().cuda_stream if self.cuda else None


def read_seconds(path: str, nbytes: int) -> float:
    """Seconds of plain reads of a file past the page cache, in pieces of 1 MiB by 16 threads."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = min(os.fstat(file).st_size, nbytes) // MIB * MIB

    def read(begin: int) -> None:
        with contextlib.closing(mmap.mmap(-1, MIB)) as buffer:
            for at in range(begin, size, 16 * MIB):
                os.preadv(file, [buffer], at)

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(read, range(0, min(size, 16 * MIB), MIB)))
    took = time.perf_counter() - start
    os.close(file)
    return took * nbytes / size


class Model:
    """The buffers of one geometry: their first half is stored, loads go into the second."""

    def __init__(self, name: str, geometry: tuple[int, int, int], most_mib: int, clock: Clock, settings: dict) -> None:
        self.name, self.clock, self.settings = name, clock, settings
        self.layers, self.each, token = geometry
        segment = token * TOKENS
        self.page_bytes = segment * self.layers * self.each
        self.count = most_mib * MIB // self.page_bytes
        shape = (2 * self.count, segment)
        where = "cuda" if clock.cuda else "cpu"
        count = self.layers * self.each
        self.buffers = [torch.randint(0, 256, shape, dtype=torch.uint8, device=where) for _ in range(count)]
        self.lent: list[SharedMemory] = []
        self.begins = concurrent.futures.ThreadPoolExecutor(1)
        self.keys = [f"{n:064x}" for n in range(self.count)]

    @contextlib.contextmanager
    def opened(self, path: str, host_pages: int) -> Iterator[Pages]:
        """The pages of this model in a cache."""
        settings = {"disk_blocks": self.count + 8, "direct_io": "prefer", "device_blocks": 1, **self.settings}
        with Cache(path, block_bytes=self.page_bytes, host_bytes=host_pages * self.page_bytes, **settings) as cache:
            yield self.pages(cache)

    def pages(self, store: Any) -> Pages:
        """The pages of this model in a cache or a client, with the buffers registered."""
        segment = self.buffers[0].shape[1]
        pieces = (Piece(0, b.data_ptr(), segment, segment, n % self.layers) for n, b in enumerate(self.buffers))
        for buffer in self.buffers:
            store.register_device(buffer.data_ptr(), buffer.nbytes)
        return Pages("kv", sorted(pieces, key=lambda piece: piece.layer), store, "all")

    def beside_service(self, path: str, sizes: list[int], repeats: int) -> None:
        """Loads out of host memory in process and through a service, in turn."""
        for buffer in self.buffers if not self.clock.cuda else ():
            self.lent.append(SharedMemory(buffer.nbytes))
            shared = torch.frombuffer(self.lent[-1].view, dtype=torch.uint8).view(buffer.shape).copy_(buffer)
            buffer.set_(shared)
        self.clock.wait()
        room = int(self.count * 1.2) + 16
        disk, memory = (self.count + 8) * self.page_bytes * 2, room * self.page_bytes * 2
        shared_path = os.path.join(path, "service")
        os.makedirs(shared_path, mode=0o700)
        settings = service.ServiceSettings((shared_path,), disk, memory, linger_s=1, direct_io="prefer")
        client = connect(
            service.find_or_start(settings), space=self.name, block_bytes=self.page_bytes, device=self.settings["device"],
            capacity=disk // 2, host_bytes=memory // 2, give_up_ms=None,
        )  # fmt: skip
        with self.opened(path, room) as own, client:
            through = self.pages(client)
            for pages in (own, through):
                stored = pages.store(self.keys, [list(range(self.count))])
                assert all(one is True for one in stored), stored
            for size in sizes:
                keys = self.keys[: size * MIB // self.page_bytes]
                for pages in (own, through):
                    self.load(pages, keys, compare=True)
                both = [[self.load(pages, keys, compare=False) for pages in (own, through)] for _ in range(repeats)]
                row = f"{self.name}, {size} MiB from host memory"
                for at, what in enumerate(("the load", "its first layer")):
                    ratios = sorted(mine[at] / theirs[at] for mine, theirs in both)
                    mine, theirs = (statistics.median(one[at] for one in column) for column in zip(*both))
                    row += f"; {what}: in process {mine:.3f} ms, through a service {theirs:.3f} ms"
                    row += f", {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(row, flush=True)

    def run(self, path: str, sizes: list[int], repeats: int) -> None:
        """All rows."""
        self.clock.wait()
        with self.opened(path, int(self.count * 1.2) + 16) as pages:
            stored = pages.store(self.keys, [list(range(self.count))])
            assert all(one is True for one in stored), stored
            for size in sizes:
                self.measure("host memory", pages, size, repeats)
        # Host memory is empty after a restart, and holds few pages: the largest size is read whole each time.
        with self.opened(path, 16) as pages:
            self.measure("drive", pages, max(sizes), 2, os.path.join(path, "kvhoist.store"))

    def load(self, pages: Pages, keys: list[str], compare: bool) -> tuple[float, float, float, float]:
        """One load: milliseconds of the whole and of the first layer, microseconds to begin and in the waits."""
        rows = [self.count + n for n in torch.randperm(self.count)[: len(keys)].tolist()]
        places = torch.tensor(rows, device=self.buffers[0].device)
        for buffer in self.buffers:
            buffer[self.count :].zero_()
        if compare:  # Kernels are loaded at their first use, which waits for the whole device.
            (self.buffers[0][places] == self.buffers[0][: len(keys)]).all()
        self.clock.wait()
        start, waits, right = self.clock.now(), 0.0, []
        before = time.perf_counter()
        batch = Batch(["request"], [Part(pages, keys, [rows])], lambda: (), self.begins)
        begin = time.perf_counter() - before
        stream, first = self.clock.stream, None
        for layer in range(self.layers):
            before = time.perf_counter()
            batch.wait(layer, stream)
            waits += time.perf_counter() - before
            first = first or self.clock.now()
            if compare:
                for buffer in self.buffers[layer :: self.layers]:
                    right.append((buffer[places] == buffer[: len(keys)]).all())
        end = self.clock.now()
        self.clock.wait()
        failed = batch.finish()
        assert failed == [], failed
        assert all(bool(one) for one in right), f"{self.name}: found other bytes than were stored"
        return self.clock.milliseconds(start, end), self.clock.milliseconds(start, first), begin * 1e6, waits * 1e6

    def copy(self, nbytes: int) -> float:
        """Milliseconds of one copy from pinned memory."""
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.clock.cuda)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.buffers[0].device)
        self.clock.wait()
        start = self.clock.now()
        flat.copy_(host, non_blocking=True)
        end = self.clock.now()
        self.clock.wait()
        return self.clock.milliseconds(start, end)

    def measure(self, tier: str, pages: Pages, mib: int, repeats: int, file: str | None = None) -> None:
        """One row."""
        keys = self.keys[: mib * MIB // self.page_bytes]
        nbytes = len(keys) * self.page_bytes
        self.load(pages, keys, compare=True)
        loads = [self.load(pages, keys, compare=False) for _ in range(repeats)]
        whole, first, begin, waits = (statistics.median(column) for column in zip(*loads))
        copy = statistics.median(self.copy(nbytes) for _ in range(repeats))
        row = f"{self.name}, {mib} MiB from {tier}: {whole:.3f} ms, {copy / whole:.2f} x one copy"
        row += f"; first layer {first / whole:.0%}; begin {begin:.0f} us; {self.layers} waits {waits:.0f} us"
        if file:
            row += f"; {read_seconds(file, nbytes) * 1e3 / whole:.2f} x pread"
        print(row, flush=True)


def main() -> None:
    """Measures each geometry in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="an empty folder on a drive")
    parser.add_argument("--sizes", default="64,1024", help="MiB of a load")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", default=",".join(GEOMETRIES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "simulated"])
    parser.add_argument("--copy-blocks", type=int, default=16, help="most thread blocks of the copy kernel")
    parser.add_argument("--service", action="store_true", help="beside a node's service")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device: found no CUDA device, expected one; give --device simulated")
    settings = {"device": given.device, "copy_blocks_max": given.copy_blocks}
    sizes = [int(size) for size in given.sizes.split(",")]
    for name in given.models.split(","):
        path = os.path.join(given.path, name)
        os.makedirs(path, mode=0o700)
        model = Model(name, GEOMETRIES[name], max(sizes), Clock(given.device == "cuda"), settings)
        (model.beside_service if given.service else model.run)(path, sizes, given.repeats)
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
