"""Ranges of any file, to and from host and GPU memory.

>>> import tempfile, kvhoist.files
>>> path = tempfile.mkdtemp() + "/data"
>>> kvhoist.files.write(path, [b"one", b"two"]).nbytes
6
>>> target = bytearray(3)
>>> kvhoist.files.open(path).read_into(target, 3).nbytes, bytes(target)
(3, b'two')

Targets and sources are torch tensors of a CPU or a CUDA device, numpy arrays and other buffer objects, and objects with
``__cuda_array_interface__`` or ``__dlpack__`` (these need torch); contiguous, of any alignment. What the page cache has is taken from there, the rest comes
past it (direct I/O), by many threads in requests of 512 KiB; the bytes of a GPU pass through pinned memory, 64 MiB at
most with the default settings. :class:`Result` says which way the bytes took. No call holds the interpreter's lock
while it waits; Ctrl-C ends a transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

from . import _native
from ._event_loops import ended
from .errors import ArgumentError, CancelledError, Error

__all__ = ["File", "Result", "Service", "open", "read_many", "read_many_async", "write", "write_async"]

logger = logging.getLogger(__name__)

#: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of the CUDA driver.
_DEVICE_ORDINAL = 9

#: Called about ten times a second with the bytes that have arrived, and all.
Progress = Callable[[int, int], None]

#: Starts a transfer, which keeps its memory.
Start = Callable[[], _native.FileTransfer]


@dataclass(frozen=True)
class Result:
    """What a transfer moved, and which way."""

    #: Bytes of all ranges.
    nbytes: int
    seconds: float
    #: Bytes that the page cache had.
    page_cache_bytes: int
    #: Bytes past the page cache; gaps between ranges count.
    direct_bytes: int
    #: Bytes through the page cache for want of direct I/O or of alignment.
    buffered_bytes: int
    #: Bytes out of the memory of the node's service.
    held_bytes: int
    #: Bytes that libcufile moved from the drive into a GPU's memory.
    cufile_bytes: int
    #: Bytes that were copied from or to bounce buffers.
    bounced_bytes: int

    @property
    def mode(self) -> str:
        """The way that most bytes took: ``"page cache"``, ``"direct"``, ``"buffered"``, ``"service"`` or ``"cufile"``,
        with ``", bounced"`` where they were copied on the way, as a GPU's are but for cuFile."""
        ways = {
            "page cache": self.page_cache_bytes,
            "direct": self.direct_bytes,
            "buffered": self.buffered_bytes,
            "service": self.held_bytes,
            "cufile": self.cufile_bytes,
        }
        bounced = ", bounced" if 2 * self.bounced_bytes > self.nbytes else ""
        return max(ways, key=lambda way: ways[way]) + bounced

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        return f"{self.nbytes} bytes in {self.seconds:.3f} s ({self.gb_per_s:.1f} GB/s, {self.mode})"


@dataclass(frozen=True)
class Place:
    """Memory of a caller."""

    address: int
    nbytes: int
    #: The ordinal of a CUDA device.
    device: int | None
    #: What keeps the memory.
    owner: Any


def place_of(memory: Any, writable: bool) -> Place:
    """Where an object's memory is."""
    if hasattr(memory, "data_ptr") and hasattr(memory, "is_contiguous"):
        return _tensor_place(memory)
    cuda = getattr(memory, "__cuda_array_interface__", None)
    if cuda is not None:
        return _cuda_place(memory, cuda, writable)
    try:
        exported = _native.FileMemory(memory, writable)
    except (TypeError, BufferError, ValueError) as error:
        if hasattr(memory, "__dlpack__") and not _is_buffer(memory):
            import torch

            return _tensor_place(torch.from_dlpack(memory))
        raise ArgumentError(
            f"memory: found {type(memory).__name__} ({error}), expected a tensor, or a contiguous"
            f"{' writable' if writable else ''} buffer"
        ) from None
    return Place(exported.address, exported.nbytes, None, exported)


def _is_buffer(memory: Any) -> bool:
    """Whether it is one, if not of the kind that was asked for: a read-only one is not written to another way."""
    try:
        memoryview(memory)
    except TypeError:
        return False
    except (BufferError, ValueError):
        pass
    return True


def unready(tensor: Any) -> str | None:
    """Of a tensor whose memory does not have its values, one behind the other: what it is, and what to do."""
    try:
        if not tensor.is_contiguous():
            return f"a tensor with strides {tensor.stride()}, expected a contiguous one"
        return _unresolved(tensor) or _memoryless(tensor)
    except (RuntimeError, TypeError) as error:  # A kind without strides or an address: sparse, fake, ...
        return f"a {type(tensor).__name__} ({error}), expected a dense tensor with memory of its own"


