"""Which files a checkpoint has: of a path, a folder or an index."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .. import files as _files
from ..errors import ArgumentError

#: As long as the format allows a header to be.
_INDEX_BYTES_MAX = 100_000_000


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
        if not isinstance(file, str) or Path(file).name != file or "\0" in file or not _is_path(file):
            raise ArgumentError(f"{index}: found the file {file!r}, expected a name in the index's own folder")
    return files


def _is_path(file: str) -> bool:
    """Whether the system has bytes for it: it has none for half of a surrogate pair."""
    try:
        return bool(os.fsencode(file))
    except UnicodeEncodeError:
        return False
