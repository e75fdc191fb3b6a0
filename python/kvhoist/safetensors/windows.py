"""Tensors as they arrive, in a bounded part of memory."""

from __future__ import annotations

import math
import os
from collections import deque
from typing import Any, Callable, Iterable, Iterator, NamedTuple

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
    window_bytes: int = 256 << 20,
    wanted: Callable[[str], bool] | None = None,
    service: str | os.PathLike[str] | bool | None = None,
    keep: bool = False,
    **settings: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint as they arrive, about in its files' order; files on different drives take turns.

    Two windows of neighboring tensors, or one for each drive, of at most ``window_bytes`` each or one tensor, are on
    their way at once; a window is freed with the last of its tensors. ``wanted`` says which tensors are read, by name.
    ``service`` and ``keep`` as of :func:`load_files`; a file is held from its first window to its last. Settings as of
    :func:`kvhoist.files.read_many`.
    """
    target = to_device(device)
    with no_collections():
        checkpoints = open_all(paths)
        refuse_duplicates(checkpoints)
        windows = _windows(checkpoints, window_bytes, wanted)
    under_way: deque[_UnderWay] = deque()
    progress = _files.progress_of(settings.pop("progress", None))
    holder, held = Holder(service, keep), {}
    at_once = max(2, len({one.drive for one in checkpoints}))
    settings["threads"] = settings.get("threads") or max(1, min(32, 4 * (os.cpu_count() or 8)) // at_once)
    total = sum(entry.nbytes for _, entries in windows for entry in entries)
    done = 0

    def may_start() -> bool:
        return bool(windows) and len(under_way) < at_once

    def start() -> None:
        one, entries = windows.popleft()
        file = held.pop(one, None) or holder.hold(one.file)
        if any(other is one for other, _ in windows):
            held[one] = file
        under_way.append(_start(one, file, entries, target, settings))

    try:
        while windows or under_way:
            if not under_way:
                start()
            window = under_way[0]
            # One window is started at a time: the first tensor waits for none but its own.
            while (number := window.transfer.next_range(0.0 if may_start() else math.inf)) is not None:
                if number >= 0:
                    done += window.entries[number].nbytes
                    if progress is not None:
                        progress(done, total)
                    yield window.entries[number].name, window.take(number)
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
    #: By number, tensors that were made with a neighbor and are not taken yet.
    made: dict[int, torch.Tensor]
    transfer: Any

    def take(self, number: int) -> torch.Tensor:
        """A tensor that has arrived, which the consumer alone keeps then."""
        if number not in self.made:
            # Not all of the window's at once: the first tensor would wait for that.
            first = number - number % _MADE_TOGETHER
            together = self.entries[first : first + _MADE_TOGETHER]
            for at, (entry, tensor) in enumerate(views(together, self.start, self.buffer), first):
                self.made[at] = self._bytes_of(entry) if tensor is None else tensor
        found, entry = self.made.pop(number), self.entries[number]
        return found if found.dtype is entry.dtype and found.shape == entry.shape else entry.view(found)

    def _bytes_of(self, entry: Entry) -> torch.Tensor:
        return self.buffer[entry.offset - self.start :][: entry.nbytes]


def _windows(
    checkpoints: Iterable[Checkpoint], window_bytes: int, wanted: Callable[[str], bool] | None
) -> deque[tuple[Checkpoint, list[Entry]]]:
    windows: list[tuple[int, Checkpoint, list[Entry]]] = []
    turns: dict[int, int] = {}
    for one in checkpoints:
        last: list[Entry] = []
        for entry in one.entries:
            if wanted is not None and not wanted(entry.name):
                continue
            if last and entry.offset + entry.nbytes - last[0].offset <= window_bytes:
                last.append(entry)
            else:
                last = [entry]
                turns[one.drive] = turns.get(one.drive, -1) + 1
                windows.append((turns[one.drive], one, last))
    windows.sort(key=lambda window: window[0])
    return deque((one, entries) for _, one, entries in windows)


def _start(
    one: Checkpoint, file: _files.File, entries: list[Entry], device: torch.device, settings: dict[str, Any]
) -> _UnderWay:
    start, end = entries[0].offset, entries[-1].offset + entries[-1].nbytes
    buffer = one.buffer(start, end, device)
    parts = [(entry.offset, entry.offset - start, entry.nbytes) for entry in entries]
    transfer = _files.start_parts(file, buffer, parts, settings)
    return _UnderWay(entries, start, buffer, {}, transfer)
