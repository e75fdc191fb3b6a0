"""kvhoist under SGLang 0.5.17 to 0.5.23: `HiCacheKvhoist`, a storage backend of HiCache, and `KvhoistLinker`, a linker.

`docs/sglang.md` has the launch lines and the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._lazy import lazy

if TYPE_CHECKING:
    from .backend import HiCacheKvhoist
    from .linker import KvhoistLinker

__all__ = ["HiCacheKvhoist", "KvhoistLinker"]

_other = lazy(__name__, {"HiCacheKvhoist": "backend"})


def __getattr__(name: str) -> Any:
    if name != "KvhoistLinker":
        return _other(name)
    # Older versions of SGLang have no seat for it.
    from .linker_probe import linker_class

    return linker_class()
