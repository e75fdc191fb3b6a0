"""A tiered cache for fixed-size blocks, such as KV-cache pages of LLM inference, in host memory and on NVMe drives.

>>> import tempfile, kvhoist
>>> path = tempfile.mkdtemp()
>>> with kvhoist.Cache(path, block_bytes=4096, host_bytes="1MiB", capacity="4MiB", direct_io="prefer") as cache:
...     cache.store(["a", "b"], [bytes(4096), b"1" * 4096])
...     cache.match_prefix(["a", "b", "c"])
[True, True]
2

A key is a ``str`` of 64 hex characters or 32 ``bytes``; any other ``str`` or ``bytes`` is a name, and its digest is
the key. Keys name content: a block that is stored under a key is not replaced by another store under it.

``Cache`` is a cache of this process, ``connect`` attaches to a space of a node's service. ``kvhoist.metrics`` exports
figures to Prometheus. ``kvhoist.sglang``, ``kvhoist.vllm`` and ``kvhoist.lmcache`` are adapters of these engines,
``kvhoist.transformers`` keeps prompts for Hugging Face transformers.
No call holds the interpreter's lock while it waits.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from . import errors
from ._native import Held, LayerLoad, Queue, Region, __version__
from ._values import parse_bytes
from .cache import Cache
from .client import Client, SharedMemory, connect
from .errors import *  # noqa: F403  Its `__all__`, which this module's repeats.

if TYPE_CHECKING:
    from . import metrics

__all__ = [
    "Cache",
    "Client",
    "Held",
    "LayerLoad",
    "Queue",
    "Region",
    "SharedMemory",
    "__version__",
    "connect",
    "parse_bytes",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    # Imported when it is first used: it takes an HTTP server along.
    if name == "metrics":
        return _import_module("kvhoist.metrics")
    raise AttributeError(f"module 'kvhoist' has no attribute {name!r}")
