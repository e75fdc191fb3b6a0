"""Whether this version of SGLang has a seat for the linker that kvhoist knows."""

from __future__ import annotations

import sys
from typing import Any

#: What SGLang calls of a linker. Versions may take away some; what they add must have a default.
KNOWN = frozenset(
    "record_offload_ready lookup load start_layer_wise_loading finish_layer_wise_loading cancel_queued_load offload "
    "num_completed_offloads pop_completed_offload reset close".split()
)


def linker_class() -> type:
    """`KvhoistLinker`. Raises ImportError with the version that was found, where SGLang's interface is another."""
    try:
        from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    except ImportError as error:
        raise refusal(f"no external linker ({error})") from error
    check(UnifiedCacheLinker)
    try:
        from .linker import KvhoistLinker
    except ImportError as error:
        raise refusal(f"another layout of its modules ({error})") from error
    return KvhoistLinker


def check(interface: Any) -> None:
    """Raises ImportError for an interface with abstract methods that kvhoist has not."""
    unknown = sorted(set(getattr(interface, "__abstractmethods__", ())) - KNOWN)
    if unknown:
        raise refusal(f"linkers with {', '.join(unknown)}")


def refusal(what: str) -> ImportError:
    """What was found, and what to do."""
    version = str(getattr(sys.modules.get("sglang"), "__version__", None) or "unknown")
    return ImportError(
        f"sglang: found version {version}, with {what}; expected 0.5.23, whose external linker KvhoistLinker supports; "
        "install it, or use HiCacheKvhoist, the storage backend of HiCache"
    )
