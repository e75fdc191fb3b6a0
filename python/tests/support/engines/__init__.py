"""Imports what the tests drive of inference engines, from their unpacked wheels, on a machine without a GPU."""

from __future__ import annotations

import os
from pathlib import Path


def missing(variable: str, package: str) -> str | None:
    """Why tests of an engine cannot run here, if they cannot.

    The environment's `variable` names the folder that the engine's wheel was unpacked into; where there is none,
    `variable`_WHY says why not and what to install.
    """
    root = os.environ.get(variable, "")
    if not root:
        return os.environ.get(f"{variable}_WHY") or (
            f"{variable} is not set, expected the folder of an unpacked {package} wheel: python/test makes one"
        )
    if not Path(root, package).is_dir():
        return f"{variable}: found no folder {package!r} in {root!r}, expected an unpacked wheel: python/test makes one"
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return f"found no torch to import ({error}), expected the version that python/test installs"
    return None
