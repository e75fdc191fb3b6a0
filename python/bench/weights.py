"""Loading checkpoints of several shapes: kvhoist beside other loaders that are installed, and bare threads.

    python python/bench/weights.py [--dir DIR]... [--device cuda:0|cpu] [--shapes small,large,experts] [--rounds 3]
        [--loaders LIST] [--ranks 8] [--sweep] [--csv FILE]

Writes synthetic checkpoints (random bytes) into DIR, spread over all that are given, and loads each by the command
`kvhoist load-bench`, whose help says what it measures. `--ranks N`: N processes load each checkpoint at once through a
service that this starts, cold and then out of its memory; the bytes that the service has read are printed over the
checkpoint's size. `--sweep`: kvhoist with other numbers of threads and lengths of requests, cold, beside the bare threads.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from kvhoist.load_bench import LOADERS, copy_gb_per_s, drop, first_tensor_ms, measure, table, timed
from kvhoist.safetensors import load_files, save_file

#: Files, and tensors of so many bytes in each.
SHAPES = {
    "small": (1, [2048 * 1024] * 300 + [300 * 1000 * 1000]),
    "large": (4, [32 << 20] * 36 + [1 << 20] * 60),
    "experts": (8, [96 << 10] * 2400 + [16 << 20] * 20),
}


def checkpoint(name: str, folders: list[Path]) -> list[str]:
    files, sizes = SHAPES[name]
    paths = []
    for n in range(files):
        path = folders[n % len(folders)] / f"{name}-{n}.safetensors"
        if not path.exists():
            generator = torch.Generator().manual_seed(n)
            raw = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, generator=generator)
            save_file({f"f{n}.t{i}": part.view(torch.bfloat16) for i, part in enumerate(raw.split(sizes))}, path)
        paths.append(os.fspath(path))
    return paths


RANK = """
import sys, time, torch
from kvhoist.safetensors import load_files
socket, device, *paths = sys.argv[1:]
torch.zeros(1, device=device)
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


def ranks(paths: list[str], device: str, count: int) -> list[tuple[str, float, float]]:
    """What so many processes need that load a checkpoint at once through a service: (state, seconds of the last, bytes
    that the service has read over the size)."""
    nbytes = sum(map(os.path.getsize, paths))
    with tempfile.TemporaryDirectory() as place:
        socket = f"{place}/s"
        Path(f"{place}/store").mkdir()
        serve = [sys.executable, "-m", "kvhoist", "serve", "--socket", socket, "--path", f"{place}/store"]
        serve += ["--capacity", "64MiB", "--host-bytes", str(nbytes + (64 << 20))]
        service = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        service.stdout.readline()
        devices = torch.cuda.device_count() if device != "cpu" else 0
        of = [f"cuda:{n % devices}" if devices else "cpu" for n in range(count)]
        children = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, socket, one, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for one in of
        ]
        found = []
        try:
            for state in ("cold", "from the service's memory"):
                for child in children:
                    assert child.stdout.readline() == "ready\n", "a rank failed"
                drop(paths)
                before = bytes_read(service.pid)
                for child in children:
                    child.stdin.write("\n")
                    child.stdin.flush()
                seconds = max(float(child.stdout.readline()) for child in children)
                found.append((state, seconds, (bytes_read(service.pid) - before) / nbytes))
        finally:
            for child in [*children, service]:
                child.terminate()
                child.wait()
        return found


def bytes_read(pid: int) -> int:
    """Bytes that a process has read by system calls."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def sweep(paths: list[str], device: str, rounds: int) -> None:
    """Cold GB/s by threads and length of a request."""
    nbytes = sum(map(os.path.getsize, paths))
    settings = [(threads, piece << 20) for threads in (4, 8, 16, 32, 64) for piece in (1, 2, 4, 8)]
    samples: dict[tuple[int, int] | None, list[float]] = {one: [] for one in (None, *settings)}
    for turn in range(rounds + 1):
        for one, seconds in samples.items():
            drop(paths)
            begun = time.perf_counter()
            if one is None:
                timed("threads of pread", paths, device)
            else:
                load_files(paths, device, threads=one[0], piece_bytes=one[1])
            if turn > 0:
                seconds.append(time.perf_counter() - begun)
    for one, seconds in samples.items():
        what = "32 threads of pread of 4 MiB" if one is None else f"{one[0]} threads, requests of {one[1] >> 20} MiB"
        print(f"  {what:36} {nbytes / statistics.median(seconds) / 1e9:7.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loaders", default=",".join(name for name in LOADERS if name != "kvhoist service"))
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, {os.cpu_count()} processors")
    for shape in options.shapes.split(","):
        paths = checkpoint(shape, options.dir)
        nbytes = sum(map(os.path.getsize, paths))
        copy = f"; one copy to the device: {copy_gb_per_s(options.device):.1f} GB/s" if options.device != "cpu" else ""
        print(f"\n{shape}: {len(paths)} files, {nbytes / 1e9:.2f} GB{copy}", flush=True)
        rows = measure(paths, options.device, options.rounds, options.loaders.split(","))
        print(table(rows, nbytes), flush=True)
        print(f"first tensor of kvhoist iterate, cold: {first_tensor_ms(paths, options.device):.1f} ms", flush=True)
        if options.ranks:
            for state, seconds, read in ranks(paths, options.device, options.ranks):
                print(
                    f"{options.ranks} ranks through the service, {state}: {options.ranks * nbytes / seconds / 1e9:.2f} GB/s"
                    f" together, {read:.3f} times the size read",
                    flush=True,
                )
        if options.sweep:
            sweep(paths, options.device, options.rounds)
        if options.csv:
            with open(options.csv, "a", newline="") as file:
                for row in rows:
                    for state, turns in row.turns.items():
                        seconds, busy = (statistics.median(values) for values in zip(*turns))
                        found = [date.today(), shape, state, row.loader, row.version, options.device, nbytes]
                        csv.writer(file).writerow([*found, f"{seconds:.4f}", f"{busy:.3f}", row.host_bytes])


if __name__ == "__main__":
    main()
