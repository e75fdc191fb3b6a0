"""Loads of SGLang's external linker and the forward: which waits for which."""

from __future__ import annotations

import threading

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

pytest.importorskip("torch")

from sgl_controller import device_buffers, device_noise, rows  # noqa: E402
from sgl_linker import computed, ranks_at, tokens_of  # noqa: E402
from sgl_pages import same  # noqa: E402

PAGES = 6

doubled = pytest.mark.skipif(sgl.DEVICE == "cuda", reason="a double plays the forward's stream, in host memory")


@pytest.fixture
def ranks(store_dir):
    with ranks_at(store_dir) as make:
        yield make


@doubled
def test_loads_begin_behind_the_batch_that_still_writes_to_their_places(ranks):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    loads, pages = [], rank.linker._pages["kv"]
    load = pages.load
    pages.load = lambda *given: loads.append(rank.forward.query()) or load(*given)
    req, result = rank.match(tokens)
    assert rank.admit(req, result) == len(tokens)
    indices = rank.tree.linker.private_load_indices[req.rid]
    rank.forward.run()
    rank.begin()
    assert rank.forward.waited_for.wait(60), "nobody waits for the running batch"
    assert loads == []
    # The last token of the request that had these places before.
    device_noise(rank.device, 77)
    rank.forward.end()
    for layer in range(sgl.MHA.layers):
        rank.device.get_key_buffer(layer)
    assert rank.finish(req) == []
    assert loads == [True]
    assert same(rows(device_buffers(rank.device), indices), want)
    assert not rank.pinned()


@doubled
def test_a_reset_ends_loads_that_have_not_begun(ranks):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    computed(rank, tokens)
    req, result = rank.match(tokens)
    rank.admit(req, result)
    rank.forward.run()
    rank.begin()
    assert rank.forward.waited_for.wait(60)
    threading.Timer(0.05, rank.forward.end).start()
    rank.tree.reset()
    assert rank.forward.query() and not rank.pinned()


@doubled
def test_loads_whose_events_fail_abort_their_batch_and_write_nothing(ranks, monkeypatch):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    computed(rank, tokens)

    def fails(*_given):
        raise RuntimeError("on purpose")

    for name in ("query", "record_event", "synchronize"):
        with monkeypatch.context() as patch:
            rank.forward.run()
            patch.setattr(rank.forward, name, fails)
            patch.setattr(rank.linker._pages["kv"], "load", lambda *_given: pytest.fail("loaded"))
            req, result = rank.match(tokens)
            assert rank.admit(req, result) == len(tokens)
            rank.begin()
            rank.device.get_key_buffer(0)
            assert rank.finish(req) == [req], name
            assert not rank.pinned()
            rank.forward.end()
    # Nothing is wrong with the pages.
    assert rank.restore(tokens)[0] is not None


def test_a_prefill_that_is_replayed_whole_waits_for_all_layers(ranks):
    """As SGLang's `PrefillCudaGraphRunner._wait_for_layer_loads` does."""
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    req, result = rank.match(tokens)
    rank.admit(req, result)
    indices = rank.tree.linker.private_load_indices[req.rid]
    rank.begin()
    counter = rank.device.layer_transfer_counter
    assert counter.consumer_index >= 0 and counter.num_layers == sgl.MHA.layers
    counter.wait_until(counter.num_layers - 1)
    assert same(rows(device_buffers(rank.device), indices), want)
    assert rank.finish(req) == []
