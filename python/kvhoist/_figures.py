"""What an adapter's stores do, for the operator of an engine: a line in the log now and then, and an address to scrape."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Mapping

from . import metrics

logger = logging.getLogger(__name__)

#: Seconds between two lines.
EVERY_S = 60.0

_lock = threading.Lock()
#: The server of this process, by its port.
_servers: dict[int, metrics.Server] = {}


class Lines:
    """A line about each store: what has happened since the one before. None where nothing has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = clock() + EVERY_S
        self._lock = threading.Lock()
        self._before: dict[str, dict[str, int]] = {}

    def turn(self, stores: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
        """Logs the lines, if they are due. Called after each batch; the figures are asked for only then."""
        if self._clock() < self._due_at:
            return
        with self._lock:
            if self._clock() < self._due_at:
                return
            self._due_at = self._clock() + EVERY_S
        for name, ask in stores.items():
            now = _counts(ask())
            before = self._before.get(name, {})
            # Less than before: a service has started again, and counts from 0.
            new = {what: count - before.get(what, 0) if count >= before.get(what, 0) else count for what, count in now.items()}
            self._before[name] = now
            if any(new.values()):
                logger.info("kvhoist: pool %s in the last %d s: %s", name, EVERY_S, _words(new))


def _counts(stats: dict[str, Any]) -> dict[str, int]:
    tiers = stats["tiers"]
    read = stats["read_bytes"] if "read_bytes" in stats else tiers["disk"]["bytes_out"]
    return {
        "host": tiers["host"]["hits"], "disk": tiers["disk"]["hits"], "misses": stats["misses"], "read": read,
        "written": tiers["disk"]["bytes_in"], "evictions": tiers["disk"]["evictions"],
        "errors": sum(stats[name] for name in ("checksum_failures", "read_errors", "write_errors")),
    }  # fmt: skip


def _words(new: dict[str, int]) -> str:
    gib = {name: new[name] / (1 << 30) for name in ("read", "written")}
    text = (
        f"{new['host']} hits in host memory, {new['disk']} on disk, {new['misses']} misses; {gib['read']:.2f} GiB read, "
        f"{gib['written']:.2f} GiB written; {new['evictions']} evictions"
    )
    return text + (f"; {new['errors']} errors" if new["errors"] else "")


def serve(port: int | None, rank: int = 0) -> None:
    """Serves the figures of this process at `port` and the number of its rank, if there is a port; once in a process.

    Never raises: an engine without figures is better than none.
    """
    if port is None:
        return
    with _lock:
        if _servers:
            return
        at = port + rank if port else 0
        try:
            server = metrics.serve(at)
        except (OSError, OverflowError, RuntimeError) as error:
            logger.warning("kvhoist: no figures of this process: port %d: %s; choose another metrics_port", at, error)
            return
        _servers[at] = server
    logger.info("kvhoist: figures of this process at http://127.0.0.1:%d/metrics", server.port)
