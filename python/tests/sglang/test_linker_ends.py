"""Requests of every kind of model that end at every point under the linker: aborted, with the tree reset, or with the
linker closed. Nothing stays held, nothing waits, every place is free again, and the next request gets right bytes."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from nodes import Node  # noqa: E402
from sgl_linker import extra_config, tokens_of  # noqa: E402
from sgl_models import MODELS, WINDOW  # noqa: E402
from sgl_pages import same  # noqa: E402
from sgl_serving import Serving  # noqa: E402

PAGES = 5

#: The socket of a service.
NODE = object()

#: Who has the caches of which model: the settings of each way.
OWN = [pytest.param(model, {}, id=f"own-{model}") for model in MODELS]
SHARED = [pytest.param(model, {"service": NODE}, id=f"service-{model}") for model in MODELS]
seats = pytest.mark.parametrize("model, seat", OWN + SHARED)
own_seats = pytest.mark.parametrize("model, seat", OWN)


@pytest.fixture
def serving(store_dir):
    """Makes ranks that are closed at the end, whatever happens."""
    made, nodes = [], []

    def make(model, seat, **more):
        if seat.get("service") is NODE:
            nodes or nodes.append(Node(store_dir, capacity="512MiB", host_bytes="32MiB"))
            seat = {**seat, "service": nodes[0].socket}
        made.append(Serving(MODELS[model], extra_config(store_dir, **seat), **more))
        return made[-1]

    yield make
    for one in made + nodes:
        one.close()


@contextmanager
def later(rank, seconds: float):
    """As if so much time had passed, and the scheduler made its step."""
    import kvhoist.sglang.linker as module

    with pytest.MonkeyPatch.context() as patch:
        then = module.time.monotonic() + seconds
        patch.setattr(module.time, "monotonic", lambda: then)
        rank.tree.check_hicache_events()
        yield


def life(rank, tokens):
    """A request from its lookup to its end: yields each point's name, and the request."""
    req, result = rank.match(tokens)
    assert result.host_hit_length == len(tokens)
    yield "matched", req
    req, result = rank.match(tokens, req.rid)
    yield "matched again", req
    assert rank.admit(req, result) == len(tokens)
    yield "queued", req
    rank.begin()
    yield "begun", req
    for layer in rank.layers():
        rank.linker.layer_done_counter.wait_until(layer)
        yield f"waited for layer {layer}", req
    req.places = rank.taken(req)
    assert rank.finish(req) == []
    yield "finished", req
    rank.inserted(tokens, req.places[0], 0, req.places[1], req)
    req.places = None, None
    yield "inserted", req


def points(rank) -> int:
    return 6 + len(rank.layers())


def until(rank, tokens, point: int):
    """A request at a point of its life: its name, and the request."""
    alive = life(rank, tokens)
    for _ in range(point + 1):
        name, req = next(alive)
    return name, req


def aborted(rank, req) -> None:
    """The request goes away, as the scheduler lets it go: its places are freed when nothing is written to them."""
    rank.tree.release_aborted_request(rank.modules.base.CacheRequestHandle(req.rid, 0))
    places = getattr(req, "places", None) or rank.taken(req)
    rank.finish(req)
    rank.given_back(*places)


@seats
@pytest.mark.parametrize("source", ["host", "disk"])
def test_a_request_aborted_at_any_point_leaves_nothing(serving, model, seat, source):
    rank = serving(model, seat)
    tokens = tokens_of(MODELS[model], PAGES)
    want = rank.stored(tokens)
    if source == "disk":
        rank.close()
        rank = serving(model, seat)
    for point in range(points(rank)):
        name, req = until(rank, tokens, point)
        if name == "queued":
            # What the release of a queued load forgets.
            req.places = rank.taken(req)
        aborted(rank, req)
        if name.startswith("matched"):
            # SGLang does not say that a request was not admitted: it holds its pages for a time, and no longer.
            assert rank.held() > 0 or source == "disk", name
            with later(rank, 61):
                rank.settled(name)
        else:
            rank.settled(name)
        rank.noise(point + 50)
        found = rank.restored(tokens)
        assert found is not None and same(found, want), name
        rank.settled(name)
    assert not rank.linker.stats()["failed"]


@seats
def test_a_reset_at_any_point_leaves_nothing(serving, model, seat):
    rank = serving(model, seat)
    tokens = tokens_of(MODELS[model], PAGES)
    for point in range(points(rank)):
        want = rank.stored(tokens)
        name, _ = until(rank, tokens, point)
        rank.cleared()
        assert not rank.pinned() and rank.free() == rank.free_at_first, name
        # Nothing waits for a batch that has gone.
        for layer in rank.layers():
            rank.linker.layer_done_counter.wait_until(layer)
        assert rank.linker.start_layer_wise_loading() == -1 and rank.linker.num_completed_offloads() == 0, name
        assert rank.restored(tokens) is None, f"other weights may have computed it: {name}"
        rank.stored(tokens)
        rank.noise(point + 50)
        found = rank.restored(tokens)
        assert found is not None and same(found, want), name
        rank.settled(name)
    assert not rank.linker.stats()["failed"]


