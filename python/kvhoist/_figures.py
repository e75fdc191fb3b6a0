"""What an adapter's stores do, for the operator of an engine: a line in the log now and then, and an address to scrape."""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Mapping

from . import metrics
from .errors import Error

logger = logging.getLogger(__name__)

#: Seconds between two lines, and from the first batch after one to the next.
EVERY_S = 60.0

_lock = threading.Lock()
#: The server of this process, by its port.
_servers: dict[int, metrics.Server] = {}


def _later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


class Lines:
    """A line about each store: what has happened since the one before. None, and no thread, where nothing has."""

    def __init__(self, later: Callable[[float, Callable[[], None]], None] = _later) -> None:
        self._later = later
        self._is_due = False
        self._lock = threading.Lock()
        self._before: dict[str, dict[str, int]] = {}

    def begin(self, store: str, figures: dict[str, Any]) -> None:
        """What has happened in a store before is in no line: a space of a service has a history."""
        with self._lock:
            self._before[store] = _counts(figures)

    def turn(self, stores: Callable[[], Mapping[str, Callable[[], dict[str, Any]]]]) -> None:
        """Has the lines logged in a minute, also if no batch follows this one. Called after each batch."""
        with self._lock:
            if not self._is_due:
                self._later(EVERY_S, lambda: self._say(stores()))
                self._is_due = True

    def _say(self, stores: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
        with self._lock:
            self._is_due = False
        for name, ask in stores.items():
            try:
                now = _counts(ask())
            except Error:  # Closed, or its service is away.
                continue
            before = self._before.get(name, {})
            # Less than before: a service has started again, and counts from 0.
            new = {what: count - before.get(what, 0) if count >= before.get(what, 0) else count for what, count in now.items()}
            self._before[name] = now
            if any(new.values()):
                logger.info("kvhoist: pool %s in the last %d s: %s", name, EVERY_S, _words(new))


def _counts(stats: dict[str, Any]) -> dict[str, int]:
    tiers = stats["tiers"]
    return {
        "host": tiers["host"]["hits"], "disk": tiers["disk"]["hits"], "misses": stats["misses"],
        "read": stats["read_bytes"], "written": tiers["disk"]["bytes_in"], "evictions": tiers["disk"]["evictions"],
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
