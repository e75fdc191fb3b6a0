#!/usr/bin/env python3
"""LMCache's own benchmark, `lmcache bench l2`, over kvhoist and over LMCache's adapters, in turns on one drive.

    python/test --engines lmcache                            # makes python/.venv, with torch and LMCache's modules
    python/.venv/bin/pip install aiofiles                    # for LMCache's fs
    KVHOIST_LMCACHE=python/.venv/lmcache-0.5.6 LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/lmcache_l2.py --dir DIR [--adapters kvhoist,fs] [--turns 3] [--csv FILE]

Each turn runs the benchmark once for each adapter, in a process and a folder of its own, with 4 KiB alignment, three
rounds behind one that warms up, and its check of every byte. `fs` goes through the page cache, `fs-direct` uses
O_DIRECT; `fs_native` needs LMCache's extension `lmcache_fs`; `python/bench/lmcache.py` has `raw_block`. An adapter that
cannot run is left out, with its last line on standard error. Rows have the median of the turns.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = (
    "date commit machine command adapter operation object_bytes objects turns mb_per_s mb_per_s_min mb_per_s_max"
).split()
#: Runs LMCache's command out of an unpacked wheel.
COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import aiofiles.os
except ImportError:
    pass
from engines import lmcache
lmcache.boot(sys.argv[2])
from lmcache.cli.main import main
sys.argv[1:3] = ["bench", "l2"]
main()
"""


def specification(adapter: str, folder: str, capacity: str) -> dict[str, Any]:
    """An adapter for LMCache's `--l2-adapter`."""
    if adapter == "kvhoist":
        params = {"path": folder, "capacity": capacity}
        return {"type": "plugin", "module_path": "kvhoist.lmcache", "class_name": "KvhoistL2", "adapter_params": params}
    if adapter == "fs-direct":
        return {"type": "fs", "base_path": folder, "use_odirect": True}
    if adapter == "fs_native":
        return {"type": adapter, "base_path": folder, "use_odirect": True}
    return {"type": adapter, "base_path": folder}


def run(adapter: str, given: argparse.Namespace) -> dict[str, float]:
    """MB/s of one run by operation; empty where it failed."""
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        output = os.path.join(folder, "result.json")
        os.mkdir(os.path.join(folder, "store"), 0o700)
        spec = specification(adapter, os.path.join(folder, "store"), given.capacity)
        tests = str(Path(__file__).resolve().parents[1] / "tests/support")
        command = [
            sys.executable,
            "-c",
            COMMAND,
            tests,
            os.environ["KVHOIST_LMCACHE"],
            "--l2-adapter",
            json.dumps(spec),
        ]
        command += [
            "--num-keys",
            str(given.objects),
            "--data-size-kb",
            str(given.object_kib),
            "--l1-align-bytes",
            "4096",
        ]
        command += ["--rounds", "3", "--lookup-max-hit-rate", "1", "--no-skip-verify", "--format", "json"]
        ended = subprocess.run(
            [*command, "--output", output], capture_output=True, text=True, timeout=given.timeout, check=False
        )
        try:
            sections = json.loads(Path(output).read_text(encoding="utf-8"))["metrics"].values()
        except (OSError, ValueError, KeyError):
            sections = ()
        found = [one for one in sections if one.get("operation") in ("Store", "Load")]
        if ended.returncode or not found or any(one["total_success"] < one["total_keys"] for one in found):
            print(f"# {adapter}: {(ended.stdout + ended.stderr).strip().splitlines()[-1:]}", file=sys.stderr)
            return {}
        return {one["operation"].lower(): one["throughput_avg_mbps"] for one in found}


def main() -> None:
    """Prints rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a folder on the drive")
    parser.add_argument("--adapters", default="kvhoist,fs,fs-direct,fs_native")
    parser.add_argument("--object-kib", type=int, default=8192)
    parser.add_argument("--objects", type=int, default=16, help="in a submission")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--capacity", default="2GiB")
    parser.add_argument("--timeout", type=int, default=120, help="seconds of one run")
    parser.add_argument("--machine", default="unnamed")
    parser.add_argument("--commit", default="unknown", help="for the rows")
    parser.add_argument("--csv", help="a file for the rows")
    given = parser.parse_args()
    if not os.path.isdir(os.environ.get("KVHOIST_LMCACHE", "")):
        sys.exit("KVHOIST_LMCACHE: found no folder, expected LMCache's wheel unpacked; python/test makes it")
    adapters = given.adapters.split(",")
    results: dict[str, list[dict[str, float]]] = {adapter: [] for adapter in adapters}
    for _ in range(given.turns):
        for adapter in list(results):
            found = run(adapter, given)
            if found:
                results[adapter].append(found)
            else:
                del results[adapter]
    files = [sys.stdout] + ([open(given.csv, "w", encoding="utf-8")] if given.csv else [])
    for file in files:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for adapter, turns in results.items():
            for operation in ("store", "load"):
                rates = [turn[operation] for turn in turns]
                writer.writerow({
                    "date": datetime.date.today().isoformat(), "commit": given.commit, "machine": given.machine,
                    "command": f"python/bench/lmcache_l2.py --object-kib {given.object_kib} --objects {given.objects}",
                    "adapter": adapter, "operation": operation, "object_bytes": given.object_kib << 10,
                    "objects": given.objects, "turns": len(rates), "mb_per_s": f"{statistics.median(rates):.0f}",
                    "mb_per_s_min": f"{min(rates):.0f}", "mb_per_s_max": f"{max(rates):.0f}",
                })  # fmt: skip


if __name__ == "__main__":
    main()
