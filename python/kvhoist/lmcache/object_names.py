"""Names of LMCache's objects on disk. Needs no LMCache."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any, Callable, Mapping, Sequence

from .objects import DIGEST_BYTES, StoredObject

#: Most kinds of objects (model, rank, group, salt, layout) whose begun digests are kept.
_KINDS_MAX = 4_096

#: How an object lies in memory: its bytes there, and the shapes and dtypes of its tensors.
Layout = tuple[int, tuple[tuple[int, ...], ...], tuple]


def row_of(key: Any) -> tuple:
    """The row of a key: chunks of one model, rank, group and salt form a prefix."""
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def _each(listed: Callable[[], Any], single: Callable[[], Any]) -> tuple:
    """The dtypes or shapes of an object. One of a single tensor may have no list of them."""
    try:
        found = listed()
    except (AssertionError, ValueError, NotImplementedError):
        found = None
    return tuple(found or (single(),))


def _layout_of(obj: Any) -> Layout:
    shapes = _each(obj.get_shapes, lambda: obj.get_shape())
    return obj.get_physical_size(), tuple(map(tuple, shapes)), _each(obj.get_dtypes, lambda: obj.get_dtype())


def _is_flat(layout: Layout) -> bool:
    """Whether it is one row of bytes, as LMCache's serialized objects are."""
    _, shapes, dtypes = layout
    return [len(shape) for shape in shapes] == [1] and [str(dtype) for dtype in dtypes] == ["torch.uint8"]


class ObjectNames:
    """Names of an engine's objects: digests of their keys and layouts, which are not in the keys."""

    def __init__(self, align_bytes: int) -> None:
        self._align = max(1, align_bytes)
        self._lock = threading.Lock()
        #: Layouts of stored and loaded objects, by (model, rank, group); the latest is the last.
        self._layouts: dict[tuple, dict[Layout, None]] = {}
        #: Layouts of objects that lookups found, by the same.
        self._found: dict[tuple, set[Layout]] = {}
        #: Begun digests.
        self._kinds: dict[tuple, Any] = {}

    def of_objects(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[StoredObject]:
        """Names by keys and memory."""
        with self._lock:
            named = []
            for key, obj in zip(keys, objects):
                layout = _layout_of(obj)
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

    def found(self, keys: Sequence[Any], layouts: Any) -> None:
        """Takes the objects that a lookup has found: `all_of` knows their layouts then."""
        with self._lock:
            for row in {row_of(key)[:3] for key in keys}:
                layout = self._layout(row, layouts)
                if layout is not None:
                    self._found.setdefault(row, set()).add(layout)

    def _layout(self, row: tuple, layouts: Any) -> Layout | None:
        # One description for all groups before 0.5.6.
        described = layouts.get(row[2]) if isinstance(layouts, Mapping) else layouts
        layout = None
        if described is not None and described.shapes:
            nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(described.shapes, described.dtypes))
            shapes = tuple(map(tuple, described.shapes))
            layout = (-(-nbytes // self._align) * self._align, shapes, tuple(described.dtypes))
        known = self._layouts.get(row)
        if known and layout not in known:
            last = next(reversed(known))
            # LMCache's own tools describe nothing. Where it serializes, the description is not the stored layout.
            if layout is None or _is_flat(last):
                return last
        return layout

    def all_of(self, key: Any) -> list[StoredObject]:
        """All objects that a key may have, as far as their layouts are known: stored, loaded or found before."""
        row = row_of(key)[:3]
        with self._lock:
            layouts = {*self._layouts.get(row, ()), *self._found.get(row, ())}
            return [self._name(key, layout) for layout in layouts]

    def _name(self, key: Any, layout: Layout) -> StoredObject:
        kind = (*row_of(key), layout)
        begun = self._kinds.get(kind)
        if begun is None:
            if len(self._kinds) >= _KINDS_MAX:
                self._kinds.clear()
            model, rank, group, salt = row_of(key)
            nbytes, shapes, dtypes = layout
            text = json.dumps([model, rank, group, salt, nbytes, shapes, list(map(str, dtypes))])
            begun = self._kinds[kind] = hashlib.sha256(f"{len(text)}:{text}".encode())
        digest = begun.copy()
        digest.update(key.chunk_hash)
        return StoredObject(digest.digest()[:DIGEST_BYTES], layout[0])
