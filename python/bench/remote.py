#!/usr/bin/env python3
"""Blocks into Redis and out of it: kvhoist's remote tier beside LMCache's own client, `resp`, in turns.

    python/test --engines lmcache                            # makes python/.venv, with torch
    python -m pip download --no-deps lmcache==0.5.6 && python -m zipfile -e lmcache-0.5.6-*.whl DIR
    KVHOIST_LMCACHE=DIR LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/remote.py [--blocks 256] [--block-kib 1024] [--turns 5]

A redis-server of each turn, without a disk, gets a copy of all blocks from each, and gives them back: each time to a process
of its own, in one call, after it has connected, and kvhoist after it knows what the server has. kvhoist's store ends when
the blocks are in Redis, from the program's memory or from where the cache has them (`in place`). Its load verifies every block
and has it in host memory then, as LMCache's client has it, which verifies nothing (`in place`), or copies it to the program from
there. All memory was written before. The time is that of the call; the processor time is the process's for it, without the
server's, and without what the looks for the end of kvhoist's background work take. All bytes are compared afterwards.
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


def kvhoist_cache(url: str, given: argparse.Namespace, policy: str, namespace: str) -> Any:
    """A cache over the store alone."""
    import kvhoist

    return kvhoist.Cache(
        block_bytes=given.block_bytes,
        host_blocks=given.blocks + 16,
        namespace=namespace,
        remote=url,
        remote_policy=policy,
        remote_upload_bytes_per_s=1 << 40,
    )


class Wait:
    """Looks every 2 ms whether something is so. What the looks take of the processor is no part of a result."""

    cpu_seconds = 0.0

    @classmethod
    def until(cls, is_so: Callable[[], bool]) -> None:
        """Ends the benchmark after two minutes."""
        end = time.monotonic() + 120
        while True:
            began = time.thread_time()
            is_over = is_so()
            cls.cpu_seconds += time.thread_time() - began
            if is_over:
                return
            if time.monotonic() > end:
                sys.exit("remote: blocks are missing after 120 s")
            time.sleep(0.002)


def known(cache: Any, blocks: int) -> None:
    """Waits until the cache knows that the server has so many blocks."""
    Wait.until(lambda: cache.stats()["tiers"]["remote"]["resident"] >= blocks)


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call, and of this process's threads for it."""
    began, busy, waited = time.perf_counter(), time.process_time(), Wait.cpu_seconds
    call()
    busy = time.process_time() - busy - (Wait.cpu_seconds - waited)
    return {"seconds": time.perf_counter() - began, "cpu_seconds": busy}


def kvhoist(url: str, given: argparse.Namespace, store: bool, in_place: bool = False) -> dict[str, float]:
    """Stores all blocks, or brings them into host memory, and copies them to the program unless it reads in place."""
    keys = [f"block-{n}" for n in range(given.blocks)]
    with kvhoist_cache(url, given, "reused" if store else "never", f"bench {in_place}") as cache:
        touched(cache, given)
        if store:
            blocks = [payload(n, given.block_bytes) for n in range(given.blocks)]

            def run() -> None:
                if not in_place:
                    cache.store(keys, blocks)
                cache.keep(keys, 60.0)
                known(cache, given.blocks)

            if in_place:
                cache.store(keys, blocks)
            return timed(run)
        known(cache, given.blocks)
        parts = places(touched_memory(given), given)
        found: list[bool] = []

        def bring() -> None:
            cache.prefetch(keys)
            for at in range(0, len(keys), 16):
                Wait.until(lambda at=at: set(cache.tiers(keys[at : at + 16])) == {"host"})

        if in_place:
            result = timed(bring)
            found.extend(cache.load(keys, parts))
        else:
            result = timed(lambda: found.extend(cache.load(keys, parts)))
        if not all(found):
            sys.exit(f"remote: kvhoist has loaded {sum(found)} of {given.blocks} blocks")
        check(parts, given)
        return result


