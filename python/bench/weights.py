"""Loading checkpoints of several shapes: kvhoist beside other loaders that are installed, and bare threads.

    python python/bench/weights.py [--dir DIR]... [--device cuda:0|cpu] [--shapes 0.6B,7B,experts] [--rounds 3]
        [--seconds N] [--loaders LIST] [--host LIST] [--ranks 8] [--hits] [--sweep] [--scale 1]
        [--csv FILE --machine TEXT --commit TEXT]

Writes synthetic checkpoints (random bytes) into DIR, spread over all that are given, and loads each as the command
`kvhoist load-bench` does, whose help says what it measures. `--host`: the host memory of these loaders. `--ranks N`:
N processes load each checkpoint at once through a service that this starts, cold and then out of its memory; the bytes
that the service has read are printed over the checkpoint's size. `--hits`: how long a client of it waits for blocks
that are in its host memory, alone and while another process loads the checkpoint through it. `--sweep`: kvhoist with
other numbers of threads and lengths of requests, beside the bare threads. `--scale`: parts of the sizes, for a trial.
`--csv`: rows as in docs/results/measured.csv, added as they are measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy
import torch

import kvhoist
from kvhoist.load_bench import (
    LOADERS, Row, copy_gb_per_s, drop, first_tensor_ms, host_bytes, measure, table, timed, warm,
)  # fmt: skip
from kvhoist.safetensors import load_files, save_file

#: Files, and tensors of so many bytes in each: dense models in bf16, and 20,160 tensors of a mixture of experts.
SHAPES = {
    "0.6B": (1, [2 << 20] * 440 + [300 << 20]),
    "7B": (8, [32 << 20] * 50 + [1 << 20] * 60),
    "experts": (8, [96 << 10] * 2500 + [16 << 20] * 20),
}

#: GB/s that a copy to the device has at most: the bar's.
COPY = 53.0

#: What rows call these.
NAMES = {"threads of pread": "32 threads of pread, nothing copied", "kvhoist": "kvhoist load_files"}


class Rows:
    """Rows of docs/results/measured.csv."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        #: Which checkpoint they are of.
        self.checkpoint = ""

    def add(
        self, what: str, case: str, value: float, unit: str, bar: float | None = None, is_least: bool = True
    ) -> None:
        """`bar`: the least, or the most, that is wanted."""
        met = "" if bar is None else "yes" if (value >= bar if is_least else value <= bar) else "no"
        shown = f"{value:.0f}" if unit == "MiB" else f"{value:.3g}" if unit == "ms" else f"{value:.2f}"
        print(f"  {what}, {case}: {shown} {unit}{f' (bar {bar:g}: {met})' if met else ''}", flush=True)
        options = self._options
        if options.csv:
            found = ["weights", date.today(), options.commit, options.machine, "python/bench/weights.py --dir DIR ..."]
            with open(options.csv, "a", newline="") as file:
                csv.writer(file).writerow([*found, what, case, shown, unit, "" if bar is None else f"{bar:g}", met])


