"""Objects whose load into LMCache's L1 has failed, and which LMCache may store all the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Iterable, Sequence

from lmcache.v1.distributed.l1_manager import L1Manager

#: Before 0.5.6 LMCache announces the object of a failed load as written, and then deletes it (its issue 5032). A store
#: of whatever lies in that memory may come in between, under the object's key.
ANNOUNCES_FAILED_LOADS = not hasattr(L1Manager, "finish_write_and_delete")

#: Objects that are remembered.
_OBJECTS_MAX = 65_536


class Unread:
    """Objects of which the next store is refused, because their last load has failed.

    A store by LMCache's mistake and one of an object that was computed meanwhile look alike: the latter is refused too,
    once. LMCache's mistake always comes first, because the key is free for a new object only after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[Any, None] = OrderedDict()

    def loaded(self, keys: Sequence[Any], moved: Sequence[bool]) -> None:
        """Takes the end of a load, before LMCache learns of it."""
        if not ANNOUNCES_FAILED_LOADS:
            return
        with self._lock:
            for key, good in zip(keys, moved):
                self._keys.pop(key, None)
                if not good:
                    self._keys[key] = None
            while len(self._keys) > _OBJECTS_MAX:
                self._keys.popitem(last=False)

    def take(self, keys: Iterable[Any]) -> set:
        """Those of some keys whose store is to be refused; that of each is refused once."""
        with self._lock:
            unread = {key for key in keys if key in self._keys}
            for key in unread:
                del self._keys[key]
        return unread
