"""Whole checkpoints, by one process or by ranks that share."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch

from .. import files as _files
from .checkpoint import Checkpoint, Entry, no_collections, open_all, refuse_duplicates, to_device, views
from .held import Holder
from .ranks import on_all_ranks, part_of, share

logger = logging.getLogger(__name__)


def load_file(path: str | os.PathLike[str], device: Any = "cpu", **settings: Any) -> dict[str, torch.Tensor]:
    """All tensors of a file. ``device`` as torch has it; settings as of :func:`kvhoist.files.read_many`."""
    return load_files([path], device, **settings)


def load_files(
    paths: Any,
    device: Any = "cpu",
    *,
    shard: tuple[int, int] | None = None,
    group: Any = None,
    service: str | os.PathLike[str] | bool | None = None,
    keep: bool = False,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: of a file, several, a folder or an index.

    ``shard=(rank, world)``: each of ``world`` processes reads a part of each file and gets the rest from the others
    through ``torch.distributed`` (``group``, or all): a node's drives are read once. All of them call this with the
    same files; where one fails or ends, all raise an error. ``service``: the socket of a service (``kvhoist serve``),
    or True for that of the node, which reads each file once for all processes; with ``keep`` it stays in its memory
    afterwards. A tensor that several files have is an error, and so is one that the index says a file has and that is
    not there.
    """
    def read() -> tuple[_Loaded, list[tuple[str, int, int]]]:
        return _read_part(paths, to_device(device), shard, Holder(service, keep), settings)

    if shard is None or shard[1] == 1:
        loaded, _ = read()
    else:
        loaded = on_all_ranks(read, shard, group)
        share(loaded.buffers, shard, group)
    loaded.tensors.update((entry.name, entry.view(flat)) for entry, flat in loaded.misaligned)
    return loaded.tensors


class _Loaded(NamedTuple):
    """What a process has of a checkpoint."""

    #: The bytes of each file, of which other ranks may have read parts.
    buffers: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]
    #: Tensors that are copied once all of their bytes are there.
    misaligned: list[tuple[Entry, torch.Tensor]]


def _read_part(
    paths: Any, device: torch.device, shard: tuple[int, int] | None, holder: Holder, settings: dict[str, Any]
) -> tuple[_Loaded, list[tuple[Any, ...]]]:
    """Reads a rank's part of each file. Also returns each file's name and version, and where its tensors begin and end."""
    with no_collections():
        checkpoints, loaded, transfer = _start(paths, device, shard, holder, settings)
    result = _files.finish(transfer, settings)
    logger.info("kvhoist: %d files of a checkpoint: %s", len(checkpoints), result)
    return loaded, [
        (os.path.basename(one.file.path), *one.file._source.version, one.data_offset, one.end) for one in checkpoints
    ]


def _start(
    paths: Any, device: torch.device, shard: tuple[int, int] | None, holder: Holder, settings: dict[str, Any]
) -> tuple[list[Checkpoint], _Loaded, Any]:
    """Starts to read, and makes the tensors meanwhile."""
    checkpoints = open_all(paths)
    loaded = _Loaded([one.buffer(one.data_offset, one.end, device) for one in checkpoints], {}, [])
    reads = []
    for one, buffer in zip(checkpoints, loaded.buffers):
        begin, end = part_of(len(buffer), shard)
        if end > begin:
            reads.append((holder.hold(one.file), one.data_offset + begin, buffer[begin:end]))
    transfer = _files.start_reads(reads, settings)
    try:
        refuse_duplicates(checkpoints)
        for one, buffer in zip(checkpoints, loaded.buffers):
            for entry, tensor in views(one.entries, one.data_offset, buffer):
                if tensor is not None:
                    loaded.tensors[entry.name] = tensor
                else:
                    flat = buffer[entry.offset - one.data_offset :][: entry.nbytes]
                    loaded.misaligned.append((entry, flat))
    except BaseException:
        transfer.cancel()
        raise
    return checkpoints, loaded, transfer
