"""`python -m kvhoist load-bench FILES`: how fast checkpoints load, beside the other loaders that are installed. Needs torch.

All loaders load the same files in turns, in one process. The first turn is not counted: in it each tensor of each loader is
compared, byte for byte, with that of the safetensors library. Cold: the files are dropped from the page cache before each
load. ``threads of pread`` read the files into buffers of their own, past the page cache, and copy nothing to a device: what
the drives give. Host memory is the peak of a process of each loader's own, above what it had before the load.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable

from . import _native
from .errors import ArgumentError, Error, UnavailableError
from .files import Service

#: Bytes of a request of the bare threads, and their number.
_PIECE = 4 << 20
_THREADS = 32

#: Tensors by their names. torch, and what needs it, is imported where it is used: `--help` needs none.
Tensors = dict[str, Any]


def _by_threads(paths: list[str], device: str) -> None:
    pieces = [(path, at) for path in paths for at in range(0, os.path.getsize(path), _PIECE)]
    random.Random(1).shuffle(pieces)  # All drives at once.
    lock = threading.Lock()

    def run() -> None:
        buffer, fds = mmap.mmap(-1, _PIECE), {}
        while True:
            with lock:
                if not pieces:
                    break
                path, at = pieces.pop()
            if path not in fds:
                try:
                    fds[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
                except OSError:  # A file system without direct I/O.
                    fds[path] = os.open(path, os.O_RDONLY)
            os.preadv(fds[path], [buffer], at)
        for fd in fds.values():
            os.close(fd)

    threads = [threading.Thread(target=run) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _by_kvhoist(paths: list[str], device: str) -> Tensors:
    from .safetensors import load_files

    return load_files(paths, device)


def _by_iterate(paths: list[str], device: str) -> Tensors:
    from .safetensors import iterate

    return dict(iterate(paths, device))


def _by_service(paths: list[str], device: str) -> Tensors:
    from .safetensors import load_files

    return load_files(paths, device, service=True, keep=True)


def _by_safetensors(paths: list[str], device: str) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for path in paths for name, tensor in load_file(path, device=device).items()}


def _by_prefetch(paths: list[str], device: str) -> Tensors:
    import safetensors

    safe_open: Any = safetensors.safe_open  # Type checkers may know an older one.
    files = [safe_open(path, "pt", device=device, backend="pread") for path in paths]
    loaders = [file.prefetch(device=device) for file in files]
    return {name: tensor for loader in loaders for name, tensor in loader}


def _by_fastsafetensors(paths: list[str], device: str) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: paths})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}


def _by_runai(paths: list[str], device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


def _by_instanttensor(paths: list[str], device: str) -> Tensors:
    from instanttensor import safe_open

    with safe_open(paths, framework="pt", device=device, copy=True) as file:
        return dict(file.tensors())


@dataclass(frozen=True)
class Loader:
    """One way to load a checkpoint."""

    load: Callable[[list[str], str], Tensors | None]
    #: The distribution that it is part of, and its first version; None for what is always there.
    package: str | None = None
    version: str = "0"

    def found(self) -> str | None:
        """The version that is installed; None if none is, or an older one."""
        if self.package is None:
            return _native.__version__
        try:
            found = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None
        numbers = lambda text: [int(part) for part in text.split("rc")[0].split(".") if part.isdigit()]  # noqa: E731
        return found if numbers(found) >= numbers(self.version) else None


LOADERS = {
    "threads of pread": Loader(_by_threads),
    "kvhoist": Loader(_by_kvhoist),
    "kvhoist iterate": Loader(_by_iterate),
    "kvhoist service": Loader(_by_service),
    "safetensors": Loader(_by_safetensors, "safetensors"),
    "safetensors prefetch": Loader(_by_prefetch, "safetensors", "0.9"),
    "fastsafetensors": Loader(_by_fastsafetensors, "fastsafetensors"),
    "runai_model_streamer": Loader(_by_runai, "runai-model-streamer"),
    "instanttensor": Loader(_by_instanttensor, "instanttensor"),
}


@dataclass
class Row:
    """What one loader needed."""

    loader: str
    version: str
    #: By state, of each turn: seconds, and seconds of processors.
    turns: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    host_bytes: int | None = None
    #: Why there is nothing.
    failed: str | None = None


def drop(paths: list[str]) -> None:
    """Drops files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(paths: list[str]) -> None:
    """Reads files into the page cache."""

    def read(path: str, at: int) -> None:
        with open(path, "rb") as file:
            os.preadv(file.fileno(), [bytearray(_PIECE)], at)

    with ThreadPoolExecutor(_THREADS) as pool:
        for path in paths:
            list(pool.map(lambda at, path=path: read(path, at), range(0, os.path.getsize(path), _PIECE)))


