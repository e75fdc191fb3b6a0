"""kvhoist's L2 adapter against LMCache's own, through LMCache's factory, over its L1 memory, in interleaved rounds.

    python/test --engines lmcache                            # makes python/.venv, with torch and LMCache's modules
    KVHOIST_LMCACHE=python/.venv/lmcache-0.5.6 LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/lmcache.py [--dir DIR] [--object-bytes 8388608] [--objects 16] [--rounds 5]

Each round every entrant stores a task of new objects, looks them up, and loads them into memory that was zeroed; every
byte is compared. Objects of the round before are deleted outside of the measurement. No entrant uses the page cache:
all use O_DIRECT. Preallocated files are written once before the first round. Ratios are within a round; medians and
ranges are printed.

`raw_block` needs LMCache's Rust extension `lmcache_rust_raw_block_io`, which is no part of its wheel: build it from
`rust/raw_block` of LMCache's source distribution. `fs_native` needs `lmcache_fs`, which is in the wheel, and which
`python/tests/unpack.py` takes out of it. The bench leaves out entrants that cannot run, and says why.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import resource
import select
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import lm  # noqa: E402

GIB = 1 << 30
MIB = 1 << 20


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Entrant:
    """An adapter with memory of its own, LMCache's."""

    def __init__(self, name: str, config: dict, options) -> None:
        self.name = name
        modules = lm.boot()
        memory = __import__("lmcache.v1.distributed.memory_manager", fromlist=["L1MemoryManager"])
        size = (options.objects + 1) * options.object_bytes
        self.l1 = memory.L1MemoryManager(modules.config.L1MemoryManagerConfig(size, False, shm_name=""))
        factory = __import__("lmcache.v1.distributed.l2_adapters", fromlist=["create_l2_adapter"])
        (parsed,) = lm.parsed(config).adapters
        self.adapter = factory.create_l2_adapter(parsed, self.l1.get_l1_memory_desc())
        layout = lm.layout_of(options.object_bytes)
        self.layouts = {0: layout} if lm.version() >= (0, 5, 6) else layout
        _, self.objects = self.l1.allocate(layout, options.objects)
        self.keys: list = []

    def prepare(self, round_: int, noise) -> None:
        """Forgets the last round's objects, and has other bytes in memory."""
        self.adapter.delete(self.keys)
        self.keys = [
            lm.boot().api.ObjectKey(hashlib.sha256(f"{round_}/{n}".encode()).digest(), "bench", 0)
            for n in range(len(self.objects))
        ]
        for n, obj in enumerate(self.objects):
            obj.raw_data.copy_(noise[n * 17 + round_ : n * 17 + round_ + len(obj.raw_data)])

    def zero(self) -> None:
        for obj in self.objects:
            obj.raw_data.zero_()

    def same(self, round_: int, noise) -> bool:
        import torch

        return all(
            torch.equal(obj.raw_data, noise[n * 17 + round_ : n * 17 + round_ + len(obj.raw_data)])
            for n, obj in enumerate(self.objects)
        )

    def store(self) -> tuple[float, float]:
        cpu, wall = cpu_seconds(), time.perf_counter()
        task = self.adapter.submit_store_task(self.keys, self.objects)
        while task not in (done := self.adapter.pop_completed_store_tasks()):
            wait(self.adapter.get_store_event_fd())
        took = time.perf_counter() - wall, cpu_seconds() - cpu
        assert done[task].is_successful(), self.name
        return took

    def look_up(self) -> tuple[float, float]:
        cpu, wall = cpu_seconds(), time.perf_counter()
        task = self.adapter.submit_lookup_and_lock_task(self.keys, self.layouts)
        while (found := self.adapter.query_lookup_and_lock_result(task)) is None:
            wait(self.adapter.get_lookup_and_lock_event_fd())
        took = time.perf_counter() - wall, cpu_seconds() - cpu
        assert found.popcount() == len(self.keys), self.name
        return took

    def load(self) -> tuple[float, float]:
        cpu, wall = cpu_seconds(), time.perf_counter()
        task = self.adapter.submit_load_task(self.keys, self.objects)
        while (loaded := self.adapter.query_load_result(task)) is None:
            wait(self.adapter.get_load_event_fd())
        took = time.perf_counter() - wall, cpu_seconds() - cpu
        self.adapter.submit_unlock(self.keys)
        assert loaded.popcount() == len(self.keys), self.name
        return took

    def close(self) -> None:
        self.adapter.close()
        self.l1.free(self.objects)
        self.l1.close()


def wait(fd: int) -> None:
    select.select([fd], [], [])
    try:
        os.read(fd, 8)
    except BlockingIOError:
        pass


