"""Why blocks that a look-up has found were not there when they were loaded. Needs no engine."""

from __future__ import annotations

from typing import Any

#: Counts of a cache's figures, and what each says of a block.
_DAMAGE = {"checksum_failures": "damaged on the drive: a checksum failed", "read_errors": "unreadable on the drive"}


class Misses:
    """The reasons, from what a cache has counted since the last time."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._counted = self._figures()

    def _figures(self) -> dict[str, int]:
        stats = self._cache.stats()
        return {name: stats[name] for name in _DAMAGE}

    def why(self, otherwise: str | None = None) -> str:
        """The reason, for the log; of a service's space, for all its clients. `otherwise`: where nothing is damaged."""
        before, self._counted = self._counted, self._figures()
        new = {name: count - before[name] for name, count in self._counted.items()}
        damage = [f"{words} ({new[name]} since the last miss)" for name, words in _DAMAGE.items() if new[name] > 0]
        return "; ".join(damage) or otherwise or "evicted meanwhile"