def _unresolved(tensor: Any) -> str | None:
    """Of a tensor that torch conjugates or negates when it is read: its memory has other values."""
    expected = "expected one whose memory has its values"
    if tensor.is_conj():
        return f"a tensor that is conjugated when it is read, {expected}; resolve_conj() first"
    if tensor.is_neg():
        return f"a tensor that is negated when it is read, {expected}; resolve_neg() first"
    return None


def _memoryless(tensor: Any) -> str | None:
    """Of a tensor without memory for all of its values: a subclass of others that have it, or memory that was freed."""
    nbytes = math.prod(tensor.shape) * tensor.element_size()  # A nested tensor refuses to tell its shape.
    end = tensor.storage_offset() * tensor.element_size() + nbytes
    if nbytes == 0 or (tensor.data_ptr() != 0 and end <= tensor.untyped_storage().nbytes()):
        return None
    return (
        f"a {type(tensor).__name__} without memory of its own, expected one whose memory has its values;"
        " of a DTensor give the local tensor, to_local(); freed memory has none"
    )


def _tensor_place(tensor: Any) -> Place:
    if tensor.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"memory: found a tensor on {tensor.device}, expected one on a CPU or a CUDA device")
    if (problem := unready(tensor)) is not None:
        raise ArgumentError(f"memory: found {problem}")
    nbytes = tensor.numel() * tensor.element_size()
    device = None
    if tensor.device.type == "cuda":
        import torch

        # Its memory may be that of tensors which kernels still read.
        torch.cuda.current_stream(tensor.device).synchronize()
        device = tensor.device.index if tensor.device.index is not None else torch.cuda.current_device()
    return Place(tensor.data_ptr(), nbytes, device, tensor)


def _cuda_place(memory: Any, cuda: dict[str, Any], writable: bool) -> Place:
    address, readonly = cuda["data"]
    if cuda.get("strides") is not None or (writable and readonly):
        raise ArgumentError("memory: found a strided or read-only array on a device, expected a contiguous writable one")
    import torch

    if hasattr(memory, "__dlpack__"):
        # It lets the current stream wait for what the array's own stream has still to do.
        return _tensor_place(torch.from_dlpack(memory))
    nbytes = math.prod(cuda["shape"], start=int(cuda["typestr"][2:]))
    device = _ordinal(address) if nbytes else torch.cuda.current_device()
    # Of whatever stream writes to the array, or still reads it.
    torch.cuda.synchronize(device)
    return Place(address, nbytes, device, memory)


def _ordinal(address: int) -> int:
    """The ordinal of the CUDA device that has this memory. The driver says it without a context of any device; torch
    would make one on each that it is asked about."""
    ordinal = ctypes.c_int(-1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        status = driver.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    except (OSError, AttributeError) as error:
        status = error
    if status != 0:
        found = f"found address {address:#x} (the driver: {status})"
        raise ArgumentError(f"memory: {found}, expected one of a CUDA device")
    if ordinal.value < 0:  # Of no device in particular.
        import torch

        return torch.cuda.current_device()
    return ordinal.value


class File:
    """A file that is open for reading. Cheap: a descriptor or two."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._source = _native.FileSource(self.path)

    @property
    def size(self) -> int:
        """Its length in bytes when it was opened, or last written by this."""
        return self._source.size

    @property
    def direct_align(self) -> int | None:
        """What direct I/O wants addresses and offsets to agree on, in bytes: host memory that does is read into without
        a copy. None where the file system has no direct I/O."""
        return self._source.direct_align

    def read_into(self, target: Any, offset: int = 0, **settings: Any) -> Result:
        """Fills ``target`` with the bytes from ``offset`` on. Settings as of :func:`read_many`."""
        return read_many([(self, offset, target)], **settings)

    async def read_into_async(self, target: Any, offset: int = 0, **settings: Any) -> Result:
        """As :meth:`read_into`, awaited. Cancelled, it waits for the requests under way: the memory is free then."""
        return await read_many_async([(self, offset, target)], **settings)

    def write_from(self, source: Any, offset: int = 0, **settings: Any) -> Result:
        """Writes in place, to the file that was opened, and flushes: after a crash in the middle some bytes are new and
        some are old. A file as a whole is written by :func:`write`, all or nothing. Reads expect the file as it is when
        this returns, also with an exception."""
        return self._written(self._write(source, offset, settings)(), settings)

    async def write_from_async(self, source: Any, offset: int = 0, **settings: Any) -> Result:
        """As :meth:`write_from`, awaited. Cancelled, it waits for the requests under way."""
        return await _awaited(self._write(source, offset, settings), settings, self._written)

    def _write(self, source: Any, offset: int, settings: dict[str, Any]) -> Start:
        place = place_of(source, writable=False)
        ranges = [(0, _offset(offset), place.address, place.nbytes)]
        return functools.partial(
            _native.files_write_at, self._source, ranges, place.device, _settings(settings), place
        )

    def _written(self, transfer: _native.FileTransfer, settings: dict[str, Any]) -> Result:
        """As :func:`finish`. A write that failed or was interrupted may have changed the file, too."""
        try:
            return finish(transfer, settings)
        finally:
            # Of a file that cannot be opened anew, the next read says that it changed.
            with contextlib.suppress(Error):
                self._source = self._source.renewed()

    def __repr__(self) -> str:
        return f"<kvhoist.files.File {self.path} of {self.size} bytes>"


class Service:
    """The node's service (``kvhoist serve``), which reads a file once for all processes of its user.

    ``socket``: None for the one where a service listens that nobody named.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None) -> None:
        self._service = _native.FileService(_native.default_socket() if socket is None else socket)

    def hold(self, file: File, *, keep: bool = False) -> File:
        """The file, whose bytes are read out of the service's memory, where they stay while anyone has what this
        returns; with ``keep`` until the service needs the memory. A service that goes away costs a reader nothing: the
        rest comes from the drive."""
        held = File.__new__(File)
        held.path, held._source = file.path, self._service.hold(file._source, keep)
        return held


