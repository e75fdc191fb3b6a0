"""kvhoist under Hugging Face transformers: `PrefixCache` keeps the KV of prompts.

`docs/transformers.md` has what is supported and what is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache

__all__ = ["PrefixCache"]

__getattr__ = lazy(__name__, {"PrefixCache": "prefix_cache"})
