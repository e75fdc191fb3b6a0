"""Loading checkpoints: kvhoist beside the safetensors library, other loaders that are installed, and bare threads.

    python python/bench/weights.py [--dir DIR]... [--device cuda:0|cpu] [--shapes small,large,experts] [--rounds 3] [--csv FILE]

Writes synthetic checkpoints (random bytes) into DIR, spread over all that are given, and loads them in turns: each tensor
of each loader is compared once, byte for byte. Cold rounds drop the files from the page cache first (posix_fadvise).
`threads` are 32 threads that read the files in pieces of 4 MiB with O_DIRECT into buffers of their own: what the drives
give. `copy` is one copy of a pinned buffer of the size of a checkpoint's largest file to the device. Host memory is the
peak of a fresh process per loader above what importing it took.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import mmap
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import torch

from kvhoist.safetensors import iterate, load_files, save_file

#: Files, and tensors of so many bytes in each.
SHAPES = {
    "small": (1, [2048 * 1024] * 300 + [300 * 1000 * 1000]),
    "large": (4, [32 << 20] * 36 + [1 << 20] * 60),
    "experts": (8, [96 << 10] * 2400 + [16 << 20] * 20),
}
PIECE = 4 << 20


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


def drop(paths: list[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def by_threads(paths: list[str], device: str) -> None:
    pieces = [(path, at) for path in paths for at in range(0, os.path.getsize(path), PIECE)]
    random.Random(1).shuffle(pieces)  # All drives at once.
    lock = threading.Lock()

    def run() -> None:
        buffer, fds = mmap.mmap(-1, PIECE), {}
        while True:
            with lock:
                if not pieces:
                    break
                path, at = pieces.pop()
            if path not in fds:
                fds[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(fds[path], [buffer], at)
        for fd in fds.values():
            os.close(fd)

    threads = [threading.Thread(target=run) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_safetensors(paths: list[str], device: str) -> dict:
    from safetensors.torch import load_file

    return {name: tensor for path in paths for name, tensor in load_file(path, device=device).items()}


def by_fastsafetensors(paths: list[str], device: str) -> dict:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: paths})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}


def by_runai(paths: list[str], device: str) -> dict:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


def by_instanttensor(paths: list[str], device: str) -> dict:
    from instanttensor import safe_open

    with safe_open(paths, framework="pt", device=device, copy=True) as file:
        return dict(file.tensors())


LOADERS = {
    "threads": by_threads,
    "kvhoist": lambda paths, device: load_files(paths, device),
    "kvhoist iterate": lambda paths, device: dict(iterate(paths, device)),
    "safetensors": by_safetensors,
    "fastsafetensors": by_fastsafetensors,
    "runai_model_streamer": by_runai,
    "instanttensor": by_instanttensor,
}


def timed(loader: str, paths: list[str], device: str) -> tuple[float, float, dict | None]:
    """Seconds, seconds of processors, what was loaded."""
    begun, busy = time.perf_counter(), time.process_time()
    found = LOADERS[loader](paths, device)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, time.process_time() - busy, found


def host_bytes(loader: str, paths: list[str], device: str) -> int:
    """Peak of anonymous and file memory of a process that loads a checkpoint to a device, above its start."""
    code = f"""
import json, sys, threading, time, torch
sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
import weights
torch.zeros(1, device={device!r})
def rss():
    return sum(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(('RssAnon', 'RssShmem')))
before, peak, over = rss(), [0], threading.Event()
def watch():
    while not over.wait(0.005):
        peak[0] = max(peak[0], rss())
watcher = threading.Thread(target=watch); watcher.start()
found = weights.LOADERS[{loader!r}]({paths!r}, {device!r})
torch.cuda.synchronize() if {device!r} != 'cpu' else None
over.set(); watcher.join()
print(max(peak[0], rss()) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return 1024 * int(done.stdout.split()[-1]) if done.returncode == 0 else -1


def copy_seconds(nbytes: int, device: str) -> float:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def first_tensor_ms(paths: list[str], device: str) -> float:
    drop(paths)
    begun = time.perf_counter()
    found = iterate(paths, device)
    next(found)
    seconds = time.perf_counter() - begun
    found.close()
    return 1e3 * seconds


def compare(loader: str, found: dict, paths: list[str]) -> None:
    wanted = by_safetensors(paths, "cpu")
    assert found.keys() == wanted.keys(), f"{loader}: {len(found)} tensors instead of {len(wanted)}"
    for name, tensor in wanted.items():
        # As bits: a NaN is no other NaN.
        same = torch.equal(found[name].cpu().contiguous().view(torch.uint8), tensor.view(torch.uint8))
        assert same and found[name].dtype == tensor.dtype, f"{loader}: {name} differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    packages = {"safetensors", "fastsafetensors", "runai_model_streamer", "instanttensor"}
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    loaders = [name for name in options.loaders.split(",") if name not in missing]
    print(f"not installed: {', '.join(sorted(missing)) or 'none'}; torch {torch.__version__}, {options.device}")
    rows = []
    for shape in options.shapes.split(","):
        paths = checkpoint(shape, options.dir)
        nbytes = sum(map(os.path.getsize, paths))
        copy = copy_seconds(max(map(os.path.getsize, paths)), options.device) if options.device != "cpu" else None
        print(f"\n{shape}: {len(paths)} files, {nbytes / 1e9:.2f} GB; a copy to the device: "
              f"{max(map(os.path.getsize, paths)) / copy / 1e9 if copy else float('nan'):.1f} GB/s")  # fmt: skip
        for state in ("cold", "warm"):
            samples: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
            for turn in range(options.rounds + 1):
                for loader in loaders:
                    if state == "cold":
                        drop(paths)
                    elif turn == 0:
                        for path in paths:
                            Path(path).read_bytes()
                    seconds, busy, found = timed(loader, paths, options.device)
                    if turn == 0 and found is not None and state == "cold":
                        compare(loader, found, paths)
                    elif turn > 0:
                        samples[loader].append((seconds, busy))
                    del found
                    if options.device != "cpu":
                        torch.cuda.empty_cache()
            base = statistics.median(seconds for seconds, _ in samples[loaders[0]])
            for loader, found in samples.items():
                seconds, busy = (statistics.median(values) for values in zip(*found))
                print(f"  {state} {loader:22} {seconds:8.3f} s {nbytes / seconds / 1e9:7.2f} GB/s  {base / seconds:6.2f} of "
                      f"{loaders[0]}  {busy:7.2f} CPU-s")  # fmt: skip
                rows.append([date.today(), shape, state, loader, options.device, nbytes, f"{seconds:.4f}", f"{busy:.3f}"])
        if options.device != "cpu":
            print(f"  first tensor of kvhoist iterate, cold: {first_tensor_ms(paths, options.device):.1f} ms")
            for loader in loaders[1:]:
                print(f"  host memory of {loader:22} {host_bytes(loader, paths, options.device) / 2**20:8.0f} MiB")
    if options.csv:
        with open(options.csv, "a", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
