"""SGLang's external linker: device pools to host memory and drives and back, under SGLang's own tree."""

from __future__ import annotations

import os
import random
import resource

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_controller import device_buffers, device_noise, rows  # noqa: E402
from sgl_linker import Rank, computed, extra_config, ranks_at, tokens_of  # noqa: E402
from sgl_pages import same  # noqa: E402

from kvhoist import ConfigError, CopyError, DeadlineError  # noqa: E402

GEOMETRIES = pytest.mark.parametrize("geometry", [sgl.MHA, sgl.MLA], ids=["mha", "mla"])
PAGES = 6


@pytest.fixture
def ranks(store_dir):
    with ranks_at(store_dir) as make:
        yield make


def linker(rank) -> dict:
    return rank.linker.stats()["linker"]


@GEOMETRIES
def test_a_prompt_comes_back_layer_by_layer(ranks, geometry):
    rank = ranks(geometry)
    tokens = tokens_of(geometry, PAGES)
    want = computed(rank, tokens)
    req, result = rank.match(tokens)
    assert (result.device_prefix_len, result.host_hit_length) == (0, len(tokens))
    assert rank.admit(req, result) == len(tokens)
    indices = rank.tree.linker.private_load_indices[req.rid]
    assert rank.begin() == 0
    buffers = device_buffers(rank.device)
    for layer in range(geometry.layers):
        # What attention calls before it reads the layer.
        rank.device.get_key_buffer(layer)
        for buffer in range(layer, len(buffers), geometry.layers):
            assert same(rows(buffers[buffer : buffer + 1], indices), want[buffer : buffer + 1]), f"layer {layer}"
    assert rank.finish(req) == []
    assert linker(rank) == {
        "pages_stored": PAGES, "hits_host": PAGES, "loads": 1, "layers_waited_for": geometry.layers,
    }  # fmt: skip
    assert not rank.pinned()


@GEOMETRIES
def test_a_restart_finds_the_pages_on_disk(ranks, geometry):
    rank, tokens = ranks(geometry), tokens_of(geometry, PAGES)
    want = computed(rank, tokens)
    rank.close()
    rank = ranks(geometry)
    device_noise(rank.device, 7)
    indices, aborted = rank.restore(tokens)
    assert not aborted
    assert same(rows(device_buffers(rank.device), indices), want)
    assert linker(rank)["hits_disk"] == PAGES
    # From host memory alone nothing is offered after a restart.
    rank.close()
    rank = ranks(geometry, offer="host")
    assert rank.restore(tokens) == (None, False)


def test_hits_are_the_pages_that_are_loaded(ranks):
    """Not those that the scheduler looks up again each time it cannot admit the request."""
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    computed(rank, tokens)
    req, result = rank.match(tokens)
    for _ in range(3):
        req, result = rank.match(tokens, req.rid)
    assert "hits_host" not in linker(rank)
    rank.admit(req, result)
    rank.begin()
    assert rank.finish(req) == []
    assert linker(rank)["hits_host"] == PAGES
    # A request that is taken back before its batch begins has used none.
    req, result = rank.match(tokens)
    rank.admit(req, result)
    rank.release(req)
    assert rank.begin() == -1
    assert linker(rank)["hits_host"] == PAGES


def test_the_tail_of_a_prefix_on_the_device_is_loaded(ranks):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    half = len(tokens) // 2
    indices, _ = rank.restore(tokens[:half])
    rank.insert(tokens[:half], indices)
    req, result = rank.match(tokens)
    assert (result.device_prefix_len, result.host_hit_length) == (half, half)
    rank.admit(req, result)
    rank.begin()
    rest = rank.tree.linker.private_load_indices[req.rid]
    assert rank.finish(req) == []
    whole = torch.cat((indices, rest))
    assert same(rows(device_buffers(rank.device), whole), want)


