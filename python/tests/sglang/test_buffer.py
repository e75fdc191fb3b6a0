"""SGLang's `--hicache-host-memory-mode buffer_only`: the host pool stages, kvhoist's memory and drives are L2 and L3."""

from __future__ import annotations

import fcntl
import json

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no buffer_only, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from nodes import Node  # noqa: E402
from sgl_buffer import BufferOnly  # noqa: E402
from sgl_controller import device_noise, rows  # noqa: E402
from sgl_pages import same  # noqa: E402

PAGES = 8


@pytest.mark.parametrize("geometry", [sgl.MHA_LONG, sgl.MLA_LONG], ids=["mha", "mla"])
def test_the_host_pool_stages_and_the_service_keeps(geometry, store_dir):
    tokens = list(range(7000, 7000 + PAGES * geometry.page_tokens))
    with Node(store_dir, capacity="128MiB", host_bytes="32MiB", keep_in_host=True) as node:
        extra = sgl.extra_config(
            store_dir, service=node.socket, keep_in_host="16MiB", allocator="shm", deadline_ms=20_000,
            prefetch_threshold=geometry.page_tokens,
        )  # fmt: skip
        del extra["host_bytes"]
        rank = BufferOnly(geometry, extra)
        assert [region.copied for region in rank.backend._stores["kv"].regions] == [False]
        buffers = device_noise(rank.device, 5)
        indices = rank.slots.alloc(len(tokens))
        want = rows(buffers, indices)
        rank.insert(tokens, indices)
        assert rank.backend.stats()["pools"]["kv"]["stores"] == PAGES

        def fetched(rank, seed):
            """Evicts the tokens from the device and fetches them; how many came, with their bytes."""
            rank.evict_all()
            buffers = device_noise(rank.device, seed)
            there = rank.fetch(tokens)
            places = rank.places(tokens)
            assert there == len(places)
            pages = [one[: there * (len(one) // len(tokens))] for one in want]
            assert same(rows(buffers, places), pages), "wrong bytes"
            return there

        assert fetched(rank, 6) == len(tokens)
        tiers = rank.backend.stats()["pools"]["kv"]["tiers"]
        assert (tiers["host"]["hits"], tiers["disk"]["hits"]) == (PAGES, 0), "from the service's memory"
        # The service dies: a miss, and no hang. The next one has the pages on its drive.
        node.kill()
        assert fetched(rank, 7) == 0
        node.start()
        for seed in range(8, 1000):
            if there := fetched(rank, seed):
                break
        assert there == len(tokens)
        assert rank.backend.stats()["pools"]["kv"]["tiers"]["disk"]["hits"] == PAGES
        rank.close()
        # A restarted engine finds them in the service's memory.
        rank = BufferOnly(geometry, extra)
        assert fetched(rank, 1000) == len(tokens)
        assert rank.backend.stats()["pools"]["kv"]["tiers"]["disk"]["hits"] == PAGES
        rank.close()


def test_a_server_whose_attach_failed_attaches_again(store_dir):
    """SGLang's tree, as the HTTP call asks it, with requests before and after."""
    geometry = sgl.MHA_LONG
    extra = sgl.extra_config(store_dir, prefetch_threshold=geometry.page_tokens)
    rank = BufferOnly(geometry, dict(extra))
    tokens = list(range(7000, 7000 + PAGES * geometry.page_tokens))
    buffers, indices = device_noise(rank.device, 5), rank.slots.alloc(len(tokens))
    want = rows(buffers, indices)
    rank.insert(tokens, indices)
    name = rank.tree.cache_controller.storage_config.model_name

    def attach(**more):
        return rank.tree.attach_storage_backend("dynamic", json.dumps({**extra, **more}), name)

    assert rank.tree.detach_storage_backend()[0]
    (store,) = store_dir.rglob("kvhoist.store")
    with open(store, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended, said = attach()
        assert not ended and "lock" in said
    assert attach() == (True, "Attached HiCache storage backend successfully.")
    # What fails later leaves SGLang half attached, and nothing of kvhoist's: a detach mends it.
    assert rank.tree.detach_storage_backend()[0]
    ended, said = attach(capacity="32MiB")
    assert not ended and "Failed to attach" in said
    with open(store, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert attach()[0] is False
    assert rank.tree.detach_storage_backend()[0] and attach()[0]
    rank.evict_all()
    device_noise(rank.device, 6)
    assert rank.fetch(tokens) == len(tokens)
    assert same(rows(rank.device.k_buffer + rank.device.v_buffer, rank.places(tokens)), want)
    rank.close()
