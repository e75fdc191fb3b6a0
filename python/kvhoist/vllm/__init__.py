"""kvhoist under vLLM: `KvhoistTier`, a tier behind its host memory, and `KvhoistOffloadingSpec` with
`KvhoistConnector`, which move chunks between a GPU and NVMe.

`docs/vllm.md` has the launch lines and the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .connector import KvhoistConnector
    from .spec import KvhoistOffloadingSpec
    from .tier import KvhoistTier

__all__ = ["KvhoistConnector", "KvhoistOffloadingSpec", "KvhoistTier"]

__getattr__ = lazy(__name__, {"KvhoistConnector": "connector", "KvhoistOffloadingSpec": "spec", "KvhoistTier": "tier"})
