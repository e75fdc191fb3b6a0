"""The adapters' classes, where this version of SGLang has the interfaces that they implement."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

from .._versions import words


class Interface(NamedTuple):
    """An interface of SGLang, and the module of its adapter."""

    module: str
    #: What SGLang calls it, and the versions that have it.
    called: str
    versions: str
    #: What to do where SGLang's is another.
    instead: str


INTERFACES = {
    "HiCacheKvhoist": Interface("backend", "storage backend of HiCache", words("sglang"), "install one of these"),
    "KvhoistLinker": Interface(
        "linker", "external linker", "0.5.23", "install it, or use HiCacheKvhoist, the storage backend of HiCache"
    ),
}


def adapter(name: str) -> type:
    """The class of this name. Raises ImportError with the version that was found, where SGLang's interface is another.

    Methods that a version adds with a default are inherited; those that it demands and the adapter lacks are named.
    """
    interface = INTERFACES[name]
    try:
        found = getattr(import_module(f"{__package__}.{interface.module}"), name)
    except ImportError as error:
        raise _refusal(name, interface, f"no {interface.called} that it knows ({error})") from error
    if lacking := sorted(found.__abstractmethods__):
        raise _refusal(name, interface, f"the methods {', '.join(lacking)} in its {interface.called}")
    return found


def _refusal(name: str, interface: Interface, what: str) -> ImportError:
    version = str(getattr(sys.modules.get("sglang"), "__version__", None) or "unknown")
    return ImportError(
        f"sglang: found version {version}, with {what}; expected {interface.versions}, whose {interface.called} {name} supports; "
        f"{interface.instead}"
    )