def open(path: str | os.PathLike[str]) -> File:  # noqa: A001  As the built-in function, for files.
    """Opens a file, or a block device, for reading."""
    return File(path)


def read_many(
    reads: Iterable[tuple[File | str | os.PathLike[str], int, Any]],
    *,
    progress: Progress | bool | None = None,
    threads: int | None = None,
    piece_bytes: int | None = None,
    page_cache: bool = True,
    mode: str = "auto",
) -> Result:
    """Reads (file, offset, target) in one go: neighboring ranges are read together, many at once.

    All targets are in host memory, or on one device. ``progress``: a function, or True for a bar on
    a terminal, and lines in a log.
    ``threads`` each have one request of at most ``piece_bytes`` at a time. ``page_cache=False``: read past it even what it
    has. ``mode`` says how a drive's bytes come into a GPU: ``"bounce"`` through pinned memory; ``"cufile"`` straight, where
    libcufile proves that they do, else bounced; ``"auto"`` as ``"cufile"`` where nvidia-fs is loaded. A file that is written to meanwhile is an error; then, and after any other error, the targets' content is not
    defined.
    """
    settings = {
        "progress": progress, "threads": threads, "piece_bytes": piece_bytes, "page_cache": page_cache, "mode": mode,
    }  # fmt: skip
    return finish(start_reads(list(reads), settings), settings)


async def read_many_async(
    reads: Iterable[tuple[File | str | os.PathLike[str], int, Any]], **settings: Any
) -> Result:
    """As :func:`read_many`, awaited. Cancelled, it waits for the requests under way: the memory is free then."""
    return await _awaited(_reads(list(reads), settings), settings)


async def _awaited(
    start: Start,
    settings: dict[str, Any],
    wait: Callable[[_native.FileTransfer, dict[str, Any]], Result] | None = None,
) -> Result:
    """The result of a transfer. Cancelled, it ends the transfer, and waits for the requests under way.

    A thread of the loop's executor starts it: their number bounds the transfers that have threads and buffers. It waits
    for the transfer, too, by ``wait`` or :func:`finish`.
    """
    started: list[_native.FileTransfer] = []
    is_cancelled = False

    def run() -> Result:
        if is_cancelled:
            raise CancelledError("the transfer was cancelled before it began")
        started.append(start())
        if is_cancelled:  # Before it was in the list.
            started[0].cancel()
        return (wait or finish)(started[0], settings)

    running = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        is_cancelled = True
        for transfer in started:
            transfer.cancel()
        await ended(running)
        raise


def write(path: str | os.PathLike[str], sources: Sequence[Any], **settings: Any) -> Result:
    """Writes a file of these pieces of memory, one after the other.

    It has the name once it is complete and flushed: until then, and after an error or a crash, ``path`` is as before.
    A symbolic link is followed: its file is replaced.
    Settings as of :func:`read_many`.
    """
    return finish(_file(path, sources, settings)(), settings)


async def write_async(path: str | os.PathLike[str], sources: Sequence[Any], **settings: Any) -> Result:
    """As :func:`write`, awaited. Cancelled, it leaves ``path`` as it was, unless all was written."""
    return await _awaited(_file(path, sources, settings), settings)


