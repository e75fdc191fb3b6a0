"""Random conversations of every kind of model under the linker, against what each component's own cache has: every
prefix that all of them can restore is offered, whatever ended before, and comes back with right bytes."""

from __future__ import annotations

import os
import random

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_linker import extra_config  # noqa: E402
from sgl_models import MODELS  # noqa: E402
from sgl_serving import Serving  # noqa: E402
from sgl_talks import Talks  # noqa: E402

STEPS = 40
#: Conversations of each kind of model; more of them by hand.
CONVERSATIONS = int(os.environ.get("KVHOIST_CONVERSATIONS", 1))


@pytest.mark.parametrize("number", range(CONVERSATIONS))
@pytest.mark.parametrize("model", MODELS)
def test_whatever_happens_what_all_components_have_comes_back(store_dir, model, number):
    make = lambda: Serving(MODELS[model], extra_config(store_dir))  # noqa: E731
    talks = Talks(make, random.Random(f"{model} {number}"))
    try:
        for step in range(STEPS):
            for _ in talks.step(f"number {number}, step {step}"):
                pass
            talks.between()
            talks.check()
        talks.ended(f"number {number}")
    finally:
        talks.rank.close()
