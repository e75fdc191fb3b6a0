"""Tensors as they arrive, in a bounded part of memory."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import deque
from typing import Any, Callable, Iterator, NamedTuple

import torch

from .. import files as _files
from .checkpoint import Checkpoint, Entry, no_collections, open_all, refuse_duplicates, to_device, views
from .held import Holder

#: Neighboring tensors that are made in one go.
_MADE_TOGETHER = 64


def iterate(
    paths: Any,
    device: Any = "cpu",
    *,
    window_bytes: int = 64 << 20,
    wanted: Callable[[str], bool] | None = None,
    service: str | os.PathLike[str] | bool | None = None,
    keep: bool = False,
    **settings: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint as they arrive, about in its files' order; files on different drives take turns.

    Two windows of neighboring tensors for each drive, of at most ``window_bytes`` each or one tensor, are on their way
    at once; a window is freed with the last of its tensors. ``wanted`` says which tensors are read, by name.
    ``service`` and ``keep`` as of :func:`load_files`; a file is held while its windows are read. Settings as of
    :func:`kvhoist.files.read_many`.
    """
    target, holder = to_device(device), Holder(service, keep)
    progress = _files.progress_of(settings.pop("progress", None))
    drives: deque[Iterator[_UnderWay]] = deque()
    under_way: deque[_UnderWay] = deque()
    done = total = 0

    def may_start() -> bool:
        return len(under_way) < 2 * len(drives)

    def start() -> None:
        """Starts the next window of the drive whose turn it is."""
        while drives:
            drive = drives.popleft()
            if (window := next(drive, None)) is not None:
                under_way.append(window)
                drives.append(drive)
                return

    try:
        with no_collections():
            checkpoints = open_all(paths)
            files_of: dict[int, list[Checkpoint]] = {}
            for one in checkpoints:
                files_of.setdefault(one.drive, []).append(one)
            threads = max(1, min(32, 4 * (os.cpu_count() or 8)) // max(1, 2 * len(files_of)))
            settings["threads"] = settings.get("threads") or threads
            drives.extend(_windows(files, window_bytes, wanted, holder, target, settings) for files in files_of.values())
            # All drives read while the rest of the checkpoint is listed and checked.
            for _ in range(len(drives)):
                start()
            refuse_duplicates(checkpoints)
        if progress is not None:
            every = (entry for one in checkpoints for entry in one.entries)
            total = sum(entry.nbytes for entry in every if wanted is None or wanted(entry.name))
        while under_way or drives:
            if not under_way:
                start()
                continue
            window = under_way[0]
            entries, made = window.entries, window.made
            # One window is started at a time: the first tensor waits for none but its own.
            while (numbers := window.transfer.next_ranges(0.0 if may_start() else math.inf)) is not None:
                for number in numbers:
                    if progress is not None:
                        done += entries[number].nbytes
                        progress(done, total)
                    yield entries[number].name, made.pop(number) if number in made else window.take(number)
                if may_start():
                    start()
            window.transfer.wait()
            under_way.popleft()
            del window
    finally:
        for window in under_way:
            window.transfer.cancel()


class _UnderWay(NamedTuple):
    """A window that is being read."""

    entries: list[Entry]
    #: First byte in the file.
    start: int
    buffer: torch.Tensor
    transfer: Any
    #: By number, tensors that were made with a neighbor and are not taken yet.
    made: dict[int, torch.Tensor]
    #: Bytes of those that become copies when they have come: they do not lie as their type wants.
    unaligned: dict[int, torch.Tensor]

    def take(self, number: int) -> torch.Tensor:
        """A tensor that has arrived, which the consumer alone keeps then."""
        if number not in self.made and number not in self.unaligned:
            # Not all of the window's at once: the first tensor would wait for that.
            first = number - number % _MADE_TOGETHER
            together = self.entries[first : first + _MADE_TOGETHER]
            for at, (entry, tensor) in enumerate(views(together, self.start, self.buffer), first):
                if tensor is not None:
                    self.made[at] = tensor
                else:
                    self.unaligned[at] = self.buffer[entry.offset - self.start :][: entry.nbytes]
        if number in self.made:
            return self.made.pop(number)
        return self.entries[number].view(self.unaligned.pop(number))


def _windows(
    checkpoints: list[Checkpoint],
    window_bytes: int,
    wanted: Callable[[str], bool] | None,
    holder: Holder,
    device: torch.device,
    settings: dict[str, Any],
) -> Iterator[_UnderWay]:
    """The windows of a drive's files, each of which is started when it is asked for."""
    for one in checkpoints:
        entries = one.entries if wanted is None else [entry for entry in one.entries if wanted(entry.name)]
        file = holder.hold(one.file) if entries else one.file
        first = 0
        while first < len(entries):
            # Those that end within the window, and at least one.
            most = entries[first].offset + window_bytes
            end = bisect_right(entries, most, first + 1, key=lambda entry: entry.offset + entry.nbytes)
            yield _start(one, file, entries[first:end], device, settings)
            first = end


def _start(
    one: Checkpoint, file: _files.File, entries: list[Entry], device: torch.device, settings: dict[str, Any]
) -> _UnderWay:
    start, end = entries[0].offset, entries[-1].offset + entries[-1].nbytes
    buffer = one.buffer(start, end, device)
    parts = [(entry.offset, entry.offset - start, entry.nbytes) for entry in entries]
    transfer = _files.start_parts(file, buffer, parts, settings)
    return _UnderWay(entries, start, buffer, transfer, {}, {})
