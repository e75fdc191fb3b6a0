"""What all tests share."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store_dir():
    """An empty folder on a real file system: `/tmp` may be one in memory, which has no direct I/O."""
    path = Path(tempfile.mkdtemp(prefix="kvhoist-", dir=os.environ.get("KVHOIST_TEST_DIR")))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def seed(request):
    """A seed, named where the test fails; KVHOIST_SEED repeats one."""
    chosen = int(os.environ.get("KVHOIST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"KVHOIST_SEED={chosen}")
    return chosen