@seats
def test_a_close_at_any_point_leaves_nothing_and_the_next_server_has_all(serving, model, seat):
    tokens, point, total, want = tokens_of(MODELS[model], PAGES), 0, 1, None
    while point < total:
        rank = serving(model, seat)
        total = points(rank)
        if want is None:
            want = rank.stored(tokens)
        name, req = until(rank, tokens, point)
        rank.close()
        assert not rank.pinned(), name
        rank.linker.layer_done_counter.wait_until(max(rank.layers()))
        # Later calls are misses.
        assert rank.match(tokens)[1].host_hit_length == 0 and rank.linker.start_layer_wise_loading() == -1, name
        assert rank.linker.finish_layer_wise_loading(0) and not rank.linker.cancel_queued_load(req.rid), name
        assert not rank.linker._failures.counters, name
        rank.close()
        point += 1
    rank = serving(model, seat)
    assert same(rank.restored(tokens), want)
    rank.settled("at the end")


@seats
def test_a_batch_that_begins_before_the_last_has_ended(serving, model, seat):
    """With an overlapped schedule: the second batch's loads run while the first one's layers are still read."""
    rank = serving(model, seat)
    prompts = [tokens_of(MODELS[model], 3, first) for first in (1000, 50_000)]
    wants = [rank.stored(tokens) for tokens in prompts]
    for first_waits in range(len(rank.layers()) + 1):
        reqs, places, indices = [], [], []
        for tokens in prompts:
            req, result = rank.match(tokens)
            assert rank.admit(req, result) == len(tokens)
            reqs.append(req)
            places.append(rank.taken(req))
            if len(reqs) == 1:
                indices.append(rank.begin())
                rids = list(rank.tree.linker.inflight_load_rids)
                for layer in rank.layers()[:first_waits]:
                    rank.linker.layer_done_counter.wait_until(layer)
        indices.append(rank.linker.start_layer_wise_loading())
        assert indices[1] == indices[0] + 1 and rids == [reqs[0].rid]
        # The first one goes on, and ends, behind the second one's begin: each waits for its own batch.
        counter = rank.linker.layer_done_counter
        for index, layers in ((indices[0], rank.layers()[first_waits:]), (indices[1], rank.layers())):
            counter.set_consumer(index)
            others = {other: batch for other, batch in counter.batches.items() if other != index}
            waited = {other: repr(batch._waited) for other, batch in others.items()}
            for layer in layers:
                counter.wait_until(layer)
            assert {other: repr(batch._waited) for other, batch in others.items()} == waited
            assert rank.linker.finish_layer_wise_loading(index)
        rank.tree.linker.inflight_load_index = -1
        assert rank.finish(*reqs) == []
        for req_places, want in zip(places, wants):
            assert same(rank.bytes_of(*req_places), want), first_waits
            rank.given_back(*req_places)
        rank.settled(str(first_waits))


