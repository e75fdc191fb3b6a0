"""Attaches that fail: what they leave open, and whether the next works. SGLang's own factory, groups and controller."""

from __future__ import annotations

import fcntl
import os

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_controller import backup, prefetch  # noqa: E402
from sgl_pages import filled, keys_for, noise, pages_of, same  # noqa: E402

from kvhoist import ConfigError  # noqa: E402
from kvhoist.errors import StoreError, UnavailableError  # noqa: E402

TAKES_ALL = hasattr(sgl.boot().storage.HiCacheStorage, "on_host_pools_registered")


def made(extra, **fields):
    """A backend to which no pool is registered yet."""
    return sgl.boot().factory.create_backend("dynamic", sgl.storage_config(sgl.MHA, extra, **fields), None)


def group(*pools):
    """SGLang's group of host pools, the first of which is the anchor."""
    from sglang.srt.mem_cache import memory_pool_host as module

    if not hasattr(module, "HostPoolGroup"):
        from sglang.srt.mem_cache.pool_host import group as module
    return module.HostPoolGroup(
        [module.PoolEntry(name, pool, None, lambda layer: layer, at == 0) for at, (name, pool) in enumerate(pools)]
    )


def registered(backend, pools) -> None:
    """As HybridCacheController attaches: 0.5.17 begins with the group, 0.5.23 with its anchor."""
    backend.register_mem_pool_host(pools.anchor_entry.host_pool if TAKES_ALL else pools)
    for entry in pools.entries:
        backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
    if TAKES_ALL:
        backend.on_host_pools_registered()


def test_all_pools_of_a_group_are_known_in_both_versions(store_dir):
    name = sgl.boot().storage.PoolName
    main, side = filled(sgl.MHA), filled(sgl.MLA, seed=3)
    backend = made(sgl.extra_config(store_dir))
    registered(backend, group((name.KV, main), (name.MAMBA, side)))
    disk = {part: stats["tiers"]["disk"]["slots"] for part, stats in backend.stats()["pools"].items()}
    assert set(disk) == {"kv", "mamba"} and 0.9 < disk["kv"] / disk["mamba"] < 1.1, "by the sizes of their pages"
    keys, indices = keys_for(sgl.MHA, 2), main.alloc(2 * main.page_size)
    assert all(backend.batch_set_v1(keys, indices)) and backend.batch_exists(keys) == 2
    backend.close()


def test_an_attach_that_fails_at_the_second_pool_closes_the_first(store_dir):
    name = sgl.boot().storage.PoolName
    main, side = filled(sgl.MHA), filled(sgl.MLA, seed=3)
    # A share that has no room for a page.
    failing = made(sgl.extra_config(store_dir, pool_shares={"mamba": 0.0001}))
    with pytest.raises(ConfigError, match="mamba"):
        registered(failing, group((name.KV, main), (name.MAMBA, side)))
    (store,) = store_dir.rglob("kvhoist.store")
    with open(store, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert failing.batch_exists(keys_for(sgl.MHA, 1)) == 0
    backend = made(sgl.extra_config(store_dir, pool_shares={"mamba": 0.25}, revision="2"))
    registered(backend, group((name.KV, main), (name.MAMBA, side)))
    backend.close()


def test_what_can_be_checked_is_checked_where_sglang_undoes_an_attach(store_dir):
    """That is before `on_host_pools_registered`, behind which SGLang's threads run already."""
    pool = filled(sgl.MHA)
    holder = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    for extra, error, match in (
        (sgl.extra_config(store_dir), StoreError, "lock"),
        (
            sgl.extra_config(store_dir, revision="2", capacity="60TiB", pool_shares={"kv": 0.5}),
            StoreError,
            "bytes free, expected",
        ),
        (sgl.extra_config(store_dir / "a" / "b"), StoreError, "found no folder"),
        (sgl.extra_config(store_dir, revision="2", capacity="1KiB"), ConfigError, "^capacity: found"),
        (sgl.extra_config(store_dir, service=f"{store_dir}/none.sock"), UnavailableError, "^service: found none"),
    ):
        with pytest.raises(error, match=match):
            made(extra).register_mem_pool_host(pool)
    holder.close()
    sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()


def test_the_kv_pool_needs_room_for_its_part_of_the_capacity_only(store_dir, monkeypatch):
    """Without shares the part is known when all pools are."""
    name = sgl.boot().storage.PoolName
    main, side = filled(sgl.MHA), filled(sgl.MLA, seed=3)
    # Half of the capacity, and some, is free; the store beside the KV pool's is there already.
    backend = made(sgl.extra_config(store_dir, capacity="64MiB"))
    registered(backend, group((name.KV, main), (name.MAMBA, side)))
    backend.close()
    (kv,) = (store for store in store_dir.rglob("kvhoist.store") if store.parent.name == "kv")
    room = kv.stat().st_size + (1 << 20)
    kv.unlink()
    found = os.statvfs(store_dir)

    class Room:
        f_frsize, f_blocks, f_bavail = found.f_frsize, 0, room // found.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Room)
    backend = made(sgl.extra_config(store_dir, capacity="64MiB"))
    registered(backend, group((name.KV, main), (name.MAMBA, side)))
    backend.close()
    kv.unlink()
    Room.f_bavail = (room >> 1) // found.f_frsize
    with pytest.raises(StoreError, match="bytes free, expected"):
        registered(made(sgl.extra_config(store_dir, capacity="64MiB")), group((name.KV, main), (name.MAMBA, side)))


def test_pools_without_bytes_are_refused_by_name(store_dir):
    """DeepSeek V4's anchor numbers its pages, and has none of their bytes."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    anchor = LogicalHostPool(64, 16)
    pool = anchor if TAKES_ALL else group((sgl.boot().storage.PoolName.KV, anchor))
    with pytest.raises(ConfigError, match="^model: found '.*HostPool.* for pool kv, with pages of 0 .*DeepSeek V4"):
        made(sgl.extra_config(store_dir)).register_mem_pool_host(pool)
    assert list(store_dir.iterdir()) == []


def test_a_controller_whose_attach_failed_attaches_again(store_dir):
    """SGLang's controller: the store is locked by another server at first."""
    geometry = sgl.MHA
    host = sgl.host_pool(geometry, device := sgl.device_pool(geometry, 16), "page_first_direct")
    extra = sgl.extra_config(store_dir)
    controller = sgl.controller(device, host, geometry.page_tokens, dict(extra))
    noise(host, 1)
    tokens = list(range(4 * geometry.page_tokens))
    down = host.alloc(len(tokens))
    assert backup(controller, down, sgl.page_keys(tokens, geometry.page_tokens)).completed_tokens == len(tokens)
    want = pages_of(host, down)
    controller.detach_storage_backend()
    (store,) = store_dir.rglob("kvhoist.store")

    def attach(given):
        controller.attach_storage_backend("dynamic", geometry.page_tokens, "meta/tiny", given)

    with open(store, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="lock"):
            attach(dict(extra))
    for wrong in (dict(extra, capacity="32MiB"), dict(extra, host_bytes="1KiB")):
        with pytest.raises((StoreError, ConfigError), match="capacity|size|host_bytes"):
            attach(wrong)
    attach(dict(extra))
    noise(host, 2)
    operation = prefetch(controller, host, tokens)
    assert operation.completed_tokens == len(tokens) and same(pages_of(host, operation.host_indices), want)
    controller.detach_storage_backend()
