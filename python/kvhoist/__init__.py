"""A tiered cache for fixed-size blocks, KV-cache pages of LLM inference above all: host DRAM over NVMe.

>>> import tempfile, kvhoist
>>> path = tempfile.mkdtemp()
>>> with kvhoist.Cache(path, block_bytes=4096, host_bytes="1MiB", capacity="4MiB", direct_io="prefer") as cache:
...     cache.store(["a", "b"], [bytes(4096), b"1" * 4096])
...     cache.match_prefix(["a", "b", "c"])
[True, True]
2

A key is a ``str`` of 64 hex characters or 32 ``bytes``; any other ``str`` or ``bytes`` is a name, and its digest the
key. Keys name content: what is stored under a key once is not stored again.

Nothing here holds the interpreter's lock while it waits. ``kvhoist.sglang``, ``kvhoist.vllm`` and
``kvhoist.lmcache`` have the adapters of these engines.
"""

from __future__ import annotations

from . import errors
from ._native import Queue, Region, __version__
from .cache import Cache
from .client import Client, SharedMemory, connect
from .config import parse_bytes
from .errors import *  # noqa: F403  Its `__all__`, which this module's repeats.

__all__ = [
    "Cache",
    "Client",
    "Queue",
    "Region",
    "SharedMemory",
    "__version__",
    "connect",
    "parse_bytes",
    *errors.__all__,
]
