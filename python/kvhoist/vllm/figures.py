"""A store's figures in vLLM's own metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

#: Seconds between two readings of a store's figures.
_EVERY_S = 1.0

#: vLLM's label of a tier.
_LABELS = ("tier",)

_PREFIX = "vllm:kv_offload_kvhoist_"

#: Counters, by their names in the store's figures.
_COUNTERS = {
    "checksum_failures": "Chunks whose bytes on the drive were not what was stored; each was a miss.",
    "read_errors": "Reads that the drive failed; each was a miss.",
    "write_errors": "Writes that the drive failed; the chunk was not kept.",
    "writes_refused": "Writes that were refused because of a limit; the chunk was not kept.",
}
_EVICTIONS = _PREFIX + "evictions"
_USAGE = _PREFIX + "usage_perc"
_OUT_OF_SERVICE = _PREFIX + "out_of_service"


def metric_definitions(gauges: Mapping[str, str] = MappingProxyType({}), **more: str) -> dict[str, Any]:
    """An adapter's metrics beside those of vLLM. `gauges` and `more`, which are counters, are texts by their names."""
    texts = {**_COUNTERS, "evictions": "Chunks that made room for others on the drive.", **more}
    counters = {_PREFIX + name: OffloadingCounterMetadata(text, _LABELS) for name, text in texts.items()}
    return {
        **counters,
        **{_PREFIX + name: OffloadingGaugeMetadata(text, _LABELS) for name, text in gauges.items()},
        _USAGE: OffloadingGaugeMetadata("Share of the slots on the drive that have a chunk, 0.0 to 1.0.", _LABELS),
        _OUT_OF_SERVICE: OffloadingGaugeMetadata(
            "1 where the drive has failed for good: nothing is read, or nothing written. The log says why.", _LABELS
        ),
    }


class Figures:
    """Changes in a store since vLLM's last call."""

    def __init__(self, label: str, before: Mapping[str, Any] | None = None, counts: bool = True) -> None:
        """`before`: figures of what happened before this engine; `counts`: whether it reports the store's counters."""
        self._label, self._counts = (label,), counts
        self._reported = Counter(_counted(before) if before else {})
        self._asked_at = 0.0

    def are_due(self) -> bool:
        """True once a second: vLLM asks in every step."""
        now = time.monotonic()
        if now - self._asked_at < _EVERY_S:
            return False
        self._asked_at = now
        return True

    def since(
        self, figures: Mapping[str, Any], gauges: Mapping[str, float] = MappingProxyType({}), **more: int
    ) -> OffloadingConnectorStats:
        """The changes in a store's figures; `gauges` and `more` (counters) are the adapter's own values."""
        stats = OffloadingConnectorStats()
        disk = figures["tiers"]["disk"]
        counts = _counted(figures) if self._counts else {}
        counts |= {_PREFIX + name: count for name, count in more.items()}
        for name, count in counts.items():
            before = self._reported[name]
            # Less than before: a service has started again, and counts from 0.
            stats.increase_counter(name, count - before if count >= before else count, self._label)
            self._reported[name] = count
        for name, value in gauges.items():
            stats.set_gauge(_PREFIX + name, value, self._label)
        stats.set_gauge(_USAGE, disk["resident"] / max(disk["slots"], 1), self._label)
        stats.set_gauge(
            _OUT_OF_SERVICE, int(bool(figures["disk_retired"] or figures["disk_read_only"])), self._label
        )
        return stats


def _counted(figures: Mapping[str, Any]) -> dict[str, int]:
    """A store's counters, by the names of their metrics."""
    return {_PREFIX + name: figures[name] for name in _COUNTERS} | {_EVICTIONS: figures["tiers"]["disk"]["evictions"]}