def checkpoint(name: str, folders: list[Path], scale: float) -> list[str]:
    files, sizes = SHAPES[name]
    sizes = [max(4096, int(size * scale)) // 4096 * 4096 for size in sizes]
    paths = []
    for n in range(files):
        path = folders[n % len(folders)] / f"{name}-{n}.safetensors"
        if not path.exists():
            drawn = numpy.random.Generator(numpy.random.SFC64(n)).integers(0, 1 << 64, sum(sizes) // 8, numpy.uint64)
            raw = torch.from_numpy(drawn.view(numpy.uint8))
            save_file({f"f{n}.t{i}": part.view(torch.bfloat16) for i, part in enumerate(raw.split(sizes))}, path)
        paths.append(os.fspath(path))
    return paths


def report(rows: Rows, found: list[Row], nbytes: int) -> None:
    """Rows of the loads, and those that have a bar."""
    speeds: dict[tuple[str, str], float] = {}
    for row in found:
        for state, turns in row.turns.items():
            seconds, busy = (statistics.median(values) for values in zip(*turns))
            speeds[state, row.loader] = nbytes / seconds / 1e9
            what = f"{rows.checkpoint}, {'cold' if state == 'cold' else 'in the page cache'}"
            rows.add(what, NAMES.get(row.loader, row.loader), speeds[state, row.loader], "GB/s")
            if state == "cold":
                rows.add(f"CPU, {what}", NAMES.get(row.loader, row.loader), busy / nbytes * (1 << 30), "CPU-s/GiB")
    ours = [name for name in ("kvhoist", "kvhoist iterate") if ("cold", name) in speeds]
    others = [name for name in LOADERS if LOADERS[name].package and ("cold", name) in speeds]
    base = speeds.get(("cold", "threads of pread"))
    for name in ours:
        case = NAMES.get(name, name)
        if base:
            rows.add(f"{rows.checkpoint}, cold, over the smaller of 32 threads and 53 GB/s", case,
                     speeds["cold", name] / min(base, COPY), "x", 0.85)  # fmt: skip
        for other in others:
            over = speeds["cold", name] / speeds["cold", other]
            rows.add(f"{rows.checkpoint}, cold, over {other}", case, over, "x", 1)
        for other, bar in (("safetensors", 3), ("instanttensor", 1)):
            if ("warm", other) in speeds and ("warm", name) in speeds:
                rows.add(f"{rows.checkpoint}, in the page cache, over {other}", case,
                         speeds["warm", name] / speeds["warm", other], "x", bar)  # fmt: skip


#: A process that loads through a service, or ends: a file that comes from its drive instead is a warning.
RANK = """
import logging, os, sys, time, torch
from kvhoist.safetensors import load_files
class Refuse(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), file=sys.stderr, flush=True)
        os._exit(1)
socket, device, *paths = sys.argv[1:]
torch.zeros(1, device=device)
logging.basicConfig(stream=sys.stderr)
logging.getLogger("kvhoist").addHandler(Refuse(logging.WARNING))
for turn in range(2):
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    found = load_files(paths, device, service=socket, keep=True)
    if device != "cpu":
        torch.cuda.synchronize()
    print(time.perf_counter() - begun, flush=True)
    del found
"""


class Service:
    """`kvhoist serve`, with room in host memory for a checkpoint and more."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._place = tempfile.TemporaryDirectory()
        self.socket = f"{self._place.name}/s"
        self._store = tempfile.TemporaryDirectory(dir=folder)
        serve = [sys.executable, "-m", "kvhoist", "serve", "--socket", self.socket, "--path", self._store.name]
        serve += ["--capacity", "256MiB", "--host-bytes", str(nbytes + (1 << 30))]
        self.process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline().startswith("kvhoist: listening"), "no service"

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        self._store.cleanup()
        self._place.cleanup()

    def loader(self, paths: list[str], device: str) -> subprocess.Popen[str]:
        """A process that loads twice, each time once it is told to."""
        command = [sys.executable, "-c", RANK, self.socket, device, *paths]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def await_ready(loader: subprocess.Popen[str]) -> None:
    assert loader.stdout.readline() == "ready\n", "a loader failed"


def go(loader: subprocess.Popen[str]) -> None:
    loader.stdin.write("\n")
    loader.stdin.flush()


def ranks(rows: Rows, paths: list[str], device: str, count: int, copy: float | None) -> None:
    """What so many processes need that load a checkpoint at once through a service."""
    nbytes = sum(map(os.path.getsize, paths))
    what = f"{count} ranks through the service, {rows.checkpoint}"
    devices = torch.cuda.device_count() if device != "cpu" else 0
    with Service(nbytes, Path(paths[0]).parent) as service:
        loaders = [service.loader(paths, f"cuda:{n % devices}" if devices else "cpu") for n in range(count)]
        try:
            for state in ("cold", "from the service's memory"):
                for loader in loaders:
                    await_ready(loader)
                drop(paths)
                before = bytes_read(service.process.pid)
                for loader in loaders:
                    go(loader)
                seconds = max(float(loader.stdout.readline()) for loader in loaders)
                rows.add(what, f"{state}, together", count * nbytes / seconds / 1e9, "GB/s")
                read = (bytes_read(service.process.pid) - before) / nbytes
                rows.add(what, f"{state}, bytes read over the size", read, "x", 1.02, is_least=False)
                if state != "cold" and copy:
                    over = count * nbytes / seconds / 1e9 / (copy * devices)
                    rows.add(what, f"{state}, over the copies' ceiling", over, "x", 0.9)
        finally:
            for loader in loaders:
                loader.terminate()
                loader.wait()


#: Blocks that are asked for again and again, bytes of each, and seconds before and beside loads.
BLOCKS, BLOCK, ALONE = 256, 128 << 10, 3.0


def hits(rows: Rows, paths: list[str], device: str) -> None:
    """How long a client waits for a block in the service's host memory: alone, and while the checkpoint is loaded."""
    with Service(sum(map(os.path.getsize, paths)), Path(paths[0]).parent) as service:
        settings = {"space": "kv", "block_bytes": BLOCK, "capacity": "128MiB", "host_bytes": "128MiB"}
        # Blocks pass through host memory, and stay there, where more than one client has memory registered.
        first, second = (kvhoist.connect(service.socket, **settings) for _ in range(2))
        memory = [kvhoist.SharedMemory(BLOCK) for _ in range(2)]
        regions = [client.register_host(one) for client, one in zip((first, second), memory)]
        keys = [n.to_bytes(32, "big") for n in range(BLOCKS)]
        contents = [numpy.random.Generator(numpy.random.SFC64(n)).bytes(BLOCK) for n in range(BLOCKS)]
        for key, content in zip(keys, contents):
            assert first.store([key], [content]) == [True]
        target, view = [(regions[0].address, BLOCK)], memory[0].view

        def waits(go_on) -> list[float]:
            found, turn = [], 0
            while go_on():
                n = turn % BLOCKS
                begun = time.perf_counter()
                assert first.load([keys[n]], target) == [True]
                found.append(1e6 * (time.perf_counter() - begun))
                assert turn % 64 or view == contents[n]
                turn += 1
            return found

        def blocks_read() -> int:
            status = [sys.executable, "-m", "kvhoist", "status", "--json", "--socket", service.socket]
            return json.loads(subprocess.check_output(status))["spaces"][0]["stats"]["read_bytes"] // BLOCK

        def for_seconds(seconds: float):
            until = time.monotonic() + seconds
            return lambda: time.monotonic() < until

        loader = service.loader(paths, device)
        await_ready(loader)
        waits(for_seconds(1))
        before = blocks_read()
        alone = waits(for_seconds(ALONE))
        for state in ("cold", "from the service's memory"):
            if state != "cold":
                await_ready(loader)
            drop(paths)
            go(loader)
            os.set_blocking(loader.stdout.fileno(), False)
            beside = waits(lambda: loader.poll() is None and not loader.stdout.readline())
            os.set_blocking(loader.stdout.fileno(), True)
            for name, found in (("alone", alone), (f"beside a load {state}", beside)):
                for share in (50, 99):
                    what = f"host hits of 128 KiB through the service, {rows.checkpoint}"
                    rows.add(what, f"{name}, p{share}", float(numpy.percentile(found, share)), "us")
            over = float(numpy.percentile(beside, 99) / numpy.percentile(alone, 99))
            what = f"host hits beside a load {state}, {rows.checkpoint}"
            rows.add(what, "p99 over alone", over, "x", 2, is_least=False)
        print(f"  blocks that were read from the drive meanwhile: {blocks_read() - before}", flush=True)
        loader.terminate()
        loader.wait()
        for client in (first, second):
            client.close()


def bytes_read(pid: int) -> int:
    """Bytes that a process has read by system calls."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def sweep(paths: list[str], device: str, rounds: int) -> None:
    """GB/s by threads and length of a request, cold and in the page cache."""
    nbytes = sum(map(os.path.getsize, paths))
    settings = [(threads, kib << 10) for threads in (8, 16, 32) for kib in (256, 512, 1024, 4096)]
    for state in ("cold", "warm"):
        samples: dict[tuple[int, int] | None, list[float]] = {one: [] for one in (None, *settings)}
        if state == "warm":
            warm(paths)
        for turn in range(rounds + 1):
            for one, seconds in samples.items():
                drop(paths) if state == "cold" else None
                begun = time.perf_counter()
                if one is None:
                    timed("threads of pread", paths, device)
                else:
                    load_files(paths, device, threads=one[0], piece_bytes=one[1])
                if turn > 0:
                    seconds.append(time.perf_counter() - begun)
                if device != "cpu":
                    torch.cuda.empty_cache()
        for one, seconds in samples.items():
            what = "32 threads of pread of 4 MiB" if one is None else f"{one[0]} threads, {one[1] >> 10} KiB"
            print(f"  {state}, {what:30} {nbytes / statistics.median(seconds) / 1e9:7.2f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--loaders", default=",".join(name for name in LOADERS if name != "kvhoist service"))
    parser.add_argument("--host", default="")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--hits", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--machine", default="this machine")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    names = lambda text: [name for name in text.split(",") if name]  # noqa: E731
    print(f"torch {torch.__version__}, {options.device}, {os.cpu_count()} processors")
    copy = copy_gb_per_s(options.device) if options.device != "cpu" else None
    rows = Rows(options)
    for shape in options.shapes.split(","):
        begun = time.monotonic()
        paths = checkpoint(shape, options.dir, options.scale)
        nbytes = sum(map(os.path.getsize, paths))
        drives = len({os.stat(path).st_dev for path in paths})
        plural = lambda count, what: f"{count} {what}{'s' * (count > 1)}"  # noqa: E731
        rows.checkpoint = f"{shape}, {plural(len(paths), 'file')} of {nbytes / 1e9:.2f} GB, {plural(drives, 'drive')}"
        made = f"made in {time.monotonic() - begun:.1f} s; one copy to the device: {copy or 0:.1f} GB/s"
        print(f"\n{rows.checkpoint}, {made}", flush=True)
        if names(options.loaders):
            found = measure(paths, options.device, options.rounds, names(options.loaders), options.seconds)
            print(table(found, nbytes), flush=True)
            report(rows, found, nbytes)
            rows.add(f"time before the first tensor, {rows.checkpoint}", "kvhoist iterate",
                     first_tensor_ms(paths, options.device), "ms", 50, is_least=False)  # fmt: skip
        for name in names(options.host):
            used = host_bytes(name, paths, options.device)
            if used is not None:
                what, bar = f"host memory beyond the tensors, {rows.checkpoint}", 256 if "kvhoist" in name else None
                rows.add(what, NAMES.get(name, name), used / 2**20, "MiB", bar, is_least=False)
        if options.ranks:
            ranks(rows, paths, options.device, options.ranks, copy)
        if options.hits:
            hits(rows, paths, options.device)
        if options.sweep:
            sweep(paths, options.device, options.rounds)
        print(f"# {shape}: {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
