"""Several host pools of one model under the HiCache backend: stores, shares, hit policies."""

from __future__ import annotations

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

pytest.importorskip("torch")

from sgl_pages import filled, keys_for, noise, pages_of, same, transfer_of  # noqa: E402

from kvhoist import ConfigError  # noqa: E402


def two_pools(store_dir, **more):
    storage = sgl.boot().storage
    main, side = filled(sgl.MHA), filled(sgl.MLA, seed=3)
    config = sgl.storage_config(sgl.MHA, sgl.extra_config(store_dir, pool_shares={"mamba": 0.25}, **more))
    backend = sgl.boot().factory.create_backend("dynamic", config, main)
    backend.register_mem_pool_host(main)
    backend.register_mem_host_pool_v2(main, storage.PoolName.KV)
    backend.register_mem_host_pool_v2(side, storage.PoolName.MAMBA)
    if hasattr(storage.HiCacheStorage, "on_host_pools_registered"):
        backend.on_host_pools_registered()
    return backend, main, side


def test_pools_have_stores_of_their_own_and_share_the_capacity(store_dir):
    backend, main, side = two_pools(store_dir)
    storage = sgl.boot().storage
    keys = keys_for(sgl.MHA, 4)
    here, there = main.alloc(4 * main.page_size), side.alloc(4 * side.page_size)
    want = pages_of(main, here), pages_of(side, there)
    done = backend.batch_set_v2(
        [transfer_of(storage.PoolName.KV, keys, here), transfer_of(storage.PoolName.MAMBA, keys, there)]
    )
    assert done == {storage.PoolName.KV: [True] * 4, storage.PoolName.MAMBA: [True] * 4}
    noise(main, 7)
    noise(side, 8)
    done = backend.batch_get_v2(
        [transfer_of(storage.PoolName.KV, keys, here), transfer_of(storage.PoolName.MAMBA, keys, there)]
    )
    assert done == {"kv": [True] * 4, "mamba": [True] * 4}
    assert same(pages_of(main, here), want[0]) and same(pages_of(side, there), want[1])
    sizes = {path.parent.name: path.stat().st_size for path in store_dir.rglob("kvhoist.store")}
    assert set(sizes) == {"kv", "mamba"} and sum(sizes.values()) <= 64 << 20
    assert sizes["mamba"] <= 16 << 20 and sizes["kv"] > 3 * sizes["mamba"] * 0.9
    backend.close()


def test_hit_policies(store_dir):
    backend, main, side = two_pools(store_dir)
    storage = sgl.boot().storage
    policy = storage.PoolHitPolicy
    keys = keys_for(sgl.MHA, 6)
    here, there = main.alloc(6 * main.page_size), side.alloc(6 * side.page_size)
    backend.batch_set_v2([transfer_of("kv", keys[:5], here[: 5 * main.page_size])])
    # The side pool lacks pages 1 and 4.
    for page in (0, 2, 3):
        at = slice(page * side.page_size, (page + 1) * side.page_size)
        assert backend.batch_set_v2([transfer_of("mamba", [keys[page]], there[at])]) == {"mamba": [True]}

    def ask(hit_policy, window):
        return backend.batch_exists_v2(keys, [transfer_of(storage.PoolName.MAMBA, keys[:window], None, hit_policy)])

    everything = ask(policy.ALL_PAGES, 6)
    assert (everything.kv_hit_pages, everything.extra_pool_hit_pages) == (1, {"kv": 5, "mamba": 1})
    last_one = ask(policy.TRAILING_PAGES, 1)
    assert (last_one.kv_hit_pages, last_one.extra_pool_hit_pages["mamba"]) == (4, 4)
    last_two = ask(policy.TRAILING_PAGES, 2)
    assert last_two.kv_hit_pages == 4
    last_three = ask(policy.TRAILING_PAGES, 3)
    assert last_three.kv_hit_pages == 1, "the window is the whole of a shorter prefix"
    if hasattr(last_one, "restorable_prefix_pages"):
        assert last_one.restorable_prefix_pages == [1, 3, 4] and last_two.restorable_prefix_pages == [1, 4]
    alone = backend.batch_exists_v2(keys)
    assert (alone.kv_hit_pages, alone.extra_pool_hit_pages) == (5, {"kv": 5})
    nothing = backend.batch_exists_v2(["0" * 64], [transfer_of("mamba", keys, None)])
    assert (nothing.kv_hit_pages, nothing.extra_pool_hit_pages) == (0, {})
    backend.close()


