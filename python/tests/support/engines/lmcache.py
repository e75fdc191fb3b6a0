"""LMCache's distributed storage manager, from an unpacked wheel, with its native library.

Installed must be what `python/test` installs for it: torch, numpy, msgspec, psutil, pyzmq, cachetools, cryptography,
httpx, opentelemetry-sdk, opentelemetry-exporter-prometheus, prometheus_client, pydantic, pyyaml, requests,
sortedcontainers.
"""

from __future__ import annotations

import sys

from .stand_ins import add_absent, prepare_torch

#: Packages that LMCache imports and its storage does not need.
ABSENT = frozenset(
    """
    aiofile aiofiles aiohttp awscrt blake3 cpuinfo cufile cupy fastapi grpc huggingface_hub numba nvtx openai redis
    safetensors transformers uvicorn xxhash
    """.split()
)


def boot(root: str) -> None:
    """Makes LMCache's modules importable from the wheel that was unpacked into `root`."""
    prepare_torch()
    sys.path.insert(0, root)
    add_absent(ABSENT)
