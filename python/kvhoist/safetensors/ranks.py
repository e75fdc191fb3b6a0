"""Ranks of a node that read a part of each file, and share through ``torch.distributed``."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator, TypeVar

import torch

from ..errors import ArgumentError, IoError
from .checkpoint import ALIGN

Found = TypeVar("Found")


def part_of(nbytes: int, shard: tuple[int, int] | None) -> tuple[int, int]:
    """The part of a buffer that a rank reads: whole pages."""
    if shard is None:
        return 0, nbytes
    rank, world = shard
    if not 0 <= rank < world:
        raise ArgumentError(f"shard: found {shard}, expected (rank, world) with 0 <= rank < world")
    part = -(-nbytes // world // ALIGN) * ALIGN
    return min(rank * part, nbytes), min((rank + 1) * part, nbytes)


def on_all_ranks(read: Callable[[], tuple[Found, Any]], shard: tuple[int, int], group: Any) -> Found:
    """What this rank has read, if all have: a rank that failed would leave the others waiting for its part.

    ``read`` also returns what has to be the same on all ranks.
    """
    import torch.distributed as dist

    rank, world = shard
    if not dist.is_initialized() or dist.get_world_size(group) != world:
        size = dist.get_world_size(group) if dist.is_initialized() else "no"
        raise ArgumentError(f"shard: found {size} processes in torch.distributed's group, expected {world}")
    found, same = None, None
    failure: BaseException | None = None
    told: list[Any] = [None] * world
    with _talk(group) as talk:
        try:
            if dist.get_rank(group) != rank:
                number = dist.get_rank(group)
                raise ArgumentError(f"shard: found {shard} in rank {number} of the group, expected its own number")
            found, same = read()
        except BaseException as error:  # An interrupted rank may live on: the others need not wait for its end.
            failure = error
        try:
            dist.all_gather_object(told, (failure and f"{type(failure).__name__}: {failure}", same), talk)
        except RuntimeError as error:
            raise failure or _gone(rank, world, error) from None
    if failure is not None:
        raise failure
    for other, (problem, files) in enumerate(told):
        if problem is not None:
            raise IoError(f"rank {other} of {world} has not read its part: {problem}")
        if files != told[0][1]:
            raise ArgumentError(
                f"found other files, or versions of them, in rank {other} of {world} than in rank 0, expected the same in all"
            )
    assert found is not None
    return found


@contextlib.contextmanager
def _talk(group: Any) -> Iterator[Any]:
    """A group of the same ranks that sees at once when a process has ended; NCCL would wait for its time-out."""
    import torch.distributed as dist

    if dist.get_backend(group) != "nccl":
        yield group
        return
    talk = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    try:
        yield talk
    finally:
        dist.destroy_process_group(talk)


def _gone(rank: int, world: int, error: Exception) -> IoError:
    return IoError(f"rank {rank} of {world}: another rank has ended, or does not answer; load again with all ({error})")


def share(buffers: Iterable[torch.Tensor], shard: tuple[int, int], group: Any) -> None:
    """Gives each rank what the others have read."""
    import torch.distributed as dist

    rank, world = shard
    for buffer in buffers:
        # NCCL sends from the current device.
        with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
            for source in range(world):
                begin, end = part_of(len(buffer), (source, world))
                if end > begin:
                    sender = source if group is None else dist.get_global_rank(group, source)
                    try:
                        dist.broadcast(buffer[begin:end], src=sender, group=group)
                    except RuntimeError as error:
                        raise _gone(rank, world, error) from None
