"""kvhoist under SGLang: `HiCacheKvhoist`, a storage backend of HiCache, and `KvhoistLinker`, a linker.

`docs/sglang.md` has the launch lines and the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import HiCacheKvhoist
    from .linker import KvhoistLinker

__all__ = ["HiCacheKvhoist", "KvhoistLinker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .probe import adapter

    return adapter(name)
