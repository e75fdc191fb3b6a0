"""The adapters' classes, where this version of SGLang has the interfaces that they implement."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

from .._versions import words


class Seat(NamedTuple):
    """Where SGLang puts an adapter."""

    module: str
    #: What SGLang calls the interface, and the versions whose interface it is.
    interface: str
    versions: str
    #: What to do where SGLang's is another.
    instead: str


SEATS = {
    "HiCacheKvhoist": Seat("backend", "storage backend of HiCache", words("sglang"), "install one of these"),
    "KvhoistLinker": Seat(
        "linker", "external linker", "0.5.23", "install it, or use HiCacheKvhoist, the storage backend of HiCache"
    ),
}


def adapter(name: str) -> type:
    """The class of this name. Raises ImportError with the version that was found, where SGLang's interface is another.

    Methods that a version adds with a default are inherited; those that it demands and the adapter lacks are named.
    """
    seat = SEATS[name]
    try:
        found = getattr(import_module(f"{__package__}.{seat.module}"), name)
    except ImportError as error:
        raise _refusal(name, seat, f"no {seat.interface} that it knows ({error})") from error
    if lacking := sorted(found.__abstractmethods__):
        raise _refusal(name, seat, f"the methods {', '.join(lacking)} in its {seat.interface}")
    return found


def _refusal(name: str, seat: Seat, what: str) -> ImportError:
    version = str(getattr(sys.modules.get("sglang"), "__version__", None) or "unknown")
    return ImportError(
        f"sglang: found version {version}, with {what}; expected {seat.versions}, whose {seat.interface} {name} supports; "
        f"{seat.instead}"
    )