def _file(path: str | os.PathLike[str], sources: Sequence[Any], settings: dict[str, Any]) -> Start:
    places = [place_of(source, writable=False) for source in sources]
    pieces = [(place.address, place.nbytes) for place in places]
    # The program may work in another folder when a thread starts it.
    path = str(Path(path).absolute())
    return functools.partial(_native.files_write, path, pieces, _device_of(places), _settings(settings), places)


def start_reads(reads: Sequence[tuple[Any, int, Any]], settings: dict[str, Any]) -> _native.FileTransfer:
    """Starts reads. The transfer keeps their memory."""
    return _reads(reads, settings)()


def _reads(reads: Sequence[tuple[Any, int, Any]], settings: dict[str, Any]) -> Start:
    sources: dict[int, int] = {}
    files: list[File] = []
    opened: dict[str, File] = {}
    ranges, places = [], []
    for file, offset, target in reads:
        if not isinstance(file, File):
            name = os.fspath(file)
            file = opened[name] if name in opened else opened.setdefault(name, File(name))
        if id(file) not in sources:
            sources[id(file)] = len(files)
            files.append(file)
        place = place_of(target, writable=True)
        places.append(place)
        ranges.append((sources[id(file)], _offset(offset), place.address, place.nbytes))
    given = [file._source for file in files]
    return functools.partial(_native.files_read, given, ranges, _device_of(places), _settings(settings), places)


def start_parts(
    file: File, target: Any, parts: Sequence[tuple[int, int, int]], settings: dict[str, Any]
) -> _native.FileTransfer:
    """Starts to read parts of a file into parts of one target: (first byte there, first byte in the target, length)."""
    place = place_of(target, writable=True)
    ranges = [(0, offset, place.address + at, nbytes) for offset, at, nbytes in parts]
    return _native.files_read([file._source], ranges, place.device, _settings(settings), place)


def _offset(offset: int) -> int:
    if not 0 <= offset < 1 << 63:
        raise ArgumentError(f"offset: found {offset}, expected a number of bytes from 0 on")
    return offset


def _device_of(places: Sequence[Place]) -> int | None:
    devices = {place.device for place in places if place.nbytes}
    if len(devices) > 1:
        raise ArgumentError(
            f"memory: found memory of {len(devices)} kinds or devices, expected all in host memory or all on one device"
        )
    return devices.pop() if devices else None


def _settings(settings: dict[str, Any]) -> tuple[int | None, int | None, bool, str]:
    unknown = settings.keys() - {"progress", "threads", "piece_bytes", "page_cache", "mode"}
    if unknown:
        raise TypeError(f"found {sorted(unknown)[0]!r}, expected progress, threads, piece_bytes, page_cache or mode")
    page_cache, mode = settings.get("page_cache", True), settings.get("mode", "auto")
    return settings.get("threads"), settings.get("piece_bytes"), page_cache, mode


def finish(transfer: _native.FileTransfer, settings: dict[str, Any]) -> Result:
    """Waits for a transfer. With an exception, too, it is over: the memory is the caller's again."""
    try:
        progress = progress_of(settings.get("progress"))
        if progress is not None:
            watch(transfer, progress)
        return Result(**transfer.wait())
    except BaseException:
        transfer.cancel()
        with contextlib.suppress(Error):  # Cancelled, or waited for already.
            transfer.wait()
        raise


def watch(transfer: _native.FileTransfer, progress: Progress) -> None:
    """Tells how far a transfer is until it is over."""
    told = 0.0
    while transfer.next_ranges(0.1) is not None:
        found = transfer.progress()
        if found is not None and time.monotonic() - told > 0.1:
            told = time.monotonic()
            progress(*found)
    found = transfer.progress()
    if found is not None:
        progress(*found)


class Bar:
    """How far a transfer is: a bar on a terminal, else a line in the log now and then."""

    #: Seconds between two lines of the log.
    EVERY = 10.0

    def __init__(self) -> None:
        self._begun = self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            bar = "#" * int(30 * (done / total if total else 1.0))
            end = "\n" if done >= total else ""
            print(f"\r[{bar:<30}] {done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        if done < total and now - self._told < self.EVERY:
            return
        self._told = now
        logger.info("kvhoist: %.1f of %.1f GB after %.1f s", done / 1e9, total / 1e9, now - self._begun)


def progress_of(progress: Progress | bool | None) -> Progress | None:
    """What is told how far a transfer is, if anything is."""
    return Bar() if progress is True else (progress or None)
