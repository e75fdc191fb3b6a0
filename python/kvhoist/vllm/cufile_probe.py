"""Whether libcufile moves bytes between drives and a GPU without host memory: its self-test, in a process of its own.

A library that hangs, or crashes at exit as libcufile 1.15 can, must not take the engine with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

_BLOCK_BYTES = 64 << 10

#: The probe opens a CUDA context, and libcufile gives its first calls two limits of 5 s.
_TIMEOUT_S = 60


def probe(folders: Sequence[str], device: int) -> tuple[bool, str]:
    """True with the evidence if libcufile reads each folder's drive directly, False with the reason if not."""
    package = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "kvhoist.vllm.cufile_probe", str(device), *folders]
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"its self-test did not end: {error}"
    try:
        direct, text = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = ended.stderr.strip().splitlines()[-1:] or ["nothing was printed"]
        return False, f"its self-test ended with status {ended.returncode}: {said[0]}"
    return bool(direct), str(text)


def _self_test(folders: Sequence[str], device: int) -> tuple[bool, str]:
    from ..cache import Cache

    with tempfile.TemporaryDirectory(prefix=".kvhoist-probe-", dir=folders[0]) as first:
        others = [tempfile.TemporaryDirectory(prefix=".kvhoist-probe-", dir=folder) for folder in folders[1:]]
        try:
            cache = Cache(
                [first, *(other.name for other in others)], block_bytes=_BLOCK_BYTES, disk_blocks=len(folders),
                host_blocks=1, device="cuda", device_ordinal=device, device_blocks=1, cufile="auto",
            )  # fmt: skip
            with cache:
                stats = cache.stats()
        finally:
            for other in others:
                other.cleanup()
    return stats["cufile"], stats["cufile_reason"]


def main() -> None:
    """Prints the result as JSON, and ends without libcufile's exit handlers."""
    try:
        result = _self_test(sys.argv[2:], int(sys.argv[1]))
    except Exception as error:  # The parent reports it as the reason.
        result = (False, str(error))
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
