"""Writes files of the format."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping

import torch

from .. import files as _files
from ..errors import ArgumentError
from .checkpoint import DTYPES


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
    names = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    for key, value in metadata.items():
        if not (_is_text(key) and _is_text(value)):
            raise ArgumentError(f"metadata: found {key!r}: {value!r}, expected texts that UTF-8 has")
        header.setdefault("__metadata__", {})[key] = value
    offset, parts = 0, []
    # Wide types first, so that all are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if not _is_text(name):
            raise ArgumentError(f"found a tensor called {name!r}, expected a text that UTF-8 has")
        if name == "__metadata__":
            raise ArgumentError("found a tensor called __metadata__, which the format has for metadata, expected another name")
        if tensor.dtype not in names:
            raise ArgumentError(f"found the tensor {name} of type {tensor.dtype}, expected a type of the format")
        if (problem := _files.unready(tensor)) is not None:
            raise ArgumentError(f"{name}: found {problem}")
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


def _is_text(value: Any) -> bool:
    """Whether a file can have it: no reader takes half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors whose memory overlaps."""
    spans = sorted((one.data_ptr(), one.numel() * one.element_size(), name) for name, one in tensors.items())
    last_end, last_name = 0, ""
    for address, nbytes, name in spans:
        if nbytes and address < last_end:
            raise ArgumentError(f"found the tensors {last_name} and {name} in the same memory, expected one of them")
        last_end, last_name = max((last_end, last_name), (address + nbytes, name))
