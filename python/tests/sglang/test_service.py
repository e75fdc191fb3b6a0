"""SGLang's ranks over one service: processes with the real factory and host pools, kills of both sides."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import threading
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

import sgl_rank  # noqa: E402
from nodes import LINGER_S, PATIENCE_S, Node, await_, service_pids  # noqa: E402
from sgl_controller import backup, prefetch, prefetch_or_miss  # noqa: E402
from sgl_pages import MHA_LAYOUTS, MLA_LAYOUTS, filled, keys_for, noise, pages_of, same, transfer_of  # noqa: E402

import kvhoist  # noqa: E402
from kvhoist.service import pause  # noqa: E402


def forking() -> multiprocessing.context.BaseContext:
    """What starts ranks: each is forked from one process that has imported torch and SGLang, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sgl_rank"])
    paths = [str(Path(sgl_rank.__file__).parent), str(Path(kvhoist.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        forkserver.ensure_running()
    return context


class RankProcess:
    """A rank that does what it is told."""

    def __init__(self, geometry, extra, tp_rank, dp_attention=False, tp_size=2) -> None:
        given = {"geometry": vars(geometry), "extra": extra, "tp_rank": tp_rank, "tp_size": tp_size}
        context = forking()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=sgl_rank.main, args=(theirs, {**given, "dp_attention": dp_attention}))
        self.process.start()
        theirs.close()

    def read(self, patience_s=PATIENCE_S):
        assert self.pipe.poll(patience_s), "a rank hangs"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError("a rank died") from None

    def ready(self) -> "RankProcess":
        # The first one waits for the imports.
        assert self.read(5 * PATIENCE_S) == "ready"
        return self

    def begin(self, *command) -> None:
        self.pipe.send(command)

    def ask(self, *command):
        self.begin(*command)
        while (answer := self.read()) == "next":
            pass
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@pytest.mark.parametrize("geometry", [sgl.MLA_LONG, sgl.MHA_LONG], ids=["mla", "mha"])
def test_ranks_share_what_is_the_same_and_outlive_each_other(geometry, store_dir):
    mla = geometry.kind == "mla"
    extra = sgl.extra_config(store_dir, allocator="shm", linger_s=LINGER_S, host_bytes="8MiB")
    # Tensor-parallel ranks of MLA; of MHA, replicas with data-parallel attention.
    ranks = [RankProcess(geometry, extra, rank, dp_attention=not mla) for rank in range(2)]
    try:
        for rank in ranks:
            rank.ready()
            assert rank.ask("copied") == [True, [False]], "SGLang's memfds are mapped"
        (service,) = service_pids(store_dir)
        assert ranks[1].ask("set") == [True] * 12
        assert ranks[0].ask("exists") == 0, "not the writer's, or not its heads"
        assert ranks[0].ask("set") == [True] * 12
        assert [rank.ask("exists") for rank in ranks] == [12, 12]
        assert [rank.ask("get") for rank in ranks] == [12, 12]
        assert [rank.ask("stats")["stores"] for rank in ranks] == [12, 12]
        spaces = {rank.ask("space") for rank in ranks}
        assert len(spaces) == (1 if mla else 2), "one space, or one for each rank's heads"
        # A rank dies in the middle; the other notices nothing, and the next one has its pages.
        ranks[0].begin("churn", 10_000)
        for _ in range(5):
            assert ranks[0].read() == "next"
        ranks[0].kill()
        assert ranks[1].ask("churn", 5) == [12, 12]
        ranks[0] = RankProcess(geometry, extra, 0, dp_attention=not mla).ready()
        assert ranks[0].ask("get") == 12
        # The service dies in the middle: misses, then a new one, and hits.
        ranks[1].begin("churn", 40)
        for _ in range(10):
            assert ranks[1].read() == "next"
        os.kill(service, signal.SIGKILL)
        while (answer := ranks[1].read()) == "next":
            pass
        assert 0 <= answer[0] < 12 and answer[1] == 12, f"{answer}: pages of {geometry.kind}"
        await_(lambda: ranks[1].ask("exists") == 12 and ranks[0].ask("exists") == 12, "the next service")
        assert [rank.ask("get") for rank in ranks] == [12, 12]
        assert service_pids(store_dir) not in ([], [service])
        for rank in ranks:
            assert rank.ask("close")
    finally:
        for rank in ranks:
            rank.kill()
    await_(lambda: not service_pids(store_dir), "the end of a service without ranks")


def test_eight_ranks_of_an_mla_model_read_one_copy(store_dir):
    """A tensor-parallel group of eight: one space, one copy on the drive and in memory; a rank and the service die."""
    geometry, pages = sgl.MLA_LONG, 12
    with Node(store_dir, capacity="64MiB", host_bytes="16MiB") as node:
        extra = sgl.extra_config(store_dir, "32MiB", "8MiB", allocator="shm", service=node.socket, deadline_ms=20_000)
        ranks = [RankProcess(geometry, extra, rank, tp_size=8) for rank in range(8)]
        try:
            for rank in ranks:
                rank.ready()
            assert ranks[0].ask("set") == [True] * pages
            before = ranks[0].ask("stats")
            for rank in ranks:
                rank.begin("get")
            assert [rank.read() for rank in ranks] == [pages] * 8
            after = ranks[0].ask("stats")
            page_bytes = after["straight_bytes"] // pages
            assert page_bytes * pages == after["straight_bytes"], "stored straight from the writer's pool, once"
            assert after["read_bytes"] - before["read_bytes"] == pages * page_bytes, "read once"
            assert after["tiers"]["host"]["resident"] == after["tiers"]["disk"]["resident"] == pages
            ranks[3].begin("churn", 10_000)
            assert ranks[3].read() == "next"
            ranks[3].kill()
            assert ranks[7].ask("churn", 3) == [pages, pages]
            ranks[5].begin("churn", 20)
            assert ranks[5].read() == "next"
            node.kill()
            node.start()
            while (answer := ranks[5].read()) == "next":
                pass
            assert 0 <= answer[0] <= answer[1] <= pages, f"{answer}: wrong bytes"
            alive = ranks[:3] + ranks[4:]
            await_(lambda: all(rank.ask("exists") == pages for rank in alive), "the ranks' next connections")
            assert [rank.ask("get") for rank in alive] == [pages] * 7
        finally:
            for rank in ranks:
                rank.kill()


LAYOUTS = [
    *((sgl.MHA_LONG, layout) for layout in MHA_LAYOUTS),
    *((sgl.MLA_LONG, layout) for layout in MLA_LAYOUTS),
]


def test_pages_of_every_layout_come_back_through_a_service(store_dir):
    """And a restarted service has them: other layouts are other spaces."""
    with Node(store_dir, capacity="128MiB", host_bytes="64MiB") as node:
        backends = []
        for geometry, layout in LAYOUTS:
            pool = sgl.host_pool(geometry, sgl.device_pool(geometry, 8), layout, allocator_type="shm")
            noise(pool, 1)
            backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir, "8MiB", "4MiB", service=node.socket))
            store = backend._stores["kv"]
            assert [region.copied for region in store.regions] == [False] * len(store.regions) and store.regions
            assert store.goes_straight() == (layout != "layer_first")
            # Not in the order of memory: a page's place must come from its index.
            indices = pool.alloc(6 * geometry.page_tokens).reshape(6, -1).flip(0).reshape(-1)
            assert backend.batch_set_v1(keys_for(geometry, 6), indices) == [True] * 6
            backends.append((geometry, pool, backend, indices, pages_of(pool, indices)))
        for restarted in (False, True):
            if restarted:
                node.kill()
                node.start()
            for geometry, pool, backend, indices, want in backends:
                keys = keys_for(geometry, 6)
                await_(lambda: backend.batch_exists(keys) == 6, "the client's next connection")
                noise(pool, 2)
                others = pool.alloc(4 * geometry.page_tokens)
                untouched = pages_of(pool, others)
                assert backend.batch_get_v1(keys, indices) == [True] * 6
                assert same(pages_of(pool, indices), want), f"{geometry.kind} {pool.layout}"
                assert same(pages_of(pool, others), untouched), "a get wrote past its pages"
                pool.free(others)
        for _, _, backend, _, _ in backends:
            backend.close()


