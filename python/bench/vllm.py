"""kvhoist's tier against vLLM's own `fs` tier and a bare ring loop, through vLLM's factory, in interleaved rounds.

    python/test                                              # makes python/.venv, with torch and vLLM's modules
    KVHOIST_VLLM=python/.venv/vllm-0.33.0 LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/vllm.py [--dir DIR] [--chunk-bytes 2097152] [--chunks 64] [--rounds 5]

Each round every entrant stores a job of new chunks, and loads them into memory that was zeroed; every byte is compared.
No entrant uses the page cache: both tiers use O_DIRECT, and the bench ends if `fs` does not. `ring` is the bare loop of
`benches/ring.rs` on the blocks of kvhoist's own store, with a buffer for each operation in flight, which may stay in
the processor's cache; `places` is the same loop with a buffer for each chunk of a job, as an engine has. Ratios are
within a round; medians and ranges are printed.
`lookup` is one call for each of 4,096 keys, as vLLM makes them, beside lookups in a dict. `KVHOIST_RING` names a
built `ring` where there is no cargo.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import vtier  # noqa: E402

GIB = 1 << 30
KEYS = 4096


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Tier:
    """A tier with an engine and memory of its own."""

    name = "?"

    def __init__(self, folder: Path, options) -> None:
        import numpy

        self.folder = folder / self.name
        self.folder.mkdir()
        self.engine = vtier.Engine(
            [self.config(options)], rows=options.chunks, workers=1, cell_bytes=options.chunk_bytes
        )
        self.tier = self.engine.tier
        self.rows = numpy.arange(options.chunks, dtype=numpy.int32)
        self.memory = self.engine.views[0]
        self.jobs = 0

    def config(self, options) -> dict: ...

    def wait(self) -> None:
        """Returns when a job may have ended: an idle engine looks once a millisecond."""
        time.sleep(0.001)

    def move(self, keys: list[bytes], is_load: bool) -> tuple[float, float]:
        """One job; wall and processor seconds until its result is there."""
        modules = self.engine.modules
        self.jobs += 1
        job = vtier.made(
            modules.tiering.TransferJob, job_id=self.jobs, keys=keys, chunk_ids=self.rows, block_ids=self.rows,
            is_promotion=is_load, req_context=self.engine.request(keys),
        )  # fmt: skip
        cpu, wall = cpu_seconds(), time.perf_counter()
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        while not (results := list(self.tier.get_finished_jobs())):
            self.wait()
        took = time.perf_counter() - wall, cpu_seconds() - cpu
        assert [result.success for result in results] == [True], results
        return took

    def check(self) -> None:
        """That the bench compares what it says."""

    def close(self) -> None:
        self.engine.close()


class Kvhoist(Tier):
    name = "kvhoist"

    def config(self, options) -> dict:
        slots = (options.rounds + 2) * options.chunks
        capacity = slots * (options.chunk_bytes + 8192) + (64 << 20)
        return vtier.tier_config(self.folder, capacity=capacity, host_bytes="64MiB", direct_io="require")


class Fs(Tier):
    name = "fs"

    def config(self, options) -> dict:
        return {"type": "fs", "root_dir": str(self.folder)}

    def check(self) -> None:
        if not self.tier._use_o_direct:
            raise SystemExit(f"fs does not use O_DIRECT on {self.folder}: choose another --dir")


class Ring:
    """The bare loop, in a process of its own, on the slots of kvhoist's store."""

    def __init__(self, name: str, places: int, kvhoist: Kvhoist, options) -> None:
        self.name = name
        (path,) = kvhoist.folder.rglob("kvhoist.store")
        self.count = options.chunks
        slots = kvhoist.tier.store.cache.stats()["tiers"]["disk"]["slots"]
        offset = path.stat().st_size - slots * options.chunk_bytes
        built = os.environ.get("KVHOIST_RING")
        command = [built] if built else ["cargo", "bench", "-q", "-p", "kvhoist", "--bench", "ring", "--"]
        command += ["--file", str(path)]
        command += ["--offset", str(offset), "--blocks", str(slots), "--block-bytes", str(options.chunk_bytes)]
        self.process = subprocess.Popen(
            [*command, "--depth", str(options.depth), "--places", str(places)],
            cwd=HERE.parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit("the bare ring loop did not start")
        # What was never written is read without the drive, and written with more work.
        self.run("write", slots)

    def run(self, what: str, count: int) -> tuple[float, float]:
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        seconds, cpu = map(float, self.process.stdout.readline().split())
        return seconds, cpu

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def fill(memory, noise, round_: int) -> None:
    """Noise, another each round."""
    for row in range(len(memory)):
        memory[row].copy_(noise[row * 17 + round_ : row * 17 + round_ + memory.shape[1]])


def same(memory, noise, round_: int) -> bool:
    import torch

    at = lambda row: row * 17 + round_  # noqa: E731
    return all(torch.equal(memory[row], noise[at(row) : at(row) + memory.shape[1]]) for row in range(len(memory)))


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def compare(folder: Path, options) -> None:
    import torch

    entrants = [Kvhoist(folder, options), Fs(folder, options)]
    for entrant in entrants:
        entrant.check()
    rings = []
    if not options.no_ring:
        places = {"ring": options.depth, "places": max(options.chunks, options.depth)}
        rings = [Ring(name, count, entrants[0], options) for name, count in places.items()]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(
        -128, 128, (options.chunk_bytes + options.chunks * 17 + 64,), dtype=torch.int8, generator=generator
    )
    gib = options.chunks * options.chunk_bytes / GIB
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    print(f"{options.chunks} chunks of {options.chunk_bytes} bytes a round, {gib:.2f} GiB", flush=True)
    for round_ in range(options.rounds + 1):
        keys = vtier.keys_of(f"round {round_}", options.chunks)
        samples = {}
        # Who goes first changes: what a drive gives depends on what it has just done.
        for entrant in entrants if round_ % 2 else entrants[::-1]:
            fill(entrant.memory, noise, round_)
            samples[entrant.name, "store"] = entrant.move(keys, False)
            entrant.memory.zero_()
            samples[entrant.name, "load"] = entrant.move(keys, True)
            if not same(entrant.memory, noise, round_):
                raise SystemExit(f"{entrant.name} gave other bytes")
        for ring in rings:
            samples[ring.name, "load"] = ring.run("read", options.chunks)
            samples[ring.name, "store"] = ring.run("write", options.chunks)
        if round_ > 0:  # The first round warms up.
            for name, sample in samples.items():
                figures.setdefault(name, []).append(sample)
    report(figures, gib)
    lookups(entrants[0])
    for entrant in (*entrants, *rings):
        entrant.close()


def report(figures: dict, gib: float) -> None:
    for what in ("load", "store"):
        print(f"\n{what:10}{'MiB/s':>28}{'CPU s/GiB':>24}{'kvhoist is times as fast':>30}{'and takes of its CPU':>26}")
        ours = figures["kvhoist", what]
        for (name, which), samples in figures.items():
            if which != what:
                continue
            speed, cpu = [gib * 1024 / wall for wall, _ in samples], [used / gib for _, used in samples]
            line = f"{name:10}{spread(speed, '.0f'):>28}{spread(cpu, '.3f'):>24}"
            if name != "kvhoist":
                line += f"{spread([theirs[0] / mine[0] for theirs, mine in zip(samples, ours)], '.2f'):>30}"
                line += f"{spread([mine[1] / max(theirs[1], 1e-9) for theirs, mine in zip(samples, ours)], '.2f'):>26}"
            print(line)


def lookups(entrant: Kvhoist) -> None:
    """All hits and all misses, over a dict."""
    import kvhoist
    from kvhoist._native import chunk_keys

    context, tier = entrant.engine.request(), entrant.tier
    there, not_there = vtier.keys_of("there", KEYS), vtier.keys_of("not there", KEYS)
    results = entrant.engine.modules.base.LookupResult
    with kvhoist.Cache(block_bytes=16, host_bytes=KEYS * 8192) as cache:
        # What the tier asks, of a cache with room for so many.
        cache.store(chunk_keys(there), [bytes(16)] * KEYS)
        lookup, tier.lookup = tier.lookup, cache.answers(results.HIT, results.MISS, tier._known).answer
        known = dict.fromkeys(there)
        for what, keys in (("hits", there), ("misses", not_there)):
            took, plain = [], []
            for _ in range(50):
                started = time.perf_counter()
                for key in keys:
                    tier.lookup(key, context)
                took.append(time.perf_counter() - started)
                started = time.perf_counter()
                for key in keys:
                    key in known  # noqa: B015
                plain.append(time.perf_counter() - started)
            micros = [seconds * 1e6 for seconds in took]
            ratios = [mine / theirs for mine, theirs in zip(took, plain)]
            print(f"lookup of {KEYS} keys, all {what}: {spread(micros, '.0f')} us, {spread(ratios, '.1f')} dicts")
        tier.lookup = lookup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", default=str(HERE.parents[1] / "target"), help="a folder on the drive")
    parser.add_argument("--chunk-bytes", type=int, default=2 << 20, help="a multiple of 4096")
    parser.add_argument("--chunks", type=int, default=64, help="chunks of a job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8, help="operations that the bare loop has in flight")
    parser.add_argument("--no-ring", action="store_true", help="leave the bare loop out")
    options = parser.parse_args()
    if why := vtier.missing():
        raise SystemExit(why)
    vtier.boot()
    # The threads of torch's copies spin for a while afterwards, and would be counted.
    __import__("torch").set_num_threads(1)
    os.makedirs(options.dir, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-vllm-", dir=options.dir))
    try:
        compare(folder, options)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
