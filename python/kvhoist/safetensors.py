"""Checkpoints in the format safetensors, at the speed of the drives. Needs torch.

    from kvhoist.safetensors import load_file
    tensors = load_file("model.safetensors", device="cuda:0")

:func:`load_file` and :func:`load_files` return dictionaries as ``safetensors.torch.load_file`` does; :func:`iterate`
gives tensors as they arrive, for loaders that copy them into parameters; :class:`safe_open` reads what is asked for;
:func:`save_file` writes. The tensors of a file are views of one buffer, on a device too: it is freed with the last of
them. A file's header passes the checks of the safetensors library.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

import torch

from . import files as _files
from .errors import ArgumentError, Error, IoError

__all__ = ["iterate", "load_file", "load_files", "safe_open", "save_file"]

logger = logging.getLogger(__name__)

#: Direct I/O reads host memory without a copy where its address and the file's offset agree up to this, in bytes.
_ALIGN = 4096

#: As long as the format allows a header to be.
_INDEX_BYTES_MAX = 100_000_000

_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: First byte in the file.
    offset: int
    nbytes: int

    def is_aligned(self, flat: torch.Tensor) -> bool:
        """Whether its bytes lie as its type wants: files of other writers may align nothing."""
        return flat.storage_offset() % self.dtype.itemsize == 0

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, over its bytes; over a copy if they are not aligned."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=flat.device)
        if not self.is_aligned(flat):
            flat = flat.clone()
        return flat.view(self.dtype).view(self.shape)


class _Checkpoint:
    """A file and what its header says."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = _files.File(path)
        tensors, metadata, self.data_offset = self.file._source.tensors()
        self.entries = [self._entry(*tensor) for tensor in tensors]
        self.metadata = dict(metadata)
        self.drive = _drive_of(self.file.path)

    def _entry(self, name: str, dtype: str, shape: list[int], offset: int, nbytes: int) -> Entry:
        known = getattr(torch, _TYPES.get(dtype, ""), None)
        if known is None:
            raise ArgumentError(
                f"{self.file.path}: found the tensor {name} of type {dtype}, expected a type that torch"
                f" {torch.__version__} has"
            )
        if dtype == "F4":  # Two in a byte.
            if shape[-1] % 2:
                raise ArgumentError(
                    f"{self.file.path}: found the tensor {name} of type F4 and shape {shape}, expected rows of whole bytes"
                )
            shape = [*shape[:-1], shape[-1] // 2]
        return Entry(name, known, tuple(shape), offset, nbytes)

    @property
    def end(self) -> int:
        return self.file.size

    def buffer(self, start: int, end: int, device: torch.device) -> torch.Tensor:
        """Memory for this range of the file: on the host such that direct I/O reads into it."""
        if device.type != "cpu":
            return torch.empty(end - start, dtype=torch.uint8, device=device)
        memory = torch.empty(end - start + _ALIGN, dtype=torch.uint8)
        shift = (start - memory.data_ptr()) % _ALIGN
        # A header whose length is no multiple of 8 would misalign all tensors.
        shift = shift if shift % 8 == 0 else 0
        return memory[shift : shift + end - start]


class _Holder:
    """The node's service, if a load is to go through one. Without it, and without room there, drives are read."""

    def __init__(self, service: str | os.PathLike[str] | bool | None, keep: bool) -> None:
        self._keep = keep
        self._service: _files.Service | None = None
        if service:
            try:
                self._service = _files.Service(None if service is True else service)
            except Error as error:
                logger.warning("kvhoist: files are read from their drives, by each process: %s", error)

    def hold(self, file: _files.File) -> _files.File:
        if self._service is None:
            return file
        try:
            return self._service.hold(file, keep=self._keep)
        except Error as error:
            logger.warning("kvhoist: %s is read from its drive: %s", file.path, error)
            return file


def _drive_of(path: str) -> int:
    return os.stat(path).st_dev


def _device(device: Any) -> torch.device:
    found = torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device: found {device!r}, expected 'cpu', 'cuda' or 'cuda:N'")
    return found


def _open_all(paths: Any) -> list[_Checkpoint]:
    """The files of a checkpoint, which have what its index says, and each tensor once."""
    checkpoints = []
    for file, names in checkpoint_files(paths):
        one = _Checkpoint(file)
        missing = names - {entry.name for entry in one.entries}
        if missing:
            raise ArgumentError(
                f"{file}: found no tensor {min(missing)}, expected it by the index of its folder ({len(missing)} of"
                f" {len(names)} are missing): the index and the file are not of one checkpoint"
            )
        checkpoints.append(one)
    _refuse_duplicates(checkpoints)
    return checkpoints


def checkpoint_files(paths: Any) -> list[tuple[str, set[str]]]:
    """The files of a checkpoint, each with the tensors that an index says it has: of a path, of a list of them, of an
    index (``*.safetensors.index.json``), or of a folder, whose index counts if it has one."""
    if not isinstance(paths, (str, os.PathLike)):
        return [file for path in paths for file in checkpoint_files(path)]
    path = Path(paths)
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise ArgumentError(f"{path}: found {len(indexes)} indexes, expected one; name one of them: {indexes[0]}")
        found = [os.fspath(file) for file in sorted(path.glob("*.safetensors"))]
        if not indexes and not found:
            raise ArgumentError(f"{path}: found a folder without *.safetensors, expected a checkpoint")
        return checkpoint_files(indexes[0]) if indexes else [(file, set()) for file in found]
    if path.name.endswith(".index.json"):
        return [(os.fspath(path.parent / file), names) for file, names in sorted(_read_index(path).items())]
    return [(os.fspath(path), set())]


def _read_index(index: Path) -> dict[str, set[str]]:
    """The files that an index names, with the tensors of each."""
    # As any file: a pipe would wait for its other end.
    source = _files.File(index)
    if source.size > _INDEX_BYTES_MAX:
        raise ArgumentError(f"{index}: found {source.size} bytes, expected an index of at most {_INDEX_BYTES_MAX}")
    content = bytearray(source.size)
    source.read_into(content)
    files: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(content)["weight_map"].items():
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{index}: found no index of a checkpoint ({error!r}), expected a weight_map") from None
    if not files:
        raise ArgumentError(f"{index}: found no tensor in its weight_map, expected one or more")
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ArgumentError(f"{index}: found the file {file!r}, expected a name in the index's own folder")
    return files


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
    through ``torch.distributed`` (``group``, or all): a node's drives are read once. All of them call this with the same files;
    where one fails, all raise its error. ``service``: the socket of a service (``kvhoist serve``), or True for that of
    the node, which reads each file once for all processes; with ``keep`` it stays in its memory afterwards. A tensor that several files have is an error, and so is one that the index says a
    file has and that is not there.
    """
    target = _device(device)

    def read() -> _Parts:
        return _read_part(_open_all(paths), target, shard, _Holder(service, keep), settings)

    if shard is None or shard[1] == 1:
        found = read()
    else:
        found = _on_all_ranks(read, shard, target, group)
        _share(found.buffers, shard[1], group)
    found.tensors.update((entry.name, entry.view(flat)) for entry, flat in found.misaligned)
    return found.tensors


class _Parts(NamedTuple):
    """What a rank has of a checkpoint."""

    #: The bytes of each file, of which other ranks may have read parts.
    buffers: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]
    #: Tensors that are copied once all of their bytes are there.
    misaligned: list[tuple[Entry, torch.Tensor]]
    #: What is the same on all ranks: each file's name, and where its tensors begin and end.
    files: list[tuple[str, int, int]]


def _read_part(
    checkpoints: list[_Checkpoint],
    device: torch.device,
    shard: tuple[int, int] | None,
    holder: _Holder,
    settings: dict[str, Any],
) -> _Parts:
    """Reads a rank's part of each file."""
    files = [(os.path.basename(one.file.path), one.data_offset, one.end) for one in checkpoints]
    found = _Parts([one.buffer(one.data_offset, one.end, device) for one in checkpoints], {}, [], files)
    reads = []
    for one, buffer in zip(checkpoints, found.buffers):
        begin, end = _part(len(buffer), shard)
        if end > begin:
            reads.append((holder.hold(one.file), one.data_offset + begin, buffer[begin:end]))
    transfer = _files.start_reads(reads, settings)
    # Meanwhile: some ten microseconds a tensor.
    for one, buffer in zip(checkpoints, found.buffers):
        for entry in one.entries:
            flat = buffer[entry.offset - one.data_offset :][: entry.nbytes]
            if entry.is_aligned(flat):
                found.tensors[entry.name] = entry.view(flat)
            else:
                found.misaligned.append((entry, flat))
    result = _files.finish(transfer, settings)
    logger.info("kvhoist: %d files of a checkpoint: %s", len(checkpoints), result)
    return found


def _on_all_ranks(
    read: Callable[[], _Parts], shard: tuple[int, int], device: torch.device, group: Any
) -> _Parts:
    """What this rank has read, if all have: a rank that failed would leave the others waiting for its part."""
    import torch.distributed as dist

    rank, world = shard
    if not dist.is_initialized() or dist.get_world_size(group) != world:
        size = dist.get_world_size(group) if dist.is_initialized() else "no"
        raise ArgumentError(f"shard: found {size} processes in torch.distributed's group, expected {world}")
    found, failure = None, None
    try:
        if dist.get_rank(group) != rank:
            raise ArgumentError(f"shard: found {shard} in rank {dist.get_rank(group)} of the group, expected its own number")
        found = read()
    except Exception as error:
        failure = error
    told: list[Any] = [None] * world
    # NCCL sends from the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(told, (failure and f"{type(failure).__name__}: {failure}", found and found.files), group)
    if failure is not None:
        raise failure
    for other, (problem, files) in enumerate(told):
        if problem is not None:
            raise IoError(f"rank {other} of {world} has not read its part: {problem}")
        if files != told[0][1]:
            raise ArgumentError(f"found other files in rank {other} of {world} than in rank 0, expected the same in all")
    assert found is not None
    return found


def _refuse_duplicates(checkpoints: Iterable[_Checkpoint]) -> None:
    owner: dict[str, _Checkpoint] = {}
    for one in checkpoints:
        for entry in one.entries:
            first = owner.setdefault(entry.name, one)
            if first is not one:
                paths = f"{first.file.path} and {one.file.path}"
                raise ArgumentError(f"found the tensor {entry.name} in {paths}, expected it once")


def _part(nbytes: int, shard: tuple[int, int] | None) -> tuple[int, int]:
    """The part of a buffer that a rank reads: whole pages."""
    if shard is None:
        return 0, nbytes
    rank, world = shard
    if not 0 <= rank < world:
        raise ArgumentError(f"shard: found {shard}, expected (rank, world) with 0 <= rank < world")
    part = -(-nbytes // world // _ALIGN) * _ALIGN
    return min(rank * part, nbytes), min((rank + 1) * part, nbytes)


def _share(buffers: Iterable[torch.Tensor], world: int, group: Any) -> None:
    """Gives each rank what the others have read."""
    import torch.distributed as dist

    for buffer in buffers:
        for rank in range(world):
            begin, end = _part(len(buffer), (rank, world))
            if end > begin:
                source = rank if group is None else dist.get_global_rank(group, rank)
                dist.broadcast(buffer[begin:end], src=source, group=group)


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
    """The tensors of a checkpoint as they arrive, about in the order of its files; files on different drives take turns.

    Two windows of neighboring tensors, or one for each drive, of at most ``window_bytes`` each or one tensor, are on
    their way at once; a window is freed with the last of its tensors. ``wanted`` says which tensors are read, by name.
    ``service`` and ``keep`` as of :func:`load_files`; a file is held from its first window to its last. Settings as of :func:`kvhoist.files.read_many`.
    """
    target = _device(device)
    checkpoints = _open_all(paths)
    windows = _windows(checkpoints, window_bytes, wanted)
    under_way: deque[tuple[list[Entry], list[torch.Tensor], Any]] = deque()
    progress = _files.progress_of(settings.pop("progress", None))
    holder, held = _Holder(service, keep), {}
    at_once = max(2, len({one.drive for one in checkpoints}))
    settings["threads"] = settings.get("threads") or max(1, min(32, 4 * (os.cpu_count() or 8)) // at_once)
    total = sum(entry.nbytes for _, entries in windows for entry in entries)
    done = 0
    try:
        while windows or under_way:
            while windows and len(under_way) < at_once:
                one, entries = windows.popleft()
                file = held.pop(one, None) or holder.hold(one.file)
                if any(other is one for other, _ in windows):
                    held[one] = file
                under_way.append(_start(one, file, entries, target, settings))
                del file
            entries, views, transfer = under_way[0]
            while (number := transfer.next_range()) is not None:
                done += entries[number].nbytes
                if progress is not None:
                    progress(done, total)
                # The consumer alone keeps a tensor.
                flat, views[number] = views[number], None  # type: ignore[call-overload]
                yield entries[number].name, entries[number].view(flat)
                del flat
            transfer.wait()
            under_way.popleft()
            del entries, views, transfer
    finally:
        for *_, transfer in under_way:
            transfer.cancel()


def _windows(
    checkpoints: Iterable[_Checkpoint], window_bytes: int, wanted: Callable[[str], bool] | None
) -> deque[tuple[_Checkpoint, list[Entry]]]:
    windows: list[tuple[int, _Checkpoint, list[Entry]]] = []
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
    one: _Checkpoint, file: _files.File, entries: list[Entry], device: torch.device, settings: dict[str, Any]
) -> tuple[list[Entry], list[torch.Tensor], Any]:
    start, end = entries[0].offset, entries[-1].offset + entries[-1].nbytes
    buffer = one.buffer(start, end, device)
    views = [buffer[entry.offset - start : entry.offset - start + entry.nbytes] for entry in entries]
    reads = [(file, entry.offset, view) for entry, view in zip(entries, views)]
    return entries, views, _files.start_reads(reads, settings)


class safe_open:  # noqa: N801  As the safetensors library calls it.
    """A file whose tensors are read when they are asked for.

    >>> import tempfile, torch
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> _ = save_file({"weight": torch.arange(6).view(2, 3)}, path)
    >>> with safe_open(path) as file:
    ...     file.keys(), file.get_slice("weight")[1:].tolist()
    (['weight'], [[3, 4, 5]])
    """

    def __init__(self, path: str | os.PathLike[str], framework: str = "pt", device: Any = "cpu") -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ArgumentError(f"framework: found {framework!r}, expected 'pt'")
        self._checkpoint = _Checkpoint(path)
        self._device = _device(device)
        self._entries = {entry.name: entry for entry in self._checkpoint.entries}

    def keys(self) -> list[str]:
        """The tensors' names, in the file's order."""
        return list(self._entries)

    def metadata(self) -> dict[str, str]:
        """What the file says of itself."""
        return dict(self._checkpoint.metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, read now."""
        entry = self._entry(name)
        return self._read(entry, entry.shape, 0, entry.nbytes)

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts are read."""
        return TensorSlice(self, self._entry(name))

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"{self._checkpoint.file.path} has no tensor {name!r}")
        return self._entries[name]

    def _read(self, entry: Entry, shape: tuple[int, ...], at: int, nbytes: int) -> torch.Tensor:
        part = Entry(entry.name, entry.dtype, shape, entry.offset + at, nbytes)
        buffer = self._checkpoint.buffer(part.offset, part.offset + nbytes, self._device)
        self._checkpoint.file.read_into(buffer, part.offset)
        return part.view(buffer)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TensorSlice:
    """A tensor in a file, of which parts are read."""

    def __init__(self, file: safe_open, entry: Entry) -> None:
        self._file, self._entry = file, entry

    def get_shape(self) -> list[int]:
        """Its shape in the file."""
        return list(self._entry.shape)

    def get_dtype(self) -> torch.dtype:
        """Its type."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Only the rows that a first index or slice names are read; the rest of the index applies to them."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        shape = self._entry.shape
        if not shape or first is Ellipsis or first is None or not isinstance(first, (int, slice)):
            return self._file._read(self._entry, shape, 0, self._entry.nbytes)[index]
        rows = range(shape[0])[first]
        if isinstance(rows, int):
            low, high, again = rows, rows + 1, 0
        elif len(rows) == 0:
            low, high, again = 0, 0, slice(None)
        else:
            if rows.step < 0:
                raise ArgumentError(f"slice: found the step {rows.step}, expected a positive one, as of torch")
            low, high, again = rows[0], rows[-1] + 1, slice(None, None, rows.step)
        row_bytes = self._entry.nbytes // shape[0] if shape[0] else 0
        found = self._file._read(self._entry, (high - low, *shape[1:]), low * row_bytes, (high - low) * row_bytes)
        return found[(again, *rest)]


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    **settings: Any,
) -> _files.Result:
    """Writes tensors of one device to a file, which has its name once it is complete and flushed.

    Tensors that share memory are refused, as the safetensors library refuses them. A symbolic link is followed: its file is
    replaced. Settings as of :func:`kvhoist.files.read_many`.
    """
    head, parts = _serialized(tensors, metadata or {})
    devices = {part.device for part in parts if part.numel()}
    if devices and devices != {torch.device("cpu")}:
        # A transfer has one device: the head goes there along.
        first = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(next(iter(devices)))
        return _files.write(path, [first, *parts], **settings)
    return _files.write(path, [head, *parts], **settings)


def _serialized(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[torch.Tensor]]:
    """What a file begins with, and the tensors that follow."""
    names = {getattr(torch, name): code for code, name in _TYPES.items() if hasattr(torch, name)}
    header: dict[str, Any] = {}
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise ArgumentError(f"metadata: found {key!r}: {value!r}, expected texts")
        header.setdefault("__metadata__", {})[key] = value
    offset, parts = 0, []
    # Wide types first, so that all are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if name == "__metadata__":
            raise ArgumentError("found a tensor called __metadata__, which the format has for metadata, expected another name")
        if tensor.dtype not in names:
            raise ArgumentError(f"found the tensor {name} of type {tensor.dtype}, expected a type of the format")
        if not tensor.is_contiguous():
            raise ArgumentError(f"found the tensor {name} with strides {tensor.stride()}, expected a contiguous one")
        shape = list(tensor.shape)
        if names[tensor.dtype] == "F4":
            if not shape:
                raise ArgumentError(f"found the tensor {name} of type F4 and no dimension, expected one or more")
            shape[-1] *= 2
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
        parts.append(tensor.detach())
    _refuse_shared(tensors)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, parts


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors whose memory overlaps."""
    spans = sorted((one.data_ptr(), one.numel() * one.element_size(), name) for name, one in tensors.items())
    last_end, last_name = 0, ""
    for address, nbytes, name in spans:
        if nbytes and address < last_end:
            raise ArgumentError(f"found the tensors {last_name} and {name} in the same memory, expected one of them")
        last_end, last_name = max((last_end, last_name), (address + nbytes, name))
