#!/usr/bin/env python3
"""Blocks out of Redis into a program's memory: kvhoist's remote tier beside LMCache's own client, `resp`, in turns.

    python/test --engines lmcache                            # makes python/.venv, with torch
    python -m pip download --no-deps lmcache==0.5.6 && python -m zipfile -e lmcache-0.5.6-*.whl DIR
    KVHOIST_LMCACHE=DIR LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/remote.py [--blocks 256] [--block-kib 1024] [--turns 5]

A redis-server of this run, without a disk, holds a copy for each. In each turn a process of its own loads all blocks in
one call, after it has connected, and kvhoist after it knows what the server has. kvhoist verifies every block, has it in
host memory then, and copies it to the program; LMCache's client writes what the server sends to the program. The time is
that of the call; the processor time is the process's for it, without the server's. Both are checked byte by byte after.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 8


def payload(n: int, block_bytes: int) -> bytes:
    """What block `n` has."""
    return (hashlib.sha256(str(n).encode()).digest() * (block_bytes // 32 + 1))[:block_bytes]


def kvhoist_cache(port: int, given: argparse.Namespace, policy: str) -> Any:
    """A cache over the server alone."""
    import kvhoist

    return kvhoist.Cache(
        block_bytes=given.block_bytes,
        host_blocks=given.blocks + 16,
        namespace="bench",
        remote=f"redis://127.0.0.1:{port}/0",
        remote_policy=policy,
        remote_upload_bytes_per_s=1 << 40,
    )


def known(cache: Any, blocks: int) -> None:
    """Waits until the cache knows that the server has so many blocks."""
    until = time.monotonic() + 120
    while cache.stats()["tiers"]["remote"]["resident"] < blocks:
        if time.monotonic() > until:
            sys.exit(f"remote: found {cache.stats()['tiers']['remote']} after 120 s, expected {blocks} blocks")
        time.sleep(0.005)


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call, and of this process's threads for it."""
    began, busy = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - busy}


def kvhoist(port: int, given: argparse.Namespace, store: bool) -> dict[str, float]:
    """Stores all blocks, or loads them."""
    keys = [f"block-{n}" for n in range(given.blocks)]
    with kvhoist_cache(port, given, "stored" if store else "never") as cache:
        if store:
            cache.store(keys, [payload(n, given.block_bytes) for n in range(given.blocks)])
            known(cache, given.blocks)
            return {}
        known(cache, given.blocks)
        memory = bytearray(given.blocks * given.block_bytes)
        memory[:: given.page_bytes] = b"\1" * len(memory[:: given.page_bytes])
        parts = places(memory, given)
        found: list[bool] = []
        result = timed(lambda: found.extend(cache.load(keys, parts)))
        if not all(found):
            sys.exit(f"remote: kvhoist has loaded {sum(found)} of {given.blocks} blocks")
        check(parts, given)
        return result


def places(memory: bytearray, given: argparse.Namespace) -> list[memoryview]:
    """The blocks' places in a program's memory."""
    view = memoryview(memory)
    return [view[n * given.block_bytes : (n + 1) * given.block_bytes] for n in range(given.blocks)]


def check(parts: list[memoryview], given: argparse.Namespace) -> None:
    """Compares every byte."""
    for n, part in enumerate(parts):
        if part != payload(n, given.block_bytes):
            sys.exit(f"remote: block {n} has wrong bytes")


def lmcache(port: int, given: argparse.Namespace, store: bool) -> dict[str, float]:
    """The same by LMCache's client for RESP, which its adapter `resp` wraps."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
    from engines import lmcache as engine

    engine.boot(os.environ["KVHOIST_LMCACHE"])
    import torch  # noqa: F401  (the client is linked with it)
    from lmcache.lmcache_redis import LMCacheRedisClient

    client = LMCacheRedisClient("127.0.0.1", port, WORKERS, "", "")
    keys = [f"lmcache-{n}" for n in range(given.blocks)]
    memory = bytearray(given.blocks * given.block_bytes)
    memory[:: given.page_bytes] = b"\1" * len(memory[:: given.page_bytes])
    parts = places(memory, given)
    if store:
        for n, part in enumerate(parts):
            part[:] = payload(n, given.block_bytes)

    def run() -> None:
        submit = client.submit_batch_set if store else client.submit_batch_get
        task = int(submit(keys, parts))
        while True:
            select.select([client.event_fd()], [], [])
            for done in client.drain_completions():
                if int(done[0]) == task:
                    if not done[1]:
                        sys.exit(f"remote: LMCache's client has failed: {done[1:]}")
                    return

    result = timed(run)
    check(parts, given)
    client.close()
    return result


CONTENDERS = {"kvhoist": kvhoist, "LMCache resp": lmcache}


def child(name: str, port: int, given: argparse.Namespace, store: bool) -> dict[str, float]:
    """One contender in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--port", str(port)]
    command += ["--blocks", str(given.blocks), "--block-kib", str(given.block_kib)] + ["--store"] * store
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def server(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """A Redis in memory, on a port of this machine."""
    program = shutil.which("redis-server") or sys.exit("remote: found no redis-server; install the package of that name")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, port
        time.sleep(0.02)
    process.kill()
    sys.exit(f"remote: redis-server does not listen on port {port}")


def main() -> None:
    """Prints the medians and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.block_bytes, given.page_bytes = given.block_kib << 10, 4096
    if given.child:
        print(json.dumps(CONTENDERS[given.child](given.port, given, given.store)))
        return
    if not os.path.isdir(os.environ.get("KVHOIST_LMCACHE", "")):
        sys.exit("KVHOIST_LMCACHE: found no folder, expected LMCache's wheel unpacked, with its native modules")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        process, port = server(folder)
        try:
            for name in CONTENDERS:
                child(name, port, given, True)
            for _ in range(given.turns):
                for name, found in results.items():
                    found.append(child(name, port, given, False))
        finally:
            process.kill()
            process.wait()
    gib = given.blocks * given.block_bytes / (1 << 30)
    print(f"{given.blocks} blocks of {given.block_kib} KiB, medians of {given.turns} turns")
    for name, found in results.items():
        rates = [gib * 1024 / one["seconds"] for one in found]
        busy = [one["cpu_seconds"] / gib for one in found]
        print(
            f"  {name:<14}  {statistics.median(rates):6.0f} MiB/s ({min(rates):.0f} to {max(rates):.0f})"
            f"  {statistics.median(busy):.2f} CPU-s/GiB"
        )
    ours, theirs = results.values()
    for what, unit in (("seconds", "bytes a second"), ("cpu_seconds", "CPU")):
        ratios = [other[what] / one[what] for one, other in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios if what == "seconds" else [1 / ratio for ratio in ratios])
        print(f"  kvhoist over LMCache, {unit}: {ratio:.2f}")


if __name__ == "__main__":
    main()
