#!/usr/bin/env python3
"""A trace of MLPerf Storage's KV-cache workload, through kvhoist and through that benchmark's own file tier, in turns.

    git clone https://github.com/mlcommons/storage; cd storage/kv_cache_benchmark; pip install numpy pyyaml
    python kv-cache.py --config config.yaml --seed 42 --model tiny-1b --num-users 20 --duration 60 --max-requests 30 \\
        --gpu-mem-gb 0 --cpu-mem-gb 0 --max-concurrent-allocs 16 --generation-mode none --storage-capacity-gb 4 \\
        --io-trace-log trace.csv
    python/bench/mlperf_kv.py --trace trace.csv --package storage/kv_cache_benchmark --kvhoist target/release/kvhoist \\
        --dir DIR [--capacity 4GiB] [--in-flight 1] [--turns 3]

The file tier is `NVMeBackend` of their `kv_cache/backends.py`: a .npy file an object, written through the page cache
and flushed, read after its pages are dropped. It never misses; each file goes after its last line, so that the space is what
the recorded run had. kvhoist has blocks of 2 MiB, direct I/O, and memory for 8 of them a line in flight, which answers
about a hundredth of the reads. It verifies every byte within its time, and the file tier none; a block that it evicted
is stored again. Rates are the bytes of all lines over the time of the whole trace, in rows for docs/results/measured.csv.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import datetime
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

Line = tuple[str, str, int]


def read(path: str) -> list[Line]:
    """Operation, object and bytes of each line that is no move between tiers."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return [
            (row["Operation"], row["Key"], int(row["Object_Size_Bytes"])) for row in rows if row["Phase"] != "Evict"
        ]


def file_tier(lines: list[Line], given: argparse.Namespace) -> float:
    """Seconds of the trace in their file tier."""
    sys.path.insert(0, given.package)
    backends, numpy = importlib.import_module("kv_cache.backends"), importlib.import_module("numpy")
    noise = numpy.random.default_rng(1).integers(0, 256, max(size for _, _, size in lines), dtype=numpy.uint8)
    left = collections.Counter(key for _, key, _ in lines)
    turns: dict[str, Any] = collections.defaultdict(threading.Lock)
    places = threading.Semaphore(given.in_flight)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        backend = backends.NVMeBackend(base_path=folder)

        def serve(line: Line) -> None:
            operation, key, size = line
            try:
                if operation == "Write":
                    backend.write(key, noise[:size])
                elif backend.read(key)[0].nbytes != size:
                    raise ValueError(f"{key}: found another size, expected {size} bytes")
                left[key] -= 1
                if not left[key]:
                    backend.delete(key)
            finally:
                turns[key].release()
                places.release()

        begun = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(given.in_flight) as pool:
            running = []
            for line in lines:
                # As kvhoist does: lines begin in order, and those of one object follow one another.
                turns[line[1]].acquire()
                places.acquire()
                running.append(pool.submit(serve, line))
            for one in running:
                one.result()
        return time.perf_counter() - begun


def kvhoist(given: argparse.Namespace) -> dict[str, Any]:
    """What `kvhoist replay` reports of the trace."""
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        command = [given.kvhoist, "replay", "--trace", given.trace, "--block-bytes", "2MiB", "--device-blocks", "0"]
        command += [
            "--host-blocks",
            str(8 * given.in_flight),
            "--capacity",
            given.capacity,
            "--path",
            str(Path(folder, "store")),
        ]
        command += ["--in-flight", str(given.in_flight), "--json", "--quiet"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=given.timeout, check=True)
        return json.loads(ended.stdout)


def main() -> None:
    """Prints rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="not compressed")
    parser.add_argument("--package", required=True, help="the folder kv_cache_benchmark")
    parser.add_argument("--kvhoist", required=True, help="the command")
    parser.add_argument("--dir", required=True, help="a folder on the drive")
    parser.add_argument("--capacity", default="4GiB")
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=1200, help="seconds of one run of kvhoist")
    parser.add_argument("--machine", default="unnamed")
    parser.add_argument("--commit", default="unknown", help="for the rows")
    given = parser.parse_args()
    lines = read(given.trace)
    mib = sum(size for _, _, size in lines) / 2**20
    ours: list[dict[str, Any]] = []
    theirs: list[float] = []
    for _ in range(given.turns):
        ours.append(kvhoist(given))
        theirs.append(mib / file_tier(lines, given))
    command = (
        f"python/bench/mlperf_kv.py --capacity {given.capacity} --in-flight {given.in_flight} --turns {given.turns}"
    )
    what = f"{len(lines)} lines, {mib / 1024:.0f} GiB"
    writer = csv.writer(sys.stdout, lineterminator="\n")

    def row(case: str, value: str, unit: str) -> None:
        origin = ("mlperf", datetime.date.today().isoformat(), given.commit, given.machine, command)
        writer.writerow((*origin, what, case, value, unit, "", ""))

    rates = [mib / one["seconds"] for one in ours]
    row("hit ratio", f"{statistics.median(one['hit_ratio'] for one in ours):.4f}", "of references")
    row("kvhoist, every byte verified", f"{statistics.median(rates):.0f}", "MiB/s")
    row("their file tier", f"{statistics.median(theirs):.0f}", "MiB/s")
    ratios = [own / other for own, other in zip(rates, theirs)]
    row("kvhoist over file tier", f"{statistics.median(ratios):.2f}", "x")
    print(f"# turns: {[f'{own:.0f} {other:.0f}' for own, other in zip(rates, theirs)]}", file=sys.stderr)
    if any(one["verification_failures"] or one["store_failures"] for one in ours):
        sys.exit("found blocks that were wrong or not stored, expected none")


if __name__ == "__main__":
    main()
