"""Which objects LMCache was notified of."""

from __future__ import annotations

import threading
from typing import Any

from .objects import StoredObject

#: LMCache may know of objects past the capacity by this share before evicted ones are looked for.
_STALE_SHARE = 1 / 32


class Announced:
    """The objects that LMCache knows of: it counts their bytes by salt, and notifies its listeners."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        #: Held during a notification, so that those of a key come in order.
        self._notifying = threading.RLock()
        self._objects: dict[Any, StoredObject] = {}
        self._nbytes = 0

    def add(self, keys: list, objects: list[StoredObject]) -> None:
        """Announces objects that are stored."""
        with self._notifying:
            new = {key: one for key, one in zip(keys, objects) if key not in self._objects}
            if not new:
                return
            self._objects.update(new)
            sizes = list(map(self._size, new.values()))
            self._nbytes += sum(sizes)
            self._adapter._notify_keys_stored(list(new), sizes)
            capacity = self._adapter.get_usage().total_capacity_bytes
            if self._nbytes > capacity * (1 + _STALE_SHARE):
                self._forget_evicted()

    def _forget_evicted(self) -> None:
        there = self._adapter.store.contains_each(list(self._objects.values()))
        self.remove([key for key, found in zip(self._objects, there) if not found])

    def remove(self, keys: list) -> None:
        """Announces objects that are gone."""
        with self._notifying:
            gone = {key: self._size(self._objects.pop(key)) for key in keys if key in self._objects}
            if gone:
                self._nbytes -= sum(gone.values())
                self._adapter._notify_keys_deleted(list(gone), list(gone.values()))

    def _size(self, one: StoredObject) -> int:
        store = self._adapter.store
        return store.blocks(one.nbytes) * store.block_bytes
