"""Names of LMCache's objects on disk. Needs no LMCache."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any, Mapping, Sequence

from .objects import DIGEST_BYTES, StoredObject

#: Most kinds of objects (model, rank, group, salt, layout) whose begun digests are kept.
_KINDS_MAX = 4_096

#: How an object lies in memory: its bytes there, and its dtypes.
Layout = tuple[int, tuple]


def row_of(key: Any) -> tuple:
    """The row of a key: chunks of one model, rank, group and salt form a prefix."""
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def _dtypes(obj: Any) -> tuple:
    """The dtypes of an object. One of a single tensor may have its dtype only, and none in the list."""
    try:
        dtypes = obj.get_dtypes()
    except (AssertionError, ValueError, NotImplementedError):
        dtypes = None
    return tuple(dtypes or (obj.get_dtype(),))


class ObjectNames:
    """Names of an engine's objects: digests of their keys and layouts, which are not in the keys."""

    def __init__(self, align_bytes: int) -> None:
        self._align = max(1, align_bytes)
        self._lock = threading.Lock()
        #: Layouts of stored and loaded objects, by (model, rank, group); the latest is the last.
        self._layouts: dict[tuple, dict[Layout, None]] = {}
        #: Begun digests.
        self._kinds: dict[tuple, Any] = {}

    def of_objects(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[StoredObject]:
        """Names by keys and memory."""
        with self._lock:
            named = []
            for key, obj in zip(keys, objects):
                layout = (obj.get_physical_size(), _dtypes(obj))
                known = self._layouts.setdefault(row_of(key)[:3], {})
                if known and next(reversed(known)) != layout:
                    known.pop(layout, None)
                known[layout] = None
                named.append(self._name(key, layout))
            return named

    def of_keys(self, keys: Sequence[Any], layouts: Any) -> list[StoredObject | None]:
        """Names by keys and LMCache's description of their memory; None if the layout is unknown."""
        with self._lock:
            of_row: dict[tuple, Layout | None] = {}
            named = []
            for key in keys:
                row = row_of(key)[:3]
                if row not in of_row:
                    of_row[row] = self._layout(row, layouts)
                layout = of_row[row]
                named.append(None if layout is None else self._name(key, layout))
            return named

    def _layout(self, row: tuple, layouts: Any) -> Layout | None:
        known = self._layouts.get(row)
        # One description for all groups before 0.5.6.
        described = layouts.get(row[2]) if isinstance(layouts, Mapping) else layouts
        layout = None
        if described is not None:
            nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(described.shapes, described.dtypes))
            layout = (-(-nbytes // self._align) * self._align, tuple(described.dtypes))
        if known and layout not in known:
            # LMCache serializes: the description is not the stored layout.
            return next(reversed(known))
        return layout

    def all_of(self, key: Any) -> list[StoredObject]:
        """All objects that a key may have."""
        with self._lock:
            return [self._name(key, layout) for layout in self._layouts.get(row_of(key)[:3], ())]

    def _name(self, key: Any, layout: Layout) -> StoredObject:
        kind = (*row_of(key), layout)
        begun = self._kinds.get(kind)
        if begun is None:
            if len(self._kinds) >= _KINDS_MAX:
                self._kinds.clear()
            model, rank, group, salt = row_of(key)
            text = json.dumps([model, rank, group, salt, layout[0], list(map(str, layout[1]))])
            begun = self._kinds[kind] = hashlib.sha256(f"{len(text)}:{text}".encode())
        digest = begun.copy()
        digest.update(key.chunk_hash)
        return StoredObject(digest.digest()[:DIGEST_BYTES], layout[0])