def test_descriptors_of_a_server_with_many_connections_are_waited_for(ranks):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"found at most {hard} descriptors, expected 2048; raise ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
        want = computed(rank, tokens)
        assert not rank.linker.stats()["failed"]
        indices, aborted = rank.restore(tokens)
        assert not aborted and same(rows(device_buffers(rank.device), indices), want)
        rank.close()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_offload_whose_wait_fails_is_the_last_one_that_does(ranks, monkeypatch):
    rank = ranks()

    class Fails:
        def register(self, *_given) -> None:
            pass

        def poll(self, *_given):
            raise OSError("on purpose")

    import kvhoist.sglang.linker_pages as module

    pages = rank.linker._pages["kv"]
    real = pages._queue

    class Slow:
        """A queue whose first store has not ended when it is asked."""

        event_fd, submit_store_pages = real.event_fd, real.submit_store_pages

        def drain(self):
            return []

    with monkeypatch.context() as patch:
        patch.setattr(module.select, "poll", Fails)
        patch.setattr(pages, "_queue", Slow())
        computed(rank, tokens_of(sgl.MHA, 2, 50_000))
    assert rank.linker.stats()["failed"]["offload"] == 1
    tokens = tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    indices, aborted = rank.restore(tokens)
    assert not aborted and same(rows(device_buffers(rank.device), indices), want)
    assert rank.linker.stats()["failed"]["offload"] == 1


def test_requests_of_one_batch_load_together(ranks):
    rank = ranks()
    prompts = [tokens_of(sgl.MHA, 3, first) for first in (1000, 5000, 9000)]
    wants = [computed(rank, prompt, seed) for seed, prompt in enumerate(prompts)]
    found = [rank.match(prompt) for prompt in prompts]
    for req, result in found:
        assert rank.admit(req, result) == len(prompts[0])
    # One of them goes away before the batch begins.
    gone = found[1][0]
    rank.release(gone)
    places = [rank.tree.linker.private_load_indices.get(req.rid) for req, _ in found]
    assert places[1] is None
    rank.begin()
    assert rank.finish(*(req for req, _ in found)) == []
    for at in (0, 2):
        assert same(rows(device_buffers(rank.device), places[at]), wants[at])
    assert not rank.pinned()


def test_a_lookup_holds_pages_until_the_load_has_ended(ranks, monkeypatch):
    rank, tokens = ranks(host_bytes="1MiB", capacity="4MiB"), tokens_of(sgl.MHA, PAGES)
    computed(rank, tokens)
    req, result = rank.match(tokens)
    assert rank.held() == PAGES
    # The next lookup of the request takes the place of this one.
    req, result = rank.match(tokens, req.rid)
    assert rank.held() == PAGES
    for n in range(1, 9):
        computed(rank, tokens_of(sgl.MHA, PAGES, 50_000 * n), n)
    assert rank.admit(req, result) == len(tokens)
    assert rank.held() == PAGES
    rank.begin()
    assert rank.finish(req) == []
    assert not rank.pinned()
    # Nobody says that a request was not admitted: what it holds is let go in time.
    rank.match(tokens_of(sgl.MHA, PAGES, 50_000 * 8))
    assert rank.held() == PAGES
    import kvhoist.sglang.linker as module

    later = module.time.monotonic() + module.HELD_S + 1
    monkeypatch.setattr(module.time, "monotonic", lambda: later)
    rank.tree.check_hicache_events()
    assert not rank.pinned()


def test_held_pages_are_bounded(ranks):
    rank = ranks(host_bytes="1MiB")
    pages = rank.linker._pages["kv"]
    assert pages.held_max == 8
    for n in range(5):
        computed(rank, tokens_of(sgl.MHA, 4, 10_000 * n), n)
    for n in range(5):
        rank.match(tokens_of(sgl.MHA, 4, 10_000 * n))
    assert rank.held() == 8


class Fails:
    """A load with other results of some pages."""

    def __init__(self, real, others: dict) -> None:
        self._real, self._others = real, others

    def wait(self, at, stream) -> None:
        self._real.wait(at, stream)

    def blocks(self):
        return [self._others.get(at, result) for at, result in enumerate(self._real.blocks())]


