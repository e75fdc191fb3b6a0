"""What an adapter does with errors that its engine must not see: a line in the log, and a count."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any, Callable

from .errors import Error

#: Failures of one method that are logged in full before only every so many are.
_LOG_FIRST = 10
_LOG_EVERY = 1000


class Failures:
    """Counts failed calls by the method's name, and under `unit` what failed with them. From any thread."""

    def __init__(
        self, logger: logging.Logger, unit: str, raised: Callable[[BaseException], None] | None = None
    ) -> None:
        """`raised` is told of each error that a guarded call has raised."""
        self._logger, self._unit, self._raised = logger, unit, raised
        self._lock = threading.Lock()
        self.counters: Counter = Counter()

    def guarded(self, method: str, otherwise: Any, run: Callable[[], Any], units: int = 0) -> Any:
        """What `run` returns; `otherwise` where it raises. Never raises but what ends the process."""
        try:
            return run()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Also a panic of the native half, which is no Exception.
            if self._raised is not None:
                self._raised(error)
            self.failed(method, error, units)
            return otherwise

    def failed(self, method: str, why: object, units: int = 0) -> None:
        """Counts and logs a failure of so many units."""
        with self._lock:
            self.counters[method] += 1
            self.counters[self._unit] += units
            count = self.counters[method]
        if count <= _LOG_FIRST or count % _LOG_EVERY == 0:
            unexpected = why if isinstance(why, Exception) and not isinstance(why, Error) else None
            self._logger.warning(
                "kvhoist: %s failed (%d so far), %d %s: %s", method, count, units, self._unit, why,
                exc_info=unexpected,
            )  # fmt: skip
