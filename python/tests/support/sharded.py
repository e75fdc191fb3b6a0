"""What the ranks of a sharded load do, each in a process of its own."""

from __future__ import annotations

import datetime
import logging
import os
import signal

from kvhoist.safetensors import load_files, loading


class Results(logging.Handler):
    """What loads have read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        _, result = record.args
        ways = (result.page_cache_bytes, result.direct_bytes, result.buffered_bytes, result.held_bytes)
        self.read_bytes += sum(ways)


def meet(rank, world, folder, seems_nccl):
    """`seems_nccl`: the ranks agree as with NCCL, which needs a GPU for each."""
    import torch.distributed as dist

    # Long, so that a rank that waits for one that is gone is seen to.
    limit = datetime.timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=limit)
    if seems_nccl:
        dist.get_backend = lambda group=None: "nccl"


def load_part(rank, world, folder, answers, seems_nccl):
    import torch.distributed as dist

    meet(rank, world, folder, seems_nccl)
    results = Results()
    logging.getLogger("kvhoist").addHandler(results)
    logging.getLogger("kvhoist").setLevel(logging.INFO)
    found = load_files(folder, shard=(rank, world), page_cache=False)
    answers.put((rank, {name: tensor.numpy().tobytes() for name, tensor in found.items()}, results.read_bytes))
    dist.barrier()
    dist.destroy_process_group()


def die_in_one_rank(rank, world, folder, answers, seems_nccl, step):
    meet(rank, world, folder, seems_nccl)
    if rank == 1:
        setattr(loading, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        load_files(f"{folder}/file.safetensors", shard=(rank, world))
        answers.put((rank, "loaded"))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))


def interrupt_one_rank(rank, world, folder, answers):
    meet(rank, world, folder, seems_nccl=False)
    found = []
    if rank == 1:
        read, loading._read_part = loading._read_part, interrupted
    for device in ["cpu", "cpu" if rank == 0 else "meta"]:
        try:
            load_files(f"{folder}/file.safetensors", device, shard=(rank, world))
        except BaseException as error:
            found.append(f"{type(error).__name__}: {error}")
        if rank == 1:
            loading._read_part = read
    answers.put((rank, found))
    # It lives on, until it is killed.
    signal.pause()


def interrupted(*_):
    raise KeyboardInterrupt("by hand")


def fail_in_one_rank(rank, world, folder, answers):
    import torch.distributed as dist

    meet(rank, world, folder, seems_nccl=False)
    found = []
    name = ["file", "damaged", "file"][rank]
    others, versions = ["file", "file", "other"][rank], ["file", "file", "later/file"][rank]
    own = (rank, world)
    for path, shard in [(name, own), (others, own), (versions, own), ("file", (0, world))]:
        try:
            load_files(f"{folder}/{path}", shard=shard)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()
