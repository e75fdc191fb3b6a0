"""Tensors of a file that are read when they are asked for."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..errors import ArgumentError
from .checkpoint import Checkpoint, Entry, to_device


class safe_open:  # noqa: N801  As the safetensors library calls it.
    """A file whose tensors are read when they are asked for.

    >>> import tempfile, torch
    >>> from kvhoist.safetensors import save_file
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> _ = save_file({"weight": torch.arange(6).view(2, 3)}, path)
    >>> with safe_open(path) as file:
    ...     file.keys(), file.get_slice("weight")[1:].tolist()
    (['weight'], [[3, 4, 5]])
    """

    def __init__(self, path: str | os.PathLike[str], framework: str = "pt", device: Any = "cpu") -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ArgumentError(f"framework: found {framework!r}, expected 'pt'")
        self._checkpoint = Checkpoint(path)
        self._device = to_device(device)
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
        first, *rest = (index or (...,)) if isinstance(index, tuple) else (index,)
        shape = self._entry.shape
        if isinstance(first, bool):
            raise ArgumentError(f"index: found {first}, expected a row's number, a slice, or what else torch takes")
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