@pytest.mark.parametrize("layer", range(sgl.MHA.layers))
def test_a_failed_layer_aborts_its_batch_and_is_a_miss_for_a_while(ranks, layer, monkeypatch):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    pages = rank.linker._pages["kv"]
    load = pages.load
    # One layer of one page is late, and the first page, if it is another, was evicted.
    others = {0: False, layer: DeadlineError(f"layer {layer}: on purpose")}
    monkeypatch.setattr(pages, "load", lambda *given: Fails(load(*given), others))
    req, result = rank.match(tokens)
    rank.admit(req, result)
    rank.begin()
    for at in range(sgl.MHA.layers):
        rank.device.get_key_buffer(at)
    assert rank.finish(req) == [req]
    assert linker(rank)["requests_aborted"] == 1
    assert rank.linker.stats()["failed"] == {"load": 1, "pages": 1 + (layer > 0)}
    assert not rank.pinned()
    monkeypatch.undo()
    # What came before the page that was late is a hit. The page stays where it is.
    rank.linker._offloads.join()
    keys = sgl.page_keys(tokens, rank.page)
    assert pages.cache.contains_each(keys) == [True] * PAGES
    for _ in range(2):
        indices, aborted = rank.restore(tokens)
        assert not aborted
        assert (0 if indices is None else len(indices)) == layer * sgl.MHA.page_tokens
        # Computed again, it is still not known to be readable.
        computed(rank, tokens, 33)
    import kvhoist.sglang.linker_pages as module

    later = module.time.monotonic() + module._UNREAD_S
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: later)
        indices, aborted = rank.restore(tokens)
    assert not aborted and len(indices) == len(tokens)
    assert same(rows(device_buffers(rank.device), indices), want)


@pytest.mark.parametrize("retired", [None, "cuda: the device has stopped: on purpose"])
def test_a_device_that_is_out_of_service_is_offered_nothing(ranks, retired, monkeypatch):
    """Its copies fail as one copy does that failed alone; only the figures say that it is retired."""
    rank, tokens, others = ranks(), tokens_of(sgl.MHA, PAGES), tokens_of(sgl.MHA, PAGES, first=50_000)
    computed(rank, tokens)
    want = computed(rank, others, 33)
    pages = rank.linker._pages["kv"]
    load, stats = pages.load, pages.cache.stats
    errors = {at: CopyError("copy by cuda: on purpose") for at in range(PAGES)}
    assert stats()["device_retired"] is None
    with monkeypatch.context() as patch:
        patch.setattr(pages, "load", lambda *given: Fails(load(*given), errors))
        patch.setattr(pages.cache, "stats", lambda: {**stats(), "device_retired": retired})
        req, result = rank.match(tokens)
        assert rank.admit(req, result) == len(tokens)
        rank.begin()
        assert rank.finish(req) == [req]
    assert rank.restore(tokens) == (None, False)
    indices, aborted = rank.restore(others)
    assert not aborted and (indices is None) == (retired is not None)
    if not retired:
        assert same(rows(device_buffers(rank.device), indices), want), "one copy has failed, and no other prefix"
    assert linker(rank)["requests_aborted"] == 1
    assert "retire" not in rank.linker.stats()["failed"]


def test_pages_that_left_between_lookup_and_load_abort_one_batch(ranks):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    computed(rank, tokens)
    req, result = rank.match(tokens)
    rank.linker._pages["kv"].cache.clear()
    assert rank.admit(req, result) == len(tokens)
    rank.begin()
    assert rank.finish(req) == [req]
    assert rank.restore(tokens) == (None, False)


