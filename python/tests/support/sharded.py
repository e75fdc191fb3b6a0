"""What the ranks of a sharded load do, each in a process of its own."""

from __future__ import annotations

import datetime

from kvhoist.safetensors import load_files


def load_part(rank, world, folder, answers):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = load_files(f"{folder}/file", shard=(rank, world), page_cache=False)
    answers.put((rank, {name: tensor.tolist() for name, tensor in found.items()}))
    dist.destroy_process_group()


def fail_in_one_rank(rank, world, folder, answers):
    import torch.distributed as dist

    # Long, so that a rank that waits for the failed one is seen to.
    limit = datetime.timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=limit)
    found = []
    name = ["file", "damaged", "file"][rank]
    for path, shard in [(name, (rank, world)), (["file", "file", "other"][rank], (rank, world)), ("file", (0, world))]:
        try:
            load_files(f"{folder}/{path}", shard=shard)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()
