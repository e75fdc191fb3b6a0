"""The files of a checkpoint, and what their headers say."""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import AbstractSet, Any, Iterable, Iterator, NamedTuple, Sequence

import torch

from .. import files as _files
from ..errors import ArgumentError
from .index import checkpoint_files

#: Direct I/O and cuFile read into memory without a copy where its address and the file's offset agree up to this.
ALIGN = max(4096, mmap.PAGESIZE)

#: Files that are opened at once.
_OPEN_AT_ONCE = 8

#: torch's names of the format's types; older releases lack some.
_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

#: torch's types by the format's names.
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}

#: Those whose elements are bytes or more.
_WHOLE_BYTES = {code: dtype for code, dtype in DTYPES.items() if code != "F4"}


class Entry(NamedTuple):
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


class Checkpoint:
    """A file and what its header says."""

    def __init__(self, path: str | os.PathLike[str], wanted: AbstractSet[str] = frozenset()) -> None:
        """``wanted``: the tensors that an index says it has."""
        self.file = _files.File(path)
        self._tensors, metadata, self.data_offset = self.file._source.tensors()
        self._wanted = wanted
        self.metadata = dict(metadata)
        self.drive = _drive_of(self.file.path)

    @cached_property
    def entries(self) -> list[Entry]:
        """Its tensors, in the file's order. Takes a microsecond for each: a load reads bytes meanwhile."""
        # Most of them as Entry._make does it, without its call.
        entries = [
            tuple.__new__(Entry, (name, _WHOLE_BYTES[dtype], tuple(shape), offset, nbytes))
            if dtype in _WHOLE_BYTES
            else self._entry(name, dtype, shape, offset, nbytes)
            for name, dtype, shape, offset, nbytes in self._tensors
        ]
        missing = self._wanted - {entry.name for entry in entries}
        if missing:
            raise ArgumentError(
                f"{self.file.path}: found no tensor {min(missing)}, expected it by the index of its folder"
                f" ({len(missing)} of {len(self._wanted)} are missing): the index and the file are not of one checkpoint"
            )
        # The next search for garbage, which looks at every object, does not find them.
        self._tensors = []
        return entries

    def _entry(self, name: str, dtype: str, shape: list[int], offset: int, nbytes: int) -> Entry:
        known = DTYPES.get(dtype)
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
        """Memory for this range of the file, such that direct I/O and cuFile read into it."""
        memory = torch.empty(end - start + ALIGN, dtype=torch.uint8, device=device)
        shift = (start - memory.data_ptr()) % ALIGN
        # A header whose length is no multiple of 8 would misalign all tensors.
        shift = shift if shift % 8 == 0 else 0
        return memory[shift : shift + end - start]


def _drive_of(path: str) -> int:
    """The number of the device that a file is on, or that it is."""
    found = os.stat(path)
    return found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev


def to_device(device: Any) -> torch.device:
    """The device that a caller names."""
    found = torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device: found {device!r}, expected 'cpu', 'cuda' or 'cuda:N'")
    return found


def open_all(paths: Any) -> list[Checkpoint]:
    """The files of a checkpoint. What they have is checked with their entries and by :func:`refuse_duplicates`."""
    files = checkpoint_files(paths)
    if len(files) == 1:
        return [Checkpoint(*files[0])]
    # Headers are read and parsed without the interpreter's lock.
    with ThreadPoolExecutor(_OPEN_AT_ONCE) as pool:
        return list(pool.map(lambda file: Checkpoint(*file), files))


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Searches for no cycles of garbage meanwhile: making 10,000 objects starts a search over all those of the process,
    which takes as long as reading gigabytes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse_duplicates(checkpoints: Iterable[Checkpoint]) -> None:
    """Refuses a tensor that two files have."""
    checkpoints = list(checkpoints)
    if len({entry.name for one in checkpoints for entry in one.entries}) == sum(len(one.entries) for one in checkpoints):
        return
    owner: dict[str, Checkpoint] = {}
    for one in checkpoints:
        for entry in one.entries:
            first = owner.setdefault(entry.name, one)
            if first is not one:
                paths = f"{first.file.path} and {one.file.path}"
                raise ArgumentError(f"found the tensor {entry.name} in {paths}, expected it once")


def views(entries: Sequence[Entry], start: int, buffer: torch.Tensor) -> Iterator[tuple[Entry, torch.Tensor | None]]:
    """Each tensor over its bytes in a buffer, whose first byte is at ``start`` of the file. None for one whose bytes
    are not aligned as its type wants: :meth:`Entry.view` makes a copy of it when they have come.

    Neighbors of one type are made together: a call for each tensor would take longer than reading it.
    """
    at = 0
    while at < len(entries):
        first, end = entries[at], entries[at].offset
        until = at
        while until < len(entries) and entries[until].dtype is first.dtype and entries[until].offset == end:
            end += entries[until].nbytes
            until += 1
        flat = buffer[first.offset - start : end - start]
        if first.is_aligned(flat):
            yield from zip(entries[at:until], _split(flat.view(first.dtype), [entry.shape for entry in entries[at:until]]))
        else:
            yield from ((entry, None) for entry in entries[at:until])
        at = until


def _split(flat: torch.Tensor, shapes: list[tuple[int, ...]]) -> Iterator[torch.Tensor]:
    """Tensors of these shapes, one behind the other in a flat one."""
    sizes = [math.prod(shape) for shape in shapes]
    at = begin = 0
    while at < len(shapes):
        until = at + 1
        while until < len(shapes) and sizes[until] == sizes[at]:
            until += 1
        alike, count = shapes[at:until], until - at
        part = flat[begin : begin + count * sizes[at]]
        # Experts' matrices are of one size, and of one shape and its transpose: a call makes all of a shape.
        distinct = set(alike)
        if len(distinct) <= 3:
            made = {shape: part.view(count, *shape).unbind(0) for shape in distinct}
            yield from (made[shape][n] for n, shape in enumerate(alike))
        else:
            yield from (one.view(shape) for one, shape in zip(part.view(count, sizes[at]), alike))
        at, begin = until, begin + len(part)
