"""The GPU spec under vLLM's own Scheduler: a request whose load fails is computed again, and ends."""

from __future__ import annotations

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

from vengine import NEW, Engine  # noqa: E402
from vgpu import TOKENS, Gpu, requests, settings  # noqa: E402


def spoil(folder, gpu, name: bytes) -> None:
    """Overwrites what is stored of one block."""
    (path,) = folder.rglob("kvhoist.store")
    data, found = gpu.data(name).cpu().numpy().tobytes(), path.read_bytes()
    assert data in found, "the block is not on disk"
    with open(path, "r+b") as file:
        file.seek(found.index(data))
        file.write(bytes(len(data)))


PROMPT = list(range(1000, 1000 + 6 * TOKENS + 5))


def test_a_request_is_served_from_the_drive(store_dir):
    with Engine(settings(store_dir)) as engine:
        assert engine.serve("first", PROMPT) == 0
        assert engine.serve("again", PROMPT) == 6 * TOKENS, "from the GPU"
        engine.forget()
        assert engine.serve("later", PROMPT) == 6 * TOKENS, "from the drive"
    with Engine(settings(store_dir)) as engine:
        assert engine.serve("after the restart", PROMPT + [1]) == 6 * TOKENS


def test_a_request_whose_load_fails_is_computed_and_ends(store_dir):
    with Engine(settings(store_dir)) as engine:
        names = engine.names(engine.add("first", PROMPT))
        engine.run()
    with Engine(settings(store_dir)) as engine:
        spoil(store_dir, engine.gpu, names[3])
        # What is before the damaged block is loaded, the rest is computed; `_compute` looks at every byte.
        assert engine.serve("second", PROMPT) == 3 * TOKENS
        engine.forget()
        engine.serve("third", PROMPT)
        engine.forget()
        assert engine.serve("fourth", PROMPT) == 6 * TOKENS, "it was stored again"


@pytest.mark.skipif(not NEW, reason="before 0.33 such a model is refused")
def test_a_request_does_not_go_on_behind_what_a_window_has_left(store_dir):
    with Engine(settings(store_dir), Gpu(window=2 * TOKENS)) as engine:
        names = engine.names(engine.add("first", PROMPT))
        engine.run()
    with Engine(settings(store_dir), Gpu(window=2 * TOKENS)) as engine:
        assert engine.serve("other", PROMPT[:-1]) == 6 * TOKENS
    with Engine(settings(store_dir), Gpu(window=2 * TOKENS)) as engine:
        spoil(store_dir, engine.gpu, names[5])
        assert engine.serve("second", PROMPT) == 0


def test_requests_beside_a_failed_one_are_served(store_dir):
    other = list(range(5000, 5000 + 4 * TOKENS + 1))
    with Engine(settings(store_dir)) as engine:
        names = engine.names(engine.add("first", PROMPT))
        engine.add("other", other)
        engine.run()
    with Engine(settings(store_dir)) as engine:
        spoil(store_dir, engine.gpu, names[0])
        both = [engine.add("second", PROMPT), engine.add("other again", other), engine.add("beside", PROMPT)]
        engine.run()
        assert all(request.status is requests.RequestStatus.FINISHED_LENGTH_CAPPED for request in both)
        # One of the two that are alike is computed; the other may find that on the GPU.
        assert min(engine.found["second"], engine.found["beside"]) == 0
        assert engine.found["other again"] == 4 * TOKENS