def test_a_page_that_is_bad_on_disk_is_never_served(ranks, store_dir):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    rank.close()
    (path,) = store_dir.rglob("kvhoist.store")
    data = bytearray(path.read_bytes())
    page = torch.cat([one.view(-1)[: len(one.view(-1)) // PAGES] for one in want[:1]]).cpu().numpy().tobytes()
    at = data.find(page[:512])
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    rank = ranks()
    indices, aborted = rank.restore(tokens)
    assert aborted
    rank.linker._offloads.join()
    assert rank.restore(tokens) == (None, False), "the first page was the bad one"
    assert linker(rank)["requests_aborted"] == 1


def test_what_was_stored_before_a_reset_is_found_after_a_restart_alone(ranks):
    """A reset comes with other weights; a restart, with those of the start."""
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    first = computed(rank, tokens)
    for seed in (5, 9):
        rank.tree.reset()
        rank.slots.clear()
        assert rank.restore(tokens) == (None, False)
        anew = computed(rank, tokens, seed)
        indices, aborted = rank.restore(tokens)
        assert not aborted and same(rows(device_buffers(rank.device), indices), anew)
    rank.close()
    rank = ranks()
    device_noise(rank.device, 7)
    indices, aborted = rank.restore(tokens)
    assert not aborted and same(rows(device_buffers(rank.device), indices), first)


@pytest.mark.parametrize("when", ["matched", "queued", "begun"])
def test_reset_and_close_leave_nothing_behind(ranks, when):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    computed(rank, tokens)
    req, result = rank.match(tokens)
    if when != "matched":
        rank.admit(req, result)
    if when == "begun":
        rank.begin()
    rank.tree.reset()
    assert not rank.pinned()
    assert rank.linker.num_completed_offloads() == 0
    assert rank.linker.start_layer_wise_loading() == -1
    assert rank.match(tokens)[1].host_hit_length == 0, "other weights may have computed them"
    rank.slots.clear()
    computed(rank, tokens, 5)
    req, result = rank.match(tokens)
    assert result.host_hit_length == len(tokens)
    rank.admit(req, result)
    rank.begin()
    rank.close()
    assert rank.linker.lookup("late", []) == []


def test_offloads_come_behind_their_events_and_in_order(ranks, monkeypatch):
    rank = ranks()
    happened = []

    class Event:
        def __init__(self, number) -> None:
            self._number = number

        def synchronize(self) -> None:
            happened.append(self._number)

    numbers = iter(range(100))
    monkeypatch.setattr(rank.linker, "record_offload_ready", lambda: [Event(next(numbers))])
    monkeypatch.setattr(rank.linker._pages["kv"], "store", lambda keys, _rows: [len(happened) != 2 for _ in keys])
    for n in range(3):
        tokens = tokens_of(sgl.MHA, 2, 10_000 * n)
        rank.insert(tokens, rank.slots.alloc(len(tokens)))
    rank.linker._offloads.join()
    assert happened == [0, 1, 2]
    assert rank.linker.num_completed_offloads() == 3
    assert [rank.linker.pop_completed_offload() for _ in range(3)] == [True, False, True]
    assert rank.linker.num_completed_offloads() == 0
    rank.tree.linker._release_pending_offloads()


def test_pools_whose_rows_are_pages_of_heads_are_refused():
    from types import SimpleNamespace

    from kvhoist.sglang.device_pools import pools_of

    for pool in (SimpleNamespace(kv_cache_layout="hnd"), SimpleNamespace(swa_kv_pool=SimpleNamespace(kv_cache_layout="hnd"))):
        with pytest.raises(ConfigError, match="^kv_cache_layout: found 'hnd', expected 'nhd'"):
            pools_of(pool, SimpleNamespace(page_size=64), set())


@pytest.mark.parametrize("args", [{"dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}, {}])
def test_replicas_need_a_service(store_dir, args):
    from types import SimpleNamespace

    from kvhoist._store_settings import StoreSettings
    from kvhoist.sglang.refusals import refuse_replicas
    from kvhoist.sglang.linker_settings import LinkerSettings
    from kvhoist.sglang.pool_service import wants_service

    has_replicas = args == {"dp_size": 2}
    args, rank = SimpleNamespace(**args), SimpleNamespace(is_mla_model=False, tp_size=1)
    auto = StoreSettings.load({"path": str(store_dir), "capacity": "1GiB", "host_bytes": "1MiB", "service": "auto"})
    assert wants_service(auto, rank, args) == has_replicas
    own, shared = (LinkerSettings.load(extra_config(store_dir, **more)) for more in ({}, {"service": "auto"}))
    refuse_replicas(args, shared.in_service)
    if has_replicas:
        with pytest.raises(ConfigError, match="^service: found 'off', expected 'auto' or the socket of a service: the 2 rep"):
            refuse_replicas(args, own.in_service)
    else:
        refuse_replicas(args, own.in_service)


def test_a_model_whose_pages_depend_on_their_batch_is_warned_of(store_dir, caplog):
    """As under the storage backend: SGLang takes the long factors of LongRoPE for a whole batch."""
    from types import SimpleNamespace

    for rope, is_warned_of in (("longrope", True), ("default", False)):
        caplog.clear()
        config = SimpleNamespace(to_dict=lambda rope=rope: {"rope_parameters": {"rope_type": rope}})
        model = SimpleNamespace(hf_config=config, context_len=131_072)
        Rank(sgl.MHA, extra_config(store_dir), get_model_config=lambda model=model: model).close()
        assert ("long factors" in caplog.text) == is_warned_of


def test_memory_that_is_unmapped_under_offloads_is_refused():
    from types import SimpleNamespace

    from kvhoist.sglang.refusals import refuse_memory_saver

    refuse_memory_saver(SimpleNamespace(enable_memory_saver=False))
    with pytest.raises(ConfigError, match="^enable_memory_saver: found True, expected False"):
        refuse_memory_saver(SimpleNamespace(enable_memory_saver=True))


def test_wrong_settings_are_refused_by_name(store_dir):
    other = "simulated" if sgl.DEVICE == "cuda" else "auto"
    for wrong, name in (
        ({"offer": "disk"}, "offer"), ({"wait": "event"}, "wait"), ({"service": "here"}, "service"), ({"host_byte": 1}, "host_byte"),
        ({"device": other}, "device"), ({"device": other, "service": "auto"}, "device"), ({"copy_blocks_max": 0}, "copy_blocks_max"),
        ({"copy_blocks_max": 8, "service": "auto"}, "copy_blocks_max"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name) as raised:
            Rank(sgl.MHA, extra_config(store_dir, **wrong))
        assert raised.value.field == name
    with pytest.raises(ConfigError, match="^pool_shares: found 'mamba', expected the name of a pool: one of kv$"):
        Rank(sgl.MHA, extra_config(store_dir, pool_shares={"mamba": 0.2}))
    extra = extra_config(store_dir)
    del extra["host_bytes"]
    with pytest.raises(ConfigError, match="host_bytes"):
        Rank(sgl.MHA, extra)


@pytest.mark.parametrize("seed", range(8))
def test_random_sequences_restore_what_was_computed(ranks, seed):
    """Against a model that knows which pages were stored, and with which bytes."""
    dice, geometry = random.Random(seed), [sgl.MHA, sgl.MLA][seed % 2]
    rank, known = ranks(geometry), {}
    prompts = [tokens_of(geometry, 5, 10_000 * n) for n in range(3)]
    # Prompts that share a beginning.
    prompts += [prompt[: 2 * geometry.page_tokens] + tokens_of(geometry, 3, 77_000) for prompt in prompts[:1]]
    for step in range(40):
        tokens = prompts[dice.randrange(len(prompts))]
        tokens = tokens[: dice.randint(1, len(tokens) // geometry.page_tokens) * geometry.page_tokens]
        keys = sgl.page_keys(tokens, geometry.page_tokens)
        req, result = rank.match(tokens)
        unlock = rank.lock(result)
        there = result.device_prefix_len // geometry.page_tokens
        stored = 0
        while stored < len(keys) and keys[stored] in known:
            stored += 1
        if there < stored:
            assert result.host_hit_length == (stored - there) * geometry.page_tokens, f"seed {seed}, step {step}"
        way = dice.random()
        if result.host_hit_length and way < 0.7:
            rank.admit(req, result)
            if way < 0.1:
                rank.release(req, free=True)
                unlock()
                continue
            tail = rank.tree.linker.private_load_indices[req.rid]
            rank.begin()
            for layer in range(dice.randint(0, geometry.layers)):
                rank.device.get_key_buffer(layer)
            assert rank.finish(req) == []
            check_pages(rank, tail, [known[key] for key in keys[there:stored]])
            head = rank.tree.path_device_indices(result.last_device_node)[: result.device_prefix_len]
            rank.insert(tokens[: stored * geometry.page_tokens], torch.cat((head, tail)), len(head))
            rank.offloaded()
        elif not result.host_hit_length and there < len(keys):
            head = rank.tree.path_device_indices(result.last_device_node)[: result.device_prefix_len]
            tail = rank.slots.alloc((len(keys) - there) * geometry.page_tokens)
            if tail is None:
                unlock()
                rank.evict()
                continue
            for buffer in device_buffers(rank.device):
                buffer[tail] = torch.randint(-100, 100, buffer[tail].shape).to(buffer)
            known.update(zip(keys[there:], pages_at(rank, tail)))
            rank.insert(tokens, torch.cat((head, tail)), len(head))
            rank.offloaded()
        unlock()
        if dice.random() < 0.3:
            rank.evict()
        if dice.random() < 0.05:
            rank.tree.reset()
            rank.slots.clear()
            # What was computed before is not found, or was computed with the same weights by chance.
            known.clear()
        assert rank.held() <= rank.linker._pages["kv"].held_max
    assert not rank.linker.stats()["failed"]


def pages_at(rank, indices) -> list:
    """The bytes of each page at these rows."""
    buffers = device_buffers(rank.device)
    return [
        [one.clone() for one in rows(buffers, indices[at : at + rank.page])] for at in range(0, len(indices), rank.page)
    ]


def check_pages(rank, indices, want) -> None:
    got = pages_at(rank, indices)
    assert len(got) == len(want)
    for page, (one, other) in enumerate(zip(got, want)):
        assert same(one, other), f"page {page}"
