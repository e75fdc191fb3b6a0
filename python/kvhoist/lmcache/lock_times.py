"""How long LMCache keeps memory for a task: the manager of L1 knows it, and no adapter is told."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from .._values import config_error

#: LMCache's defaults.
READ_TTL_S, WRITE_TTL_S = 300, 600

#: Twice the default of `deadline_ms`: what is begun by then may take as long again.
_TTL_S_MIN = 60

#: LMCache counts from somewhat earlier than the adapter.
_EARLY_S = 10


@dataclass(frozen=True)
class LockTimes:
    """Seconds for which LMCache surely keeps memory."""

    #: That of a store (`--l1-read-ttl-seconds`): then other objects may lie there.
    locked_s: float = READ_TTL_S - _EARLY_S
    #: That of a load (`--l1-write-ttl-seconds`): what is read later may end up in another object.
    staged_s: float = WRITE_TTL_S - _EARLY_S

    @staticmethod
    def of_the_server() -> "LockTimes":
        """Those of the L1 for which an adapter is being made; LMCache's defaults where no caller has it."""
        manager = _manager()
        found = {}
        for name, otherwise in (("read", READ_TTL_S), ("write", WRITE_TTL_S)):
            seconds = found[name] = getattr(manager, f"_{name}_ttl_seconds", otherwise)
            if seconds < _TTL_S_MIN:
                expected = f"{_TTL_S_MIN} or more: sooner LMCache gives memory that the drive uses to other objects"
                raise config_error(f"l1_{name}_ttl_seconds", seconds, expected)
        return LockTimes(found["read"] - _EARLY_S, found["write"] - _EARLY_S)


def _manager() -> Any:
    """The manager of the L1 in a caller's hands: `manager`, or before 0.5.6 the caller's own."""
    frame: Any = sys._getframe()
    while frame is not None:
        for one in (frame.f_locals.get("manager"), getattr(frame.f_locals.get("self"), "_l1_manager", None)):
            if hasattr(one, "_read_ttl_seconds"):
                return one
        frame = frame.f_back
    return None
