"""`python -m kvhoist`, and the script `kvhoist` of the wheel: the command, with a doctor that knows the engines."""

from __future__ import annotations

import logging
import os
import signal
import sys

from . import _logs, _native, doctor
from ._values import printable

_LEVELS = {
    "OFF": logging.CRITICAL + 1, "ERROR": logging.ERROR, "WARN": logging.WARNING, "WARNING": logging.WARNING,
    "INFO": logging.INFO, "DEBUG": logging.DEBUG, "TRACE": logging.DEBUG,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else ""
    # The doctor's report has a finding for what its stores would warn of.
    default = {"serve": "INFO", "doctor": "ERROR"}.get(command, "WARNING")
    level = os.environ.get("KVHOIST_LOG", default).upper()
    if level not in _LEVELS:
        found = printable(repr(os.environ["KVHOIST_LOG"]))
        print(f"kvhoist: KVHOIST_LOG: found {found}, expected off, error, warn, info, debug or trace", file=sys.stderr)
        return 2
    logging.basicConfig(level=_LEVELS[level], format="%(asctime)s %(levelname)s %(message)s")
    _logs.start()
    if command == "doctor":
        return doctor.run(arguments[1:])
    if command == "load-bench":
        # It needs torch, as what it measures does.
        from . import load_bench

        return load_bench.run(arguments[1:])
    return _native.run_command(["kvhoist", *arguments], [])


def script() -> None:
    """As a process of its own, whose signals are the command's."""
    # Python's own handler would wait for native code to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())


if __name__ == "__main__":
    script()