def test_sglangs_own_file_backend_agrees_on_hit_policies(store_dir, seed):
    """The same pages in both, the same answers: SGLang's reference for what v2 means."""
    if sgl.version() < (0, 5, 23):
        pytest.skip("the file backend of 0.5.17 answers in another form")
    import random

    rng = random.Random(seed)
    storage = sgl.boot().storage
    backend, main, side = two_pools(store_dir)
    reference = storage.HiCacheFile(sgl.storage_config(sgl.MHA, {}), str(store_dir / "file"))
    reference.registered_pools = {storage.PoolName.KV: main, storage.PoolName.MAMBA: side}
    keys = keys_for(sgl.MHA, 8)
    here, there = main.alloc(8 * main.page_size), side.alloc(8 * side.page_size)
    for name, pool, indices, chance in (("kv", main, here, 0.9), ("mamba", side, there, 0.6)):
        for page, key in enumerate(keys):
            if rng.random() < chance:
                at = slice(page * pool.page_size, (page + 1) * pool.page_size)
                transfer = transfer_of(storage.PoolName(name), [key], indices[at])
                assert backend.batch_set_v2([transfer]) == reference.batch_set_v2([transfer])
    for hit_policy in (storage.PoolHitPolicy.ALL_PAGES, storage.PoolHitPolicy.TRAILING_PAGES):
        for window in (1, 2, 3, 8):
            ask = [transfer_of(storage.PoolName.MAMBA, keys[:window], None, hit_policy)]
            ours, theirs = backend.batch_exists_v2(keys, ask), reference.batch_exists_v2(keys, ask)
            assert (ours.kv_hit_pages, ours.restorable_prefix_pages) == (
                theirs.kv_hit_pages,
                theirs.restorable_prefix_pages,
            )
            assert ours.extra_pool_hit_pages == theirs.extra_pool_hit_pages
    backend.close()


def test_a_share_for_a_pool_that_does_not_exist_is_refused(store_dir):
    pool = filled(sgl.MHA)
    for name, likely in (("mambo", "did you mean mamba"), ("index", "did you mean indexer")):
        extra = sgl.extra_config(store_dir, pool_shares={"kv": 0.5, name: 0.2})
        with pytest.raises(ConfigError, match=f"^pool_shares: found '{name}'.*{likely}"):
            sgl.backend(sgl.MHA, pool, extra)
    # A pool of SGLang's may be registered later.
    sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, pool_shares={"swa": 0.2})).close()


def test_a_pool_that_comes_unannounced_needs_a_share(store_dir):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    with pytest.raises(ConfigError, match="pool_shares.*draft"):
        backend.register_mem_host_pool_v2(filled(sgl.MLA), "draft")
    backend.close()


def test_pages_that_lie_otherwise_on_the_device_are_another_store(store_dir):
    from types import SimpleNamespace

    from kvhoist.sglang.pools import Geometry

    pool = filled(sgl.MHA)
    usual = Geometry.of(pool, pool.page_size)
    described = hasattr(pool, "_buffer_infos")
    assert described == (sgl.version() >= (0, 5, 23))
    for layout, same in [("nhd", True), ("hnd", False), ("vectorized_5d", False)]:
        if described:
            buffers = SimpleNamespace(layout=SimpleNamespace(value=layout))
            pool._buffer_infos = (SimpleNamespace(buffers=buffers),)
        else:
            pool.device_pool = SimpleNamespace(kv_cache_layout=layout)
        assert (Geometry.of(pool, pool.page_size) == usual) == same