def timed(loader: str, paths: list[str], device: str) -> tuple[float, float, Tensors | None]:
    """Seconds, seconds of processors, and what was loaded."""
    import torch

    begun, busy = time.perf_counter(), time.process_time()
    found = LOADERS[loader].load(paths, device)
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, time.process_time() - busy, found


def reference(paths: list[str], device: str) -> Tensors:
    """The tensors by the safetensors library: on the device where it has room for them twice, which compares faster.
    Raises ArgumentError for files that it does not load, and what says that memory or a drive failed as it is."""
    import torch

    has_room = device == "cpu" or torch.cuda.mem_get_info(device)[0] > 3 * sum(map(os.path.getsize, paths))
    try:
        return _by_safetensors(paths, device if has_room else "cpu")
    except (torch.OutOfMemoryError, MemoryError, OSError):
        raise
    except Exception as error:
        found = f"found what the safetensors library does not load ({type(error).__name__}: {error})"
        raise ArgumentError(f"FILES: {found}, expected checkpoints in its format") from error


def compare(loader: str, found: Tensors, wanted: Tensors) -> None:
    """Compares tensors with the safetensors library's."""
    import torch

    if found.keys() != wanted.keys():
        raise ArgumentError(f"{loader}: found {len(found)} tensors, expected {len(wanted)}")
    for name, tensor in wanted.items():
        # As bits: a NaN is no other NaN.
        bits = [one.to(tensor.device).contiguous().flatten().view(torch.uint8) for one in (found[name], tensor)]
        if found[name].dtype != tensor.dtype or found[name].shape != tensor.shape or not torch.equal(*bits):
            raise ArgumentError(f"{loader}: the tensor {name} differs from the safetensors library's")


def measure(paths: list[str], device: str, rounds: int, names: list[str], seconds: float = float("inf")) -> list[Row]:
    """Loads by all of these loaders in turns, cold and warm; no turn begins after so many seconds of a state."""
    import torch

    rows = [Row(name, LOADERS[name].found() or "not installed") for name in names]
    wanted = reference(paths, device) if LOADERS["safetensors"].found() else None
    for state in ("cold", "warm"):
        until = time.monotonic() + seconds
        for turn in range(rounds + 1):
            if turn > 1 and time.monotonic() > until:
                break
            for row in rows:
                if row.failed or row.version == "not installed":
                    continue
                drop(paths) if state == "cold" else warm(paths)
                try:
                    took, busy, found = timed(row.loader, paths, device)
                    if turn > 0:
                        row.turns.setdefault(state, []).append((took, busy))
                    elif found is not None and state == "cold" and wanted is not None:
                        compare(row.loader, found, wanted)
                except Exception as error:  # Of any package: the others are measured.
                    row.failed = f"{type(error).__name__}: {error}"
                found = None
                if device != "cpu":
                    torch.cuda.empty_cache()
        wanted = None
    return rows


def add_host_bytes(rows: list[Row], paths: list[str], device: str) -> None:
    """Adds the host memory of each loader that loads."""
    for row in rows:
        if row.turns and row.loader != "threads of pread":
            row.host_bytes = host_bytes(row.loader, paths, device)


def host_bytes(loader: str, paths: list[str], device: str) -> int | None:
    """Peak of a process's own memory while it loads, above that before; without the tensors, where they are in it too."""
    code = f"""
import threading, torch
from kvhoist.load_bench import LOADERS
torch.zeros(1, device={device!r})
def rss():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(("RssAnon", "RssShmem")))
before, peak, over = rss(), [0], threading.Event()
def watch():
    while not over.wait(0.005):
        peak[0] = max(peak[0], rss())
watcher = threading.Thread(target=watch)
watcher.start()
found = LOADERS[{loader!r}].load({paths!r}, {device!r})
if {device!r} != "cpu":
    torch.cuda.synchronize({device!r})
over.set()
watcher.join()
print(max(peak[0], rss()) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        return None
    loaded = sum(map(os.path.getsize, paths)) if device == "cpu" else 0
    return max(0, 1024 * int(done.stdout.split()[-1]) - loaded)


def first_tensor_ms(paths: list[str], device: str) -> float:
    """From the call of `iterate` to its first tensor, cold."""
    from .safetensors import iterate

    drop(paths)
    begun = time.perf_counter()
    tensors = iterate(paths, device)
    next(tensors)
    ms = 1e3 * (time.perf_counter() - begun)
    tensors.close()  # type: ignore[attr-defined]
    return ms


def copy_gb_per_s(device: str, nbytes: int = 1 << 30) -> float:
    """One copy of pinned memory to a device: what no loader is faster than."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return nbytes / min(seconds) / 1e9


