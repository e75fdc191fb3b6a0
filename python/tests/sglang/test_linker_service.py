"""SGLang's external linker as a client of the node's service, on a simulated device: ranks and replicas share pages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import sgl

import kvhoist

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from nodes import Node, await_  # noqa: E402
from sgl_controller import device_buffers, device_noise, rows  # noqa: E402
from sgl_linker import Rank, broadcast, computed, extra_config, tokens_of  # noqa: E402
from sgl_pages import same  # noqa: E402

GEOMETRIES = pytest.mark.parametrize("geometry", [sgl.MHA, sgl.MLA], ids=["mha", "mla"])
PAGES = 6


@pytest.fixture
def node(store_dir):
    with Node(store_dir, capacity="256MiB", host_bytes="32MiB") as node:
        yield node


@pytest.fixture
def ranks(node, store_dir, monkeypatch):
    """Makes ranks that are closed at the end, whatever happens; `tp` is the rank and the number of ranks."""
    made = []

    def make(geometry=sgl.MHA, tp=(0, 1), **settings):
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(torch.distributed, "get_rank", lambda group=None: tp[0])
            patch.setattr(torch.distributed, "get_world_size", lambda group=None: tp[1])
            patch.setattr(torch.distributed, "broadcast_object_list", broadcast)
            made.append(Rank(geometry, extra_config(store_dir, service=node.socket, **settings)))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def check_restored(rank, tokens, want) -> None:
    """Loads a prompt, and compares every layer when it is complete."""
    req, result = rank.match(tokens)
    assert rank.admit(req, result) == len(tokens)
    indices = rank.tree.linker.private_load_indices[req.rid]
    rank.begin()
    buffers, layers = device_buffers(rank.device), rank.geometry.layers
    for layer in range(layers):
        rank.device.get_key_buffer(layer)
        for buffer in range(layer, len(buffers), layers):
            assert same(rows(buffers[buffer : buffer + 1], indices), want[buffer : buffer + 1]), f"layer {layer}"
    assert rank.finish(req) == []
    assert not rank.pinned()


@GEOMETRIES
def test_replicas_share_pages_in_host_memory_and_on_disk(ranks, node, geometry):
    one, other = ranks(geometry), ranks(geometry)
    tokens = tokens_of(geometry, PAGES)
    want = computed(one, tokens)
    device_noise(other.device, 7)
    check_restored(other, tokens, want)
    assert other.linker.stats()["linker"]["hits_host"] == PAGES
    one.close()
    other.close()
    assert node.end() == 0
    node.start()
    again = ranks(geometry)
    device_noise(again.device, 8)
    check_restored(again, tokens, want)
    assert again.linker.stats()["linker"]["hits_disk"] == PAGES


def test_ranks_of_an_mla_model_load_what_the_first_one_stores(ranks, monkeypatch):
    first, second = ranks(sgl.MLA, (0, 2)), ranks(sgl.MLA, (1, 2))
    tokens = tokens_of(sgl.MLA, PAGES)
    stores = []
    pages = second.linker._pages["kv"]
    monkeypatch.setattr(pages, "store", lambda keys, _rows: stores.append(keys) or [True] * len(keys))
    # Both have computed it, and both say that it is stored.
    device_noise(second.device, 1)
    second.insert(tokens, second.slots.alloc(len(tokens)))
    second.offloaded()
    assert stores == [], "the second rank stores nothing"
    assert second.linker.lookup("before", transfers(second, tokens)) == []
    want = computed(first, tokens)
    second.evict()
    device_noise(second.device, 9)
    check_restored(second, tokens, want)
    check_restored(first, tokens, want)
    assert first.linker._pages["kv"].cache.namespace == second.linker._pages["kv"].cache.namespace


def test_ranks_of_an_mla_model_share_pages_after_a_reset_too(ranks):
    first, second = ranks(sgl.MLA, (0, 2)), ranks(sgl.MLA, (1, 2))
    tokens = tokens_of(sgl.MLA, PAGES)
    computed(first, tokens)
    for rank in (first, second):
        rank.tree.reset()
        rank.slots.clear()
        assert rank.restore(tokens) == (None, False), "other weights have computed them"
    want = computed(first, tokens, 5)
    check_restored(second, tokens, want)


def transfers(rank, tokens) -> list:
    keys = sgl.page_keys(tokens, rank.page)
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return [PoolTransfer(name=PoolName.KV, keys=keys)]


def test_ranks_with_pages_of_their_own_share_none(ranks):
    first, second = ranks(sgl.MHA, (0, 2)), ranks(sgl.MHA, (1, 2))
    tokens = tokens_of(sgl.MHA, PAGES)
    computed(first, tokens)
    assert second.restore(tokens) == (None, False)
    want = computed(second, tokens, 5)
    check_restored(second, tokens, want)


def test_a_service_that_dies_in_a_load_aborts_its_batch_and_is_a_miss(ranks, node):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    req, result = rank.match(tokens)
    assert rank.admit(req, result) == len(tokens)
    with node.hanging():
        rank.begin()
        node.process.kill()
    # The forward goes through all layers, which say nothing.
    for layer in range(sgl.MHA.layers):
        rank.device.get_key_buffer(layer)
    assert rank.finish(req) == [req]
    assert rank.linker.stats()["linker"]["requests_aborted"] == 1
    assert not rank.pinned()
    assert rank.restore(tokens) == (None, False), "nobody answers"
    # An offload meanwhile fails, and says so.
    more = tokens_of(sgl.MHA, 2, 90_000)
    rank.insert(more, rank.slots.alloc(len(more)))
    rank.linker._offloads.join()
    assert rank.linker.pop_completed_offload() is False
    rank.tree.linker._release_pending_offloads()
    assert node.process.wait() == -signal.SIGKILL
    node.process.stdout.close()
    node.start()
    space = rank.linker._pages["kv"].cache
    await_(lambda: space.connected, "the client to connect again")
    space._pause.end()
    # The pages were right all the time: nobody has removed them, and they are there again.
    assert set(rank.linker.stats()["failed"]) == {"load", "offload", "pages"}
    check_restored(rank, tokens, want)


def test_no_page_is_offered_until_the_service_has_the_memory_again(ranks, node, store_dir, monkeypatch):
    rank, tokens = ranks(), tokens_of(sgl.MHA, PAGES)
    want = computed(rank, tokens)
    space, keys = rank.linker._pages["kv"].cache, sgl.page_keys(tokens, rank.page)
    with Node(store_dir / "other") as other:
        away = kvhoist.connect(other.socket, space="tests", block_bytes=4096)
    await_(lambda: not away.connected, "the end of the other service")
    with monkeypatch.context() as patch:
        # The connection of moves is not up yet, and that of questions is.
        patch.setattr(space, "_client", away)
        assert rank.restore(tokens) == (None, False)
        assert (space.tiers(keys), space.contains_each(keys)) == ([], [False] * PAGES)
        assert len(space.hold(keys, PAGES)) == 0
        assert "requests_aborted" not in rank.linker.stats()["linker"]
    away.close()
    check_restored(rank, tokens, want)
    # Neither is up: the service is started again by who asks.
    missed = []
    monkeypatch.setattr(space._keeper, "missed", lambda: missed.append(True))
    node.kill()
    await_(lambda: not space.connected, "the end of the service")
    assert space.tiers(keys) == [] and missed


def test_memory_that_a_service_refuses_when_it_is_back_aborts_one_batch_a_pause(ranks, node, monkeypatch):
    import kvhoist.sglang.linker_pages as module

    rank, prompts = ranks(), [tokens_of(sgl.MHA, PAGES, first) for first in (1000, 5000)]
    space, now = rank.linker._pages["kv"].cache, [module.time.monotonic()]
    wants = [computed(rank, tokens, seed) for seed, tokens in enumerate(prompts)]

    def restart(*flags) -> None:
        node.kill()
        await_(lambda: not space.connected, "the end of the service")
        node.start(*flags)
        await_(lambda: space.connected, "the client to connect again")
        space._pause.end()

    def aborted() -> int:
        """How many batches abort of two that come one after the other."""
        for tokens in prompts:
            rank.restore(tokens)
        assert not rank.pinned()
        return rank.linker.stats()["linker"]["requests_aborted"]

    restart("--region-bytes", "64KiB")
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: now[0])
        for count, pause in ((1, 60), (2, 120)):
            assert aborted() == count
            now[0] += pause - 1
            assert aborted() == count
            now[0] += 1
        restart()
        for tokens, want in zip(prompts, wants):
            check_restored(rank, tokens, want)
    assert rank.linker._pages["kv"]._refused == module._READ


class Failed:
    """A load of which every copy has failed."""

    def __init__(self, real) -> None:
        self._real, self.wait = real, real.wait

    def blocks(self) -> list:
        return [kvhoist.IoError("copy by cuda: on purpose") for _ in self._real.blocks()]


def test_a_device_that_is_out_of_service_in_a_service_aborts_one_batch_a_pause(ranks, monkeypatch):
    import kvhoist.sglang.linker_pages as module

    rank, prompts = ranks(), [tokens_of(sgl.MHA, PAGES, first) for first in (1000, 5000)]
    wants = [computed(rank, tokens, seed) for seed, tokens in enumerate(prompts)]
    pages, now = rank.linker._pages["kv"], [module.time.monotonic()]
    load, stats = pages.load, pages.cache.stats
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(pages, "load", lambda *given: Failed(load(*given)))
        patch.setattr(pages.cache, "stats", lambda: {**stats(), "device_retired": "on purpose"})
        assert [rank.restore(tokens)[1] for tokens in prompts] == [True, False]
    # The service has been restarted.
    now[0] += 60
    for tokens, want in zip(prompts, wants):
        check_restored(rank, tokens, want)
    assert not rank.linker.stats()["failed"].get("retire")


CLIENT = """
import sys
import kvhoist, numpy
socket, pages = sys.argv[1], int(sys.argv[2])
client = kvhoist.connect(socket, space="deaths", block_bytes=1 << 20, device="simulated")
pool = kvhoist.SharedMemory(pages << 20)
at = numpy.frombuffer(pool.view, numpy.uint8)
start = at.ctypes.data
client.register_device(start, pages << 20)
keys = [f"{n:064x}" for n in range(pages)]
half = 1 << 19
addresses = numpy.array([[start + (n << 20), start + (n << 20) + half] for n in range(pages)])
for n in range(pages):
    at[n << 20 : (n + 1) << 20] = n + 1
assert all(one is True for one in client.store_pages(keys, addresses.ravel().tolist(), [half, half] * pages))
print("stored", flush=True)
while True:
    at[:] = 0
    load = client.load_layers(keys, addresses, numpy.array([half, half]), [0, 1])
    load.wait(0)
    assert all((at[n << 20 : (n << 20) + half] == n + 1).all() for n in range(pages))
    assert load.blocks() == [True] * pages
    print("loaded", flush=True)
"""


def test_clients_that_die_in_mid_copy_cost_nobody_else_anything(node):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for death in range(5):
        command = [sys.executable, "-c", CLIENT, node.socket, "8"]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
        for client in clients:
            assert client.stdout.readline() == "stored\n"
        for _ in range(death + 1):
            assert clients[0].stdout.readline() == "loaded\n"
        clients[0].kill()
        # The other one loads right bytes before, meanwhile, and afterwards.
        for _ in range(3):
            assert clients[1].stdout.readline() == "loaded\n"
        for client in clients:
            client.kill()
            client.wait()
            client.stdout.close()
