"""The exceptions of kvhoist, split by what the caller can do about them.

Some are also built-in exceptions, so that code that knows nothing of kvhoist treats them rightly.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BusyError",
    "CancelledError",
    "ClosedError",
    "ConfigError",
    "CopyError",
    "DeadlineError",
    "Error",
    "ForkError",
    "IoError",
    "RefusedError",
    "StoreError",
    "UnavailableError",
]


class Error(Exception):
    """What every failure of kvhoist is."""


class ConfigError(Error, ValueError):
    """A setting is wrong. Mend the one named by ``field`` and open again."""

    field: str = ""


class ArgumentError(Error, ValueError):
    """An argument of the call is wrong. Mend the call; the cache is unharmed."""


class StoreError(Error):
    """A store on disk was refused, and left untouched: the message says what was found there and what to do."""


class BusyError(Error):
    """A limit was reached and nothing was done. Try again later, or raise the named setting."""


class CancelledError(Error):
    """A transfer of files was cancelled. What its memory holds is not defined."""


class DeadlineError(Error, TimeoutError):
    """It took longer than ``deadline_ms``; what was waited for goes on."""


class RefusedError(Error):
    """The disk tier did not take a block. It may still be resident in host memory."""


class IoError(Error, OSError):
    """The operating system failed an operation; ``errno`` is set where it gave one."""


class CopyError(Error):
    """A copy between memories failed."""


class UnavailableError(Error):
    """A tier that the call needs is absent or out of service; the message says why."""


class ClosedError(Error):
    """The cache is closed, or closing. Open another."""


class ForkError(Error):
    """The cache was opened by another process, before a fork. Open one in the child, or fork first."""