def test_pools_that_cannot_be_mapped_are_copied_and_the_log_says_so(store_dir, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="kvhoist")
    with Node(store_dir, capacity="128MiB", host_bytes="32MiB") as node:
        for geometry, layout in ((sgl.MHA, "layer_first"), (sgl.MLA, "page_first_direct"), (sgl.MLA_ODD, "page_first")):
            caplog.clear()
            pool = filled(geometry, layout)
            monkeypatch.setattr("kvhoist.sglang.backend._hidden", set())
            extra = sgl.extra_config(store_dir, "16MiB", "4MiB", service=node.socket)
            backend = sgl.backend(geometry, pool, extra)
            assert '"allocator": "shm"' in caplog.text and f"service at {node.socket}" in caplog.text
            indices = pool.alloc(12 * geometry.page_tokens)
            keys, want = keys_for(geometry, 12), pages_of(pool, indices)
            assert backend.batch_set_v1(keys, indices) == [True] * 12
            noise(pool, 2)
            assert backend.batch_get_v1(keys + ["0" * 64], torch.cat([indices, indices[: pool.page_size]]))[:12] == (
                [True] * 12
            )
            assert same(pages_of(pool, indices), want)
            targets = [torch.zeros_like(page) for page in (pool.get_dummy_flat_data_page() for _ in range(3))]
            assert all(found is not None for found in backend.batch_get(keys[:3], targets))
            assert backend.clear() is False, "its pages are others' too"
            backend.close()