def table(rows: list[Row], nbytes: int) -> str:
    """The report for people."""
    lines = [f"{'loader':22} {'version':10} {'cold GB/s':>10} {'over threads':>12} {'CPU-s':>7} {'warm GB/s':>10} {'host MiB':>9}"]
    base = next((row for row in rows if row.loader == "threads of pread" and row.turns), None)
    for row in rows:
        if not row.turns:
            lines.append(f"{row.loader:22} {row.version:10} {row.failed or ''}")
            continue
        cold, warm_ = _median(row, "cold"), _median(row, "warm")
        ratio = f"{_median(base, 'cold')[0] / cold[0]:.2f}" if base else ""
        host = "" if row.host_bytes is None else f"{row.host_bytes / 2**20:.0f}"
        lines.append(
            f"{row.loader:22} {row.version:10} {nbytes / cold[0] / 1e9:10.2f} {ratio:>12} {cold[1]:7.2f}"
            f" {nbytes / warm_[0] / 1e9:10.2f} {host:>9}"
        )
        if row.failed:
            lines[-1] += f"  {row.failed}"
    return "\n".join(lines)


def _median(row: Row, state: str) -> tuple[float, float]:
    seconds, busy = zip(*row.turns.get(state) or [(float("nan"), float("nan"))])
    return statistics.median(seconds), statistics.median(busy)


def run(arguments: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvhoist load-bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILES", help="files, folders or indexes of checkpoints")
    parser.add_argument("--device", help="cpu, or cuda:N (cuda:0 where there is one)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that count, after one that does not (3)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further turn after so many, cold or warm")
    parser.add_argument("--loaders", default="", help=f"some of: {', '.join(LOADERS)} (all; the service where one runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.loaders.split(",") if name.strip()]
    unknown = [name for name in names if name not in LOADERS]
    if unknown or options.rounds < 1:
        found = f"--loaders: found {unknown[0]!r}, expected {', '.join(LOADERS)}" if unknown else "--rounds: expected 1 or more"
        print(f"kvhoist: {found}", file=sys.stderr)
        return 2
    try:
        device = _device(options.device)
        from .safetensors.index import checkpoint_files

        paths = [path for path, _ in checkpoint_files(options.files)]
        nbytes = sum(map(os.path.getsize, paths))
        rows = measure(paths, device, options.rounds, names or _all(), options.seconds)
        add_host_bytes(rows, paths, device)
        first_ms = first_tensor_ms(paths, device)
    except (Error, OSError, RuntimeError) as error:  # The last of torch: a device without room.
        print(f"kvhoist: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        found = f"found no host memory for the files ({str(error) or 'MemoryError'})"
        print(f"kvhoist: {found}, expected room for them twice; give fewer FILES", file=sys.stderr)
        return 2
    if options.json:
        loaders = [row.__dict__ for row in rows]
        print(json.dumps({"files": paths, "nbytes": nbytes, "device": device, "loaders": loaders, "first_tensor_ms": first_ms}))
    else:
        print(f"{len(paths)} files, {nbytes / 1e9:.2f} GB, to {device}; {options.rounds} turns, medians")
        print(table(rows, nbytes))
        print(f"first tensor of kvhoist iterate, cold: {first_ms:.1f} ms")
    return 1 if any(row.failed and row.loader.startswith("kvhoist") for row in rows) else 0


def _device(given: str | None) -> str:
    """The device to load to, tried. Raises UnavailableError and ArgumentError."""
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"load-bench: found no torch ({error}), expected it; install it: pip install torch") from None
    device = given or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        kind = torch.device(device).type
    except (RuntimeError, AssertionError) as error:
        kind = str(error).splitlines()[0]
    if kind not in ("cpu", "cuda"):
        raise ArgumentError(f"--device: found {device!r} ({kind}), expected cpu, or cuda:N of a device that is there")
    return device


def _all() -> list[str]:
    try:
        Service(_native.default_socket())
    except Error:
        return [name for name in LOADERS if name != "kvhoist service"]
    return list(LOADERS)
