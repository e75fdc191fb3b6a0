"""What all tests share."""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Not this folder, whose folders have the names of engines.
sys.path.insert(0, str(Path(__file__).parent / "support"))

# A machine that runs other things beside the tests answers later than an engine would wait for a service.
os.environ.setdefault("KVHOIST_LOOKUP_MS", "20000")

#: (tests, why) for each test that was skipped, or module of them.
_skipped: list[tuple[int, str]] = []


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


# What was skipped and why, for the line at the end of python/test: appended to the file that KVHOIST_SKIPS names.


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append((_tests_in(Path(report.longrepr[0])), _reason(report)))


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append((1, _reason(report)))


def pytest_sessionfinish():
    if path := os.environ.get("KVHOIST_SKIPS"):
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{tests}\t{why}\n" for tests, why in _skipped)


def _reason(report) -> str:
    return " ".join(str(report.longrepr[2]).removeprefix("Skipped: ").split())


def _tests_in(path: Path) -> int:
    """Test functions of a module that was skipped before they were collected."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return sum(function.name.startswith("test") for function in functions)
