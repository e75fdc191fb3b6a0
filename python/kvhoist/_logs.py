"""The engine's messages as records of the logger ``kvhoist.engine``.

The engine's threads put them into a bounded queue and go on; a thread of this process's takes them out and waits for
the handlers instead. What finds no room is counted, and the count is logged.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from . import _native

logger = logging.getLogger("kvhoist.engine")

#: Seconds that the end of the interpreter waits for handlers that do not return.
_END_PATIENCE_S = 5

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Begins to hand messages on, once in a process."""
    global _thread
    with _lock:
        if _thread is not None:
            return
        thread = threading.Thread(target=_deliver, name="kvhoist-logs", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # The interpreter is ending: nobody is left to read them.
        _thread = thread
        atexit.register(_end)


def _deliver() -> None:
    while (taken := _native._logs_take()) is not None:
        messages, lost = taken
        try:
            for level, module, text in messages:
                logger.log(level, "%s", text, extra={"engine_module": module})
            if lost:
                logger.warning("%d messages of the engine were lost: they came faster than they could be logged", lost)
        except Exception:  # A filter's; handlers answer for their own.
            traceback.print_exc()


def _end() -> None:
    # Before the interpreter ends, which would kill a thread that waits in native code.
    _native._logs_end()
    if _thread is not None:
        _thread.join(_END_PATIENCE_S)


def _forked() -> None:
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    atexit.unregister(_end)
    _native._logs_renew()


os.register_at_fork(after_in_child=_forked)
