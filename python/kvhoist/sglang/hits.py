"""Which prefixes a pool of SGLang can restore."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

#: 0.5.17 has no such field.
_HAS_RESTORABLE = any(f.name == "restorable_prefix_pages" for f in dataclasses.fields(PoolTransferResult))


def pool_result(pages: int, hits: dict, restorable: list) -> PoolTransferResult:
    """What SGLang wants to know of all pools."""
    if _HAS_RESTORABLE:
        return PoolTransferResult(pages, hits, restorable)
    return PoolTransferResult(pages, hits)


def policy(transfer: Any) -> str:
    """The hit policy of a pool's transfer, by name."""
    policy = getattr(transfer, "hit_policy", "all_pages")
    return str(getattr(policy, "value", policy))


def trailing(there: list, window: int) -> set:
    """Prefix lengths whose last `window` pages are all resident; a shorter prefix needs all of its pages."""
    lengths, run = set(), 0
    for pages, present in enumerate(there, start=1):
        run = run + 1 if present else 0
        if run >= min(window, pages):
            lengths.add(pages)
    return lengths


def ends(lengths: set, window: int) -> list[int]:
    """Pages that are among the last `window` of a prefix of one of these lengths, from the end of the longest on."""
    found: list[int] = []
    for length in sorted(lengths, reverse=True):
        found += range((min(length, found[-1]) if found else length) - 1, max(0, length - window) - 1, -1)
    return found
