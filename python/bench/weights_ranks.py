"""Ranks of a node that read a part each of a checkpoint and share it: bytes read, and how long all take.

    python python/bench/weights_ranks.py [--dir DIR]... [--world 2] [--shape 7B] [--rounds 3] [--scale 1]

A process for each rank, with a GPU of its own and NCCL, or on the CPU with gloo where there is none. Each round drops
the files from the page cache, and loads: each rank the whole checkpoint by itself (`alone`, all at once), then a part
each (`shared`). The first round is not counted: in it each rank compares every tensor with the safetensors library's.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from weights import SHAPES, checkpoint

from kvhoist.load_bench import compare, drop, reference
from kvhoist.safetensors import load_files


class Results(logging.Handler):
    """What loads have read."""

    read_bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        result: Any = record.args[1]  # type: ignore[index]
        ways = (result.page_cache_bytes, result.direct_bytes, result.buffered_bytes)
        self.read_bytes += sum(ways)


def rank_main(rank: int, world: int, rounds: int, paths: list[str], place: str) -> None:
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{place}", rank=rank, world_size=world)
    results = Results()
    logging.getLogger("kvhoist.safetensors.loading").addHandler(results)
    logging.getLogger("kvhoist.safetensors.loading").setLevel(logging.INFO)
    nbytes = sum(map(os.path.getsize, paths))
    seconds: dict[str, list[float]] = {"alone": [], "shared": []}
    read: dict[str, float] = {}
    for turn in range(rounds + 1):
        for how, shard in (("alone", None), ("shared", (rank, world))):
            dist.barrier()
            if rank == 0:
                drop(paths)
            dist.barrier()
            results.read_bytes, begun = 0, time.perf_counter()
            found = load_files(paths, device, shard=shard)
            if on_gpu:
                torch.cuda.synchronize()
            took: list[Any] = [None] * world
            dist.all_gather_object(took, (time.perf_counter() - begun, results.read_bytes))
            read[how] = sum(one[1] for one in took) / nbytes
            if turn == 0:
                compare(f"rank {rank}, {how}", found, reference(paths, device))
            else:
                seconds[how].append(max(one[0] for one in took))
            del found
            if on_gpu:
                torch.cuda.empty_cache()
    if rank == 0:
        through = "NCCL" if on_gpu else "gloo"
        print(f"{world} ranks, {through}, {len(paths)} files of {nbytes / 1e9:.2f} GB; all tensors equal")
        for how, times in seconds.items():
            median = statistics.median(times)
            speed = nbytes / median / 1e9
            print(f"  {how}: {median:.3f} s, {speed:.2f} GB/s, bytes read over the size {read[how]:.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", type=Path, required=True)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1)
    options = parser.parse_args()
    paths = checkpoint(options.shape, options.dir, options.scale)
    place = os.fspath(options.dir[0] / "meet")
    Path(place).unlink(missing_ok=True)
    torch.multiprocessing.spawn(rank_main, (options.world, options.rounds, paths, place), nprocs=options.world)


if __name__ == "__main__":
    main()