def test_the_service_dies_in_the_middle_of_prefetches(store_dir):
    """SGLang's own controller and its threads: every prefetch ends, with right bytes or without."""
    geometry, pages = sgl.MHA_LONG, 8
    device = sgl.device_pool(geometry, 24)
    host = sgl.host_pool(geometry, device, "page_first_direct", allocator_type="shm")
    with Node(store_dir, capacity="128MiB", host_bytes="32MiB") as node:
        extra = sgl.extra_config(store_dir, service=node.socket, deadline_ms=20_000)
        controller = sgl.controller(device, host, geometry.page_tokens, extra)
        stop = threading.Event()
        try:
            tokens = list(range(7000, 7000 + pages * geometry.page_tokens))
            noise(host, 3)
            down = host.alloc(pages * geometry.page_tokens)
            want = pages_of(host, down)
            keys = sgl.page_keys(tokens, geometry.page_tokens)
            assert backup(controller, down, keys).completed_tokens == len(tokens)
            host.free(down)
            noise(host, 4)
            killer = node.start_deaths(stop)
            ended = []
            while killer.is_alive() or not ended or ended[-1] < len(tokens):
                operation = prefetch_or_miss(controller, host, tokens)
                done = operation.completed_tokens if operation else 0
                ended.append(done)
                if done:
                    got = pages_of(host, operation.host_indices)[: done // geometry.page_tokens]
                    assert same(got, want[: len(got)]), "wrong bytes"
                if operation:
                    host.free(operation.host_indices)
                assert len(ended) < 20_000, ended[-20:]
            killer.join(PATIENCE_S)
            assert ended[-1] == len(tokens), "hits after the last start"
        finally:
            stop.set()
            controller.detach_storage_backend()


@pytest.mark.parametrize("geometry", [sgl.MHA_LONG, sgl.MLA_LONG], ids=["mha", "mla"])
def test_the_service_dies_in_the_middle_of_backups(geometry, store_dir):
    """Every backup ends; what SGLang was told is stored is there afterwards, with its bytes."""
    pages = 8
    device = sgl.device_pool(geometry, 24)
    host = sgl.host_pool(geometry, device, "page_first_direct", allocator_type="shm")
    with Node(store_dir, capacity="512MiB", host_bytes="32MiB") as node:
        extra = sgl.extra_config(store_dir, "512MiB", service=node.socket, deadline_ms=20_000)
        controller = sgl.controller(device, host, geometry.page_tokens, extra)
        stop = threading.Event()
        try:
            noise(host, 3)
            down = host.alloc(pages * geometry.page_tokens)
            want = pages_of(host, down)
            killer = node.start_deaths(stop)
            stored: list[tuple[list[int], int]] = []
            attempts, done = 0, 0
            # Chains of other tokens over the same bytes, until one is stored whole after the last death.
            while killer.is_alive() or done < pages:
                tokens = list(range(1000 * attempts, 1000 * attempts + pages * geometry.page_tokens))
                keys = sgl.page_keys(tokens, geometry.page_tokens)
                done = backup(controller, down, keys).completed_tokens // geometry.page_tokens
                attempts += 1
                if done:
                    stored.append((tokens, done))
                assert attempts < 50_000 and len(stored) < 400, "the service never comes back, or its store is full"
            killer.join(PATIENCE_S)
            assert len(stored) < attempts, "no backup was hit by a death"
            host.free(down)
            for tokens, done in stored:
                noise(host, 4)
                operation = prefetch(controller, host, tokens[: done * geometry.page_tokens])
                assert operation.completed_tokens == done * geometry.page_tokens, "a page that was stored is gone"
                assert same(pages_of(host, operation.host_indices), want[:done]), "wrong bytes"
                host.free(operation.host_indices)
        finally:
            stop.set()
            controller.detach_storage_backend()


def test_every_group_of_ranks_has_its_part_of_the_capacity(store_dir):
    """`capacity_total` is divided by the ranks whose pages differ."""
    from kvhoist._store_settings import StoreSettings
    from kvhoist.sglang.pool_service import is_writer
    from kvhoist.sglang.pools import Identity

    config = StoreSettings.load({"path": str(store_dir), "capacity_total": "8GiB"}, {})
    for geometry, groups in ((sgl.MLA, 2), (sgl.MHA, 16)):
        found = [sgl.storage_config(geometry, {}, tp_rank=rank, tp_size=8, pp_size=2, pp_rank=1) for rank in range(8)]
        shared = [Identity.of(one).shared() for one in found]
        assert config.for_ranks(shared[0].groups()).capacity == (8 << 30) // groups
        assert len(set(shared)) == (1 if geometry.kind == "mla" else 8)
        assert [is_writer(one) for one in found] == [True] + [geometry.kind == "mha"] * 7


def test_states_of_an_mla_model_are_each_rank_s_own(store_dir):
    """A hybrid's KV is the same on all ranks, which the first one stores; its Mamba states are cut by heads."""
    storage = sgl.boot().storage
    extra = sgl.extra_config(store_dir, "32MiB", "4MiB", pool_shares={"mamba": 0.5})
    with Node(store_dir, capacity="64MiB", host_bytes="32MiB") as node:
        extra["service"] = node.socket
        ranks, keys, sizes = [], keys_for(sgl.MLA, 4), {}
        for rank in range(2):
            main, side = filled(sgl.MLA, seed=1), filled(sgl.MHA, seed=2 + rank)
            config = sgl.storage_config(sgl.MLA, extra, tp_rank=rank, tp_size=2)
            backend = sgl.boot().factory.create_backend("dynamic", config, main)
            backend.register_mem_pool_host(main)
            backend.register_mem_host_pool_v2(side, storage.PoolName.MAMBA)
            if hasattr(storage.HiCacheStorage, "on_host_pools_registered"):
                backend.on_host_pools_registered()
            for name, store in backend._stores.items():
                sizes[store.namespace()] = name, store.capacity
            states = side.alloc(4 * side.page_size)
            transfers = [
                transfer_of(storage.PoolName.KV, keys, main.alloc(4 * main.page_size)),
                transfer_of(storage.PoolName.MAMBA, keys, states),
            ]
            ranks.append((backend, side, states, pages_of(side, states), transfers))
        for backend, _, _, _, transfers in ranks:
            assert backend.batch_set_v2(transfers) == {"kv": [True] * 4, "mamba": [True] * 4}
        for backend, side, states, want, transfers in ranks:
            noise(side, 9)
            assert backend.batch_get_v2(transfers) == {"kv": [True] * 4, "mamba": [True] * 4}
            assert same(pages_of(side, states), want), "another rank's states"
            assert backend.stats()["pools"]["kv"]["stores"] == 4, "by the first rank only"
            backend.close()
        assert sorted(sizes.values()) == [("kv", 16 << 20), ("mamba", 8 << 20), ("mamba", 8 << 20)]


def test_one_rank_says_what_has_happened_in_a_space_since_its_start(store_dir, caplog):
    caplog.set_level(logging.INFO, "kvhoist._figures")
    extra, keys = sgl.extra_config(store_dir, "16MiB", "4MiB", lookup_ms=2000), keys_for(sgl.MLA, 4)
    with Node(store_dir, capacity="64MiB", host_bytes="32MiB") as node:
        extra["service"] = node.socket
        pool = filled(sgl.MLA)
        indices = pool.alloc(4 * pool.page_size)

        def rank(number: int):
            backend, due = sgl.backend(sgl.MLA, pool, extra, tp_rank=number, tp_size=2), []
            backend._lines._later = lambda _seconds, call: due.append(call)
            return backend, due

        before, _ = rank(0)
        assert before.batch_set_v1(keys, indices) == before.batch_get_v1(keys, indices) == [True] * 4
        before.close()
        ranks = [rank(0), rank(1)]
        for backend, _ in ranks:
            assert backend.batch_get_v1(keys, indices) == [True] * 4
        (say,), none = [due for _, due in ranks]
        assert not none, "the figures of the first rank are those of all"
        say()
        (hits,) = re.findall(r"kv in the last 60 s: (\d+) hits in host memory, (\d+) on disk", caplog.text)
        assert sum(map(int, hits)) == 8, "what was read before is of no concern"
        for backend, _ in ranks:
            backend.close()


@pytest.mark.parametrize("where", ["own", "service"])
def test_pages_are_kept_in_host_memory_where_that_is_wanted(where, store_dir):
    geometry = sgl.MHA_LONG
    with Node(store_dir / "node", capacity="128MiB", host_bytes="64MiB", keep_in_host=True) as node:
        service = node.socket if where == "service" else "off"
        extra = sgl.extra_config(store_dir / "own", service=service, keep_in_host="16MiB")
        del extra["host_bytes"]
        pool = filled(geometry, "page_first_direct")
        backend = sgl.backend(geometry, pool, extra)
        indices = pool.alloc(12 * geometry.page_tokens)
        keys, want = keys_for(geometry, 12), pages_of(pool, indices)
        assert backend.batch_set_v1(keys, indices) == [True] * 12
        for _ in range(2):
            noise(pool, 2)
            assert backend.batch_get_v1(keys, indices) == [True] * 12
            assert same(pages_of(pool, indices), want)
        tiers = backend.stats()["pools"]["kv"]["tiers"]
        assert (tiers["host"]["hits"], tiers["disk"]["hits"]) == (24, 0), "no page was read from the drive"
        backend.close()


def test_an_engine_that_can_start_no_thread_gets_misses(store_dir, monkeypatch):
    """The service dies while threads are exhausted: SGLang's threads get misses, and the service is started later."""

    def exhausted(_thread):
        raise RuntimeError("can't start new thread")

    pool, extra = filled(sgl.MLA), sgl.extra_config(store_dir, "16MiB", "4MiB", linger_s=LINGER_S)
    backend = sgl.backend(sgl.MLA, pool, extra, tp_size=2)
    keys, indices = keys_for(sgl.MLA, 4), pool.alloc(4 * pool.page_size)
    assert backend.batch_set_v1(keys, indices) == [True] * 4 and backend.batch_exists(keys) == 4
    (pid,) = service_pids(store_dir)
    with monkeypatch.context() as none_to_be_had:
        none_to_be_had.setattr(threading.Thread, "start", exhausted)
        os.kill(pid, signal.SIGKILL)
        await_(lambda: backend.batch_exists(keys) == 0, "the end of the service")
        for _ in range(3):
            backend._keeper._next = 0.0
            assert backend.batch_exists(keys) == 0
            assert backend.batch_get_v1(keys, indices) == backend.batch_set_v1(keys, indices) == [False] * 4
        assert not backend._keeper._starting
    backend._keeper._next = 0.0
    await_(lambda: backend.batch_exists(keys) == 4, "the next service")
    assert backend.batch_get_v1(keys, indices) == [True] * 4
    backend.close()
    await_(lambda: not [one for one in service_pids(store_dir) if one != pid], "the end of the service")


def _with_pages(node, store_dir, lookup_ms):
    """A backend whose four pages the service has, their keys and indices."""
    pool = filled(sgl.MHA)
    extra = sgl.extra_config(store_dir, "16MiB", "4MiB", service=node.socket, lookup_ms=lookup_ms)
    backend = sgl.backend(sgl.MHA, pool, extra)
    keys, indices = keys_for(sgl.MHA, 4), pool.alloc(4 * pool.page_size)
    assert backend.batch_set_v1(keys, indices) == [True] * 4
    return backend, keys, indices


def test_a_service_that_hangs_costs_one_short_question_a_pause(store_dir, monkeypatch, caplog):
    with Node(store_dir, capacity="128MiB", host_bytes="32MiB") as node:
        backend, keys, indices = _with_pages(node, store_dir, lookup_ms=30)
        with node.hanging(), monkeypatch.context() as in_one_pause:
            # The clock of pauses stands still: all of these are in one.
            in_one_pause.setattr(pause, "time", SimpleNamespace(monotonic=lambda: 1000.0))
            backend._pause.end()
            assert all(backend.batch_exists(keys) == 0 for _ in range(50))
            assert backend.counters["batch_exists"] == 1, "one was asked"
            assert "has not answered for 30ms" in caplog.text, "and not the deadline of other calls"
            assert backend.batch_get_v1(keys, indices) == backend.batch_set_v1(keys, indices) == [False] * 4
        backend._pause.end()
        await_(lambda: (backend._pause.end(), backend.batch_exists(keys))[1] == 4, "an answer")
        backend.close()


def test_pages_that_are_late_begin_no_pause_while_the_service_answers(store_dir, monkeypatch):
    with Node(store_dir, capacity="128MiB", host_bytes="32MiB") as node:
        backend, keys, indices = _with_pages(node, store_dir, lookup_ms=2000)
        late = kvhoist.DeadlineError("not begun within 7s")
        for results in ([True, late, True, True], [late, late, late, late]):
            monkeypatch.setattr(backend._stores["kv"], "get", lambda *_given, results=results: results)
            assert backend.batch_get_v1(keys, indices) == [result is True for result in results]
            assert not backend._pause.is_on() and backend.batch_exists(keys) == 4
        # As the error of a whole call, which is that of each page, of a service that hangs.
        with node.hanging():
            assert backend.batch_get_v1(keys, indices) == [False] * 4
            assert backend._pause.is_on()
        backend._pause.end()
        # What is away is tried again, whichever page says it first.
        missed = []
        monkeypatch.setattr(backend._keeper, "missed", lambda: missed.append(True))
        results = [late, kvhoist.UnavailableError("gone"), late, late]
        monkeypatch.setattr(backend._stores["kv"], "get", lambda *_given: results)
        assert backend.batch_get_v1(keys, indices) == [False] * 4 and missed == [True]
        backend.close()
