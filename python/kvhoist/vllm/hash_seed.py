"""The seed of vLLM's prefix hashes, without which no chunk of an earlier process is found. Needs no engine."""

from __future__ import annotations

import logging
import os

from .._versions import Supported

logger = logging.getLogger(__name__)

#: The first version whose `sha256` has a fixed seed. Before it every algorithm has another one in each process.
_FIXED_SINCE = (0, 29)

#: Whether this process has warned.
_has_warned = False


def warn_of_random_seed(version: Supported) -> None:
    """Logs, once, that this version of vLLM draws the seed of all hashes anew at its next start."""
    global _has_warned
    if _has_warned or os.environ.get("PYTHONHASHSEED") is not None or not version.is_before(_FIXED_SINCE):
        return
    _has_warned = True
    logger.warning(
        "kvhoist: PYTHONHASHSEED: found nothing, expected a number, the same at each start: without it vLLM %s draws "
        "the seed of its prefix hashes at random, whatever the algorithm, and finds nothing of what is stored now "
        "after a restart; set PYTHONHASHSEED=0, or use vLLM 0.29 or later",
        version.found,
    )