def redis(in_place: bool) -> Callable[[int, argparse.Namespace, bool], dict[str, float]]:
    """kvhoist with a Redis; `in_place` of blocks that stay where the cache has them."""
    return lambda port, given, store: kvhoist(f"redis://127.0.0.1:{port}/0", given, store, in_place)


def touched(cache: Any, given: argparse.Namespace) -> None:
    """Has the system give all memory of the cache: stores as many other blocks as it has slots."""
    for n in range(given.blocks + 16):
        cache.store([f"other-{n}"], [bytes(given.block_bytes)])


def touched_memory(given: argparse.Namespace) -> bytearray:
    """A program's memory, which the system has given."""
    memory = bytearray(given.blocks * given.block_bytes)
    memory[:: given.page_bytes] = b"\1" * len(memory[:: given.page_bytes])
    return memory


def places(memory: bytearray, given: argparse.Namespace) -> list[memoryview]:
    """The blocks' places in a program's memory."""
    view = memoryview(memory)
    return [view[n * given.block_bytes : (n + 1) * given.block_bytes] for n in range(given.blocks)]


def fill(parts: list[memoryview], given: argparse.Namespace) -> None:
    """Gives every block its bytes."""
    for n, part in enumerate(parts):
        part[:] = payload(n, given.block_bytes)


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
    parts = places(touched_memory(given), given)
    if store:
        fill(parts, given)

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


CONTENDERS = {"kvhoist": redis(False), "kvhoist in place": redis(True), "LMCache resp": lmcache}


def child(name: str, port: int, given: argparse.Namespace, store: bool) -> dict[str, float]:
    """One contender in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--port", str(port)]
    command += ["--blocks", str(given.blocks), "--block-kib", str(given.block_kib)] + ["--store"] * store
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def server(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """A Redis in memory, on a port of this machine."""
    program = shutil.which("redis-server") or sys.exit("remote: found no redis-server; install the package of that name")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    wait_for(port)
    return process, port


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(port: int) -> None:
    """Waits until a server listens."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    sys.exit(f"remote: no server listens on port {port} after 10 s")


def report(results: dict[str, dict[str, list[dict[str, float]]]], given: argparse.Namespace) -> None:
    """Prints the medians of each contender, and how many times as much kvhoist's are."""
    gib = given.blocks * given.block_bytes / (1 << 30)
    print(f"{given.blocks} blocks of {given.block_kib} KiB, medians of {given.turns} turns")
    for what, contenders in results.items():
        for name, found in contenders.items():
            rates = [gib * 1024 / one["seconds"] for one in found]
            busy = [one["cpu_seconds"] / gib for one in found]
            print(
                f"  {what:<5}  {name:<16}  {statistics.median(rates):6.0f} MiB/s ({min(rates):.0f} to {max(rates):.0f})"
                f"  {statistics.median(busy):.2f} CPU-s/GiB ({min(busy):.2f} to {max(busy):.2f})"
            )
        for name, ours in contenders.items():
            for other, theirs in contenders.items():
                if name.startswith("kvhoist") and not other.startswith("kvhoist"):
                    pairs = list(zip(ours, theirs, strict=True))
                    speed = statistics.median(their["seconds"] / our["seconds"] for our, their in pairs)
                    busy_ratio = statistics.median(our["cpu_seconds"] / their["cpu_seconds"] for our, their in pairs)
                    print(f"  {what:<5}  {name} over {other}: bytes a second {speed:.2f}, CPU {busy_ratio:.2f}")


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
    results: dict[str, dict[str, list[dict[str, float]]]] = {"store": {}, "load": {}}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.turns):
            process, port = server(folder)
            try:
                for what, store in (("store", True), ("load", False)):
                    for name in CONTENDERS:
                        results[what].setdefault(name, []).append(child(name, port, given, store))
            finally:
                process.kill()
                process.wait()
    report(results, given)


if __name__ == "__main__":
    main()
