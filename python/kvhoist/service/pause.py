"""When a service that has not answered in time is asked again."""

from __future__ import annotations

import threading
import time

from ..errors import DeadlineError

#: Seconds of the first pause, and of the longest.
FIRST_S = 1.0
LONGEST_S = 10.0


class Pause:
    """A time without questions, after one that failed.

    A service that is away refuses at once, so its pauses stay short. One that hangs costs its callers a deadline each
    time: its pauses double.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = FIRST_S
        self._until = 0.0

    def is_on(self) -> bool:
        """Whether the service is not to be asked now."""
        return time.monotonic() < self._until

    def begin(self, error: BaseException) -> None:
        """Begins a pause after this error."""
        with self._lock:
            now = time.monotonic()
            # Asked once the last pause was over, and again without an answer.
            again = isinstance(error, DeadlineError) and self._until and now - self._until < self._seconds
            self._seconds = min(2 * self._seconds, LONGEST_S) if again else FIRST_S
            self._until = now + self._seconds

    def end(self) -> None:
        """Ends it early."""
        with self._lock:
            self._until = 0.0
