"""Which objects LMCache was notified of."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from .objects import StoredObject

#: LMCache may know of objects past the capacity by this share before evicted ones are looked for.
_STALE_SHARE = 1 / 32

#: Objects that one look for evicted ones checks, if no more were announced at once.
_CHECKED = 1024


class Announced:
    """The objects that LMCache knows of: it counts their bytes by salt, and notifies its listeners."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        #: Held during a notification, so that those of a key come in order.
        self._notifying = threading.RLock()
        #: The one that was stored, found or checked last is the last.
        self._objects: dict[Any, StoredObject] = {}
        self._nbytes = 0

    def add(self, keys: list, objects: list[StoredObject]) -> None:
        """Announces objects that are stored."""
        with self._notifying:
            new = {}
            for key, one in zip(keys, objects):
                known = self._objects.get(key)
                if known is not None and known != one:  # The same in another layout.
                    self.remove([key])
                # This object, not one that equals it: `_forget_evicted` sees by it that the key was announced again.
                if self._objects.pop(key, None) is None:
                    new[key] = one
                self._objects[key] = one
            if not new:
                return
            sizes = list(map(self._size, new.values()))
            self._nbytes += sum(sizes)
            self._adapter._notify_keys_stored(list(new), sizes)
            capacity = self._adapter.get_usage().total_capacity_bytes
            is_past = self._nbytes > capacity * (1 + _STALE_SHARE)
        if is_past:
            self._forget_evicted(max(_CHECKED, len(new)))

    def _forget_evicted(self, count: int) -> None:
        """Announces the evicted ones of the oldest objects as gone; the others are the latest then."""
        with self._notifying:
            oldest = list(itertools.islice(self._objects.items(), count))
        store = self._adapter.store
        # Of most nothing is left: one block of each first.
        begun = [entry for entry, found in zip(oldest, store.starts_each([one for _, one in oldest])) if found]
        there = {key for (key, _), found in zip(begun, store.contains_each([one for _, one in begun])) if found}
        with self._notifying:
            same = [key for key, one in oldest if self._objects.get(key) is one]
            self._objects.update([(key, self._objects.pop(key)) for key in same if key in there])
            self.remove([key for key in same if key not in there])

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