@seats
def test_a_load_that_is_refused_is_computed_instead(serving, model, seat, monkeypatch):
    import kvhoist.sglang.linker as module

    rank = serving(model, seat)
    tokens = tokens_of(MODELS[model], PAGES)
    want = rank.stored(tokens)

    def fails(*_given):
        raise ValueError("rows: on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(module, "rows_of", fails)
        assert rank.restored(tokens) is None
        rank.settled("refused")
    assert rank.linker.stats()["failed"] == {"load": 1, "pages": 0}
    assert same(rank.restored(tokens), want)
    rank.settled("at the end")


def components(rank) -> list[str]:
    return list(rank.linker._pages)


@own_seats
def test_pages_of_any_component_that_leave_before_the_load_abort_it(serving, model, seat):
    rank = serving(model, seat)
    tokens = tokens_of(MODELS[model], PAGES)
    want = rank.stored(tokens)
    for name in components(rank):
        req, result = rank.match(tokens)
        rank.linker._pages[name].cache.clear()
        assert rank.admit(req, result) == len(tokens), "the transfers alone decide"
        places = rank.taken(req)
        rank.begin()
        for layer in rank.layers():
            rank.linker.layer_done_counter.wait_until(layer)
        assert rank.finish(req) == [req], name
        rank.given_back(*places)
        rank.settled(name)
        assert rank.restored(tokens) is None, name
        # Computed again, it is there again.
        rank.stored(tokens)
        assert same(rank.restored(tokens), want), name
        rank.settled(name)


def _flipped(store_dir, page: bytes) -> bool:
    """Flips a bit of these bytes on disk, which one block has."""
    for path in store_dir.rglob("kvhoist.store"):
        data = bytearray(path.read_bytes())
        if (at := data.find(page)) >= 0:
            data[at + len(page) // 2] ^= 1
            path.write_bytes(data)
            return True
    return False


@own_seats
def test_a_bad_byte_of_any_layer_of_any_component_is_never_served(serving, model, seat, store_dir):
    """On disk, in the last page of a prompt, or in its state: aborted once, then a miss, then stored anew."""
    rank = serving(model, seat)
    kinds = list(enumerate(rank.pools.kept))
    prompts = [tokens_of(MODELS[model], PAGES, 1000 + 50_000 * at) for at, _ in kinds]
    wants = [rank.stored(tokens) for tokens in prompts]
    rank.close()
    for at, kept in kinds:
        assert _flipped(store_dir, _last_page(wants[at][at], kept, MODELS[model].page_tokens)), kept
    rank = serving(model, seat)
    for at, kept in kinds:
        what, tokens = f"{kept.component}, layer {kept.layer}", prompts[at]
        assert rank.restored(tokens) is False, what
        rank.settled(what)
        rank.linker._offloads.join()
        shorter = rank.match(tokens)[1].host_hit_length
        assert shorter < len(tokens), f"{what}: found to be bad, it is offered no more"
        with later(rank, 61):
            rank.settled(what)
        rank.stored(tokens)
        assert same(rank.restored(tokens), wants[at]), what
        assert rank.linker.stats()["linker"]["requests_aborted"] == at + 1, what
        rank.settled(what)


def _last_page(of_buffer, kept, page: int) -> bytes:
    """The last page of what a prompt has in a buffer, or its state: the first bytes of it."""
    of_buffer = of_buffer.view(-1)
    pages = {"mamba": 1, "swa": WINDOW // page}.get(kept.component, PAGES)
    return of_buffer[-of_buffer.numel() // pages :].numpy().tobytes()[:256]


class Gate:
    """A device's event that has not happened, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        self.opened.wait(60)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.opened.set()


#: What happens to a server while it offloads.
ENDS = {
    "reset": lambda rank: rank.cleared(),
    "close": lambda rank: rank.close(),
}


@seats
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("point", ["queued", "stored", "popped"])
def test_an_offload_that_is_ended_at_any_point(serving, gate, model, seat, point, end, monkeypatch):
    """It has read its pages before anybody else may write to them, and no node of the tree stays locked."""
    rank = serving(model, seat)
    tokens = tokens_of(MODELS[model], PAGES)
    computed = []

    def ready() -> list:
        # The device has still to write the pages.
        computed.append([kept.buffer.clone() for kept in rank.pools.kept])
        rank.noise(98)
        return [gate]

    monkeypatch.setattr(rank.linker, "record_offload_ready", ready)
    want = rank.compute(tokens)

    def happens() -> None:
        for kept, buffer in zip(rank.pools.kept, computed[0]):
            kept.buffer.copy_(buffer)
        gate.opened.set()

    assert rank.tree.linker.pending_offloads
    happened = []
    if point == "queued":
        assert rank.linker.num_completed_offloads() == 0
        # What is not stored yet is not offered, and is not evicted: the offload has still to read it.
        rank.evict()
        assert rank.free() != rank.free_at_first

        def ends():
            ENDS[end](rank)
            happened.append("ended")

        thread = threading.Thread(target=ends)
        thread.start()
        happened.append("opened")
        happens()
        thread.join()
        assert happened == ["opened", "ended"]
    else:
        happens()
        rank.linker._offloads.join()
        if point == "popped":
            rank.offloaded()
        ENDS[end](rank)
    assert not rank.pinned() and not rank.tree.linker.pending_offloads
    if end == "reset":
        assert rank.free() == rank.free_at_first
        assert rank.restored(tokens) is None, "other weights may have computed it"
        rank.close()
    assert not rank.linker._offloads._thread.is_alive()
    rank = serving(model, seat)
    rank.noise(99)
    assert same(rank.restored(tokens), want), "what was offloaded was read before its places were free"
    rank.settled("at the end")


@own_seats
def test_an_offload_that_fails_is_no_hit_and_locks_nothing(serving, model, seat, monkeypatch):
    rank = serving(model, seat)
    tokens = tokens_of(MODELS[model], PAGES)
    for name in components(rank):
        with monkeypatch.context() as patch:
            patch.setattr(rank.linker._pages[name], "store", lambda keys, _rows: [OSError("full")] * len(keys))
            rank.stored(tokens)
        assert rank.restored(tokens) is None, name
        rank.settled(name)
        assert same(rank.expected(tokens), rank.stored(tokens)), name
        assert same(rank.restored(tokens), rank.expected(tokens)), name
        for pages in rank.linker._pages.values():
            pages.cache.clear()


def test_pools_of_another_dtype_share_nothing(serving):
    """Also where their pages have the same size: the bytes are other numbers."""
    kinds = [
        dict(dtype=torch.bfloat16),
        dict(dtype=torch.float16),
        dict(dtype=torch.float8_e4m3fn, kv_cache_dtype="fp8_e4m3"),
        dict(dtype=torch.float8_e5m2, kv_cache_dtype="fp8_e5m2"),
    ]
    tokens = tokens_of(sgl.MHA, 2)
    for again in (False, True):
        for kind in kinds:
            rank = serving("mha", {}, **kind)
            assert (rank.restored(tokens) is not None) == again, kind
            if not again:
                rank.stored(tokens)
            rank.close()