def write_whole(path: Path, start: int) -> None:
    """Writes every byte of a file from `start` on: what never was written is read without the drive."""
    block = mmap.mmap(-1, 4 * MIB)
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    for at in range(start, os.fstat(fd).st_size, len(block)):
        os.pwrite(fd, memoryview(block)[: min(len(block), os.fstat(fd).st_size - at)], at)
    os.fsync(fd)
    os.close(fd)


def entrants(folder: Path, options) -> list[Entrant]:
    capacity = 3 * options.objects * options.object_bytes + 64 * MIB
    ours = Entrant(
        "kvhoist",
        lm.adapter_config(
            folder / "kvhoist", capacity=capacity, block_bytes=options.block_bytes, direct_io="require",
            host_bytes="64MiB",
        ),
        options,
    )  # fmt: skip
    (path,) = folder.rglob("kvhoist.store")
    slots = ours.adapter.store.cache.stats()["tiers"]["disk"]["slots"]
    write_whole(path, path.stat().st_size - slots * options.block_bytes)
    found = [ours]
    device = folder / "raw_block"
    raw_block = {
        "type": "raw_block", "device_path": str(device), "slot_bytes": options.object_bytes + 4096,
        "meta_total_bytes": 16 * MIB, "meta_enable_periodic": False,
    }  # fmt: skip
    files = folder / "fs_native"
    others = {
        "raw_block io_uring": {**raw_block, "io_engine": "io_uring"},
        "raw_block posix": raw_block,
        "fs_native": {"type": "fs_native", "base_path": str(files), "use_odirect": True, "num_workers": 8},
    }
    for name, config in others.items():
        if config["type"] == "raw_block":
            config["device_path"] = str(device) + name.split()[-1]
            with open(config["device_path"], "wb") as file:
                os.posix_fallocate(file.fileno(), 0, capacity // 4096 * 4096)
            write_whole(Path(config["device_path"]), 0)
        files.mkdir(exist_ok=True)
        try:
            found.append(Entrant(name, config, options))
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            print(f"{name} cannot run here: {error}")
    return found


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def compare(folder: Path, options) -> None:
    import torch

    all_ = entrants(folder, options)
    generator = torch.Generator().manual_seed(1)
    length = options.object_bytes + options.objects * 17 + options.rounds + 8192
    noise = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    gib = options.objects * options.object_bytes / GIB
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    print(f"{options.objects} objects of {options.object_bytes} bytes a round, {gib:.2f} GiB", flush=True)
    for round_ in range(options.rounds + 1):
        # Who goes first changes: what a drive gives depends on what it has just done.
        for entrant in all_ if round_ % 2 else all_[::-1]:
            entrant.prepare(round_, noise)
            samples = {"store": entrant.store(), "lookup": entrant.look_up()}
            entrant.zero()
            samples["load"] = entrant.load()
            if not entrant.same(round_, noise):
                raise SystemExit(f"{entrant.name} gave other bytes")
            for what, sample in samples.items():
                if round_ > 0:  # The first round warms up.
                    figures.setdefault((entrant.name, what), []).append(sample)
    report(figures, gib)
    for entrant in all_:
        entrant.close()


def report(figures: dict, gib: float) -> None:
    for what in ("store", "load", "lookup"):
        unit = "us" if what == "lookup" else "MiB/s"
        print(f"\n{what:20}{unit:>26}{'CPU s/GiB':>24}{'kvhoist is times as fast':>28}{'and takes of its CPU':>26}")
        ours = figures["kvhoist", what]
        for (name, which), samples in figures.items():
            if which != what:
                continue
            speed = [wall * 1e6 if what == "lookup" else gib * 1024 / wall for wall, _ in samples]
            line = f"{name:20}{spread(speed, '.0f'):>26}{spread([used / gib for _, used in samples], '.3f'):>24}"
            if name != "kvhoist":
                line += f"{spread([theirs[0] / mine[0] for theirs, mine in zip(samples, ours)], '.2f'):>28}"
                line += f"{spread([mine[1] / max(theirs[1], 1e-9) for theirs, mine in zip(samples, ours)], '.2f'):>26}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", default=str(HERE.parents[1] / "target"), help="a folder on the drive")
    parser.add_argument("--object-bytes", type=int, default=8 * MIB, help="a multiple of 4096")
    parser.add_argument("--objects", type=int, default=16, help="objects of a task")
    parser.add_argument("--block-bytes", type=int, default=2 * MIB, help="kvhoist's setting")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if why := lm.missing():
        raise SystemExit(why)
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    lm.boot()
    os.makedirs(options.dir, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-lmcache-", dir=options.dir))
    try:
        compare(folder, options)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
