"""kvhoist under LMCache 0.5: `KvhoistL2`, an L2 adapter.

`docs/lmcache.md` has the launch line and the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .adapter import KvhoistL2

__all__ = ["KvhoistL2"]

__getattr__ = lazy(__name__, {"KvhoistL2": "adapter"})
