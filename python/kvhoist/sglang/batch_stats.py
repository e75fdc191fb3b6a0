"""What SGLang's metrics are told of batches."""

from __future__ import annotations

from collections import deque
from typing import Any

#: The most batches whose figures are kept until they are taken.
_BATCHES_MAX = 4096


class BatchStats:
    """Pages and GB/s of each batch. From any thread."""

    def __init__(self) -> None:
        self.prefetched: deque = deque(maxlen=_BATCHES_MAX)
        self.backed_up: deque = deque(maxlen=_BATCHES_MAX)

    def take(self) -> Any:
        """Those since the last call, as SGLang's StorageMetrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for batches, pages, bandwidth in (
            (self.prefetched, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self.backed_up, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            for _ in range(len(batches)):
                count, gb_per_s = batches.popleft()
                pages.append(count)
                bandwidth.append(gb_per_s)
        return metrics
