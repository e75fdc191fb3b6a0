"""Which prefixes a pool of SGLang can restore."""

from __future__ import annotations

from typing import Any


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
