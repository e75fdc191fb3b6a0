"""The examples run as they stand, and the notebook's cells one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvhoist

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples beside the tests; run them in a checkout")


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name):
    assert run(str(EXAMPLES / name)).strip(), "it says what it did"


def test_blocks_are_there_in_the_next_process(tmp_path):
    for _ in range(2):
        assert "3 of 4 blocks loaded, 3 from disk" in run(str(EXAMPLES / "blocks.py"), str(tmp_path))


def test_the_notebook_runs_from_top_to_bottom():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3 and all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    run("-c", "\n".join(cells))
