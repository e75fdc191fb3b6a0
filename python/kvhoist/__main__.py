"""`python -m kvhoist`, and the script `kvhoist` of the wheel: the command, with a doctor that knows the engines."""

from __future__ import annotations

import logging
import operator
import os
import signal
import sys

from . import _logs, _native, doctor
from ._values import printable

_OFF = logging.CRITICAL + 1
_LEVELS = {
    "OFF": _OFF, "ERROR": logging.ERROR, "WARN": logging.WARNING, "WARNING": logging.WARNING,
    "INFO": logging.INFO, "DEBUG": logging.DEBUG, "TRACE": logging.DEBUG,
}  # fmt: skip


def levels(given: str) -> dict[str, int] | None:
    """The level of each module that a filter as the binary's names, and that of the others under the empty name; `None`
    of what is no filter."""
    found = {"": _OFF}
    for part in given.split(","):
        module, equals, level = part.strip().rpartition("=")
        if level.upper() not in _LEVELS or bool(equals) != bool(module):
            return None
        found[module] = _LEVELS[level.upper()]
    return found


class _OfModules(logging.Filter):
    """Passes what is of the level of its module: of the longest name that its own begins with."""

    def __init__(self, found: dict[str, int]) -> None:
        super().__init__()
        self._levels = sorted(found.items(), key=operator.itemgetter(0), reverse=True)

    def filter(self, record: logging.LogRecord) -> bool:
        module = getattr(record, "engine_module", record.name)
        return record.levelno >= next(level for name, level in self._levels if module.startswith(name))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else ""
    # The doctor's report has a finding for what its stores would warn of.
    default = {"serve": "INFO", "doctor": "ERROR"}.get(command, "WARNING")
    of_modules = levels(os.environ.get("KVHOIST_LOG", default))
    if of_modules is None:
        found = printable(repr(os.environ["KVHOIST_LOG"]))
        expected = (
            "off, error, warn, info, debug or trace, or a level for each module, such as warn,kvhoist_service=debug"
        )
        print(f"kvhoist: KVHOIST_LOG: found {found}, expected {expected}", file=sys.stderr)
        return 2
    handler = logging.StreamHandler()
    handler.addFilter(_OfModules(of_modules))
    logging.basicConfig(
        level=min(of_modules.values()), format="%(asctime)s %(levelname)s %(message)s", handlers=[handler]
    )
    _logs.start()
    if command == "doctor":
        return doctor.run(arguments[1:])
    if command == "load-bench":
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
