"""The HiCache backend under SGLang's own factory and host pools: bytes, restarts, limits, failures."""

from __future__ import annotations

import logging
import os

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

from kvhoist import ConfigError, StoreError  # noqa: E402

MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
CASES = [
    *((sgl.MHA, layout) for layout in MHA_LAYOUTS),
    *((sgl.MLA, layout) for layout in MLA_LAYOUTS),
    *((sgl.MLA_ODD, layout) for layout in ("layer_first", "page_first")),
]
cases = pytest.mark.parametrize("geometry,layout", CASES, ids=[f"{g.kind}{g.page_tokens}-{name}" for g, name in CASES])


def filled(geometry, layout="page_first", pages=16, seed=1):
    """A host pool full of noise."""
    pool = sgl.host_pool(geometry, sgl.device_pool(geometry, pages), layout)
    noise(pool, seed)
    return pool


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def noise(pool, seed):
    raw(pool.kv_buffer).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def pages_of(pool, indices):
    return [raw(pool.get_data_page(int(i)).clone()) for i in indices[:: pool.page_size]]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def keys_for(geometry, pages, salt=0):
    count = pages * geometry.page_tokens
    return sgl.page_keys([salt * 1_000_003 + i for i in range(count)], geometry.page_tokens)


@cases
def test_pages_come_back_as_they_were(geometry, layout, store_dir):
    pool = filled(geometry, layout)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(12 * geometry.page_tokens)
    # Not in the order of memory: a page's place must come from its index.
    indices = indices.reshape(12, -1).flip(0).reshape(-1)
    keys, want = keys_for(geometry, 12), pages_of(pool, indices)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, indices) == [True] * 12
    assert backend.batch_exists(keys) == 12
    assert backend.batch_exists(keys[:5] + ["0" * 64] + keys[5:]) == 5
    # What a pool's unused pages hold must not be touched by a get.
    noise(pool, 2)
    others = pool.alloc(4 * geometry.page_tokens)
    untouched = pages_of(pool, others)
    assert backend.batch_get_v1(keys, indices) == [True] * 12
    assert same(pages_of(pool, indices), want)
    assert same(pages_of(pool, others), untouched), "a get wrote past its pages"
    assert backend.counters == {}
    backend.close()


@cases
def test_a_miss_ends_nothing_but_its_page(geometry, layout, store_dir):
    pool = filled(geometry, layout)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(6 * geometry.page_tokens)
    keys, want = keys_for(geometry, 6), pages_of(pool, indices)
    assert all(
        backend.batch_set_v1(
            keys[:3] + keys[4:], torch.cat([indices[: 3 * pool.page_size], indices[4 * pool.page_size :]])
        )
    )
    noise(pool, 3)
    before = pages_of(pool, indices)[3]
    assert backend.batch_get_v1(keys, indices) == [True, True, True, False, True, True]
    after = pages_of(pool, indices)
    assert torch.equal(after[3], before), "a page that missed was written to"
    assert same(after[:3] + after[4:], want[:3] + want[4:])
    backend.close()


@cases
def test_a_restart_keeps_every_page(geometry, layout, store_dir):
    pool = filled(geometry, layout)
    indices = pool.alloc(16 * geometry.page_tokens)
    keys, want = keys_for(geometry, 16), pages_of(pool, indices)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    assert all(backend.batch_set_v1(keys, indices))
    backend.close()
    noise(pool, 4)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    assert backend.batch_exists(keys) == 16
    assert all(backend.batch_get_v1(keys, indices))
    assert same(pages_of(pool, indices), want)
    routes = backend.stats()["pools"]["kv"]["routes"]
    from_disk = routes["disk_to_host"]["blocks"] + routes["disk_to_region"]["blocks"]
    assert from_disk == 16, "they came from memory"
    backend.close()


def _routes(geometry, layout, store_dir):
    """Stores and reads 12 pages; which way they went, what was announced, and the backend's figures."""
    pool = filled(geometry, layout)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    announced = backend._stores["kv"].goes_straight()
    indices = pool.alloc(12 * geometry.page_tokens)
    keys, want = keys_for(geometry, 12), pages_of(pool, indices)
    assert all(backend.batch_set_v1(keys, indices))
    noise(pool, 5)
    assert all(backend.batch_get_v1(keys, indices))
    assert same(pages_of(pool, indices), want)
    stats = backend.stats()["pools"]["kv"]
    backend.close()
    straight = [stats["routes"][name]["blocks"] for name in ("region_to_disk", "disk_to_region")]
    assert straight == ([12, 12] if announced else [0, 0])
    assert (stats["read_errors"], stats["write_errors"]) == (0, 0)
    return announced, pool, stats


@pytest.mark.parametrize(
    "geometry,layout",
    [*((sgl.MHA_LONG, name) for name in MHA_LAYOUTS[1:]), *((sgl.MLA_LONG, name) for name in MLA_LAYOUTS[1:])],
    ids=lambda value: getattr(value, "kind", value),
)
def test_pages_of_sglangs_pools_go_straight_between_drive_and_pool(geometry, layout, store_dir):
    straight, pool, _ = _routes(geometry, layout, store_dir)
    assert pool.kv_buffer.data_ptr() % 4096 == 0, "SGLang maps its pools"
    assert straight


@cases
def test_pages_go_the_way_that_was_announced(geometry, layout, store_dir):
    straight, _, _ = _routes(geometry, layout, store_dir)
    assert not straight or layout != "layer_first"


def test_a_pool_that_begins_within_a_page_goes_straight_where_the_drive_allows(store_dir, monkeypatch):
    # As SGLang allocates for devices that are not CUDA's.
    sgl.boot()
    from sglang.srt.mem_cache.pool_host import common

    monkeypatch.setitem(common.ALLOC_MEMORY_FUNCS, "cpu", common.alloc_with_pin_memory)
    straight, pool, stats = _routes(sgl.MHA_LONG, "page_first", store_dir)
    at, align = pool.kv_buffer.data_ptr() % 4096, stats["memory_align_bytes"]
    print(f"the pool begins {at} bytes into a page, the drive wants {align}")
    assert straight == (at % align == 0)


@cases
def test_tensors_of_the_copying_interface(geometry, layout, store_dir):
    pool = filled(geometry, layout)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(5 * geometry.page_tokens)
    pages = [pool.get_data_page(int(i)).clone() for i in indices[:: pool.page_size]]
    keys = keys_for(geometry, 5)
    assert backend.batch_set(keys[:4], pages[:4]) is True
    assert backend.set(keys[4], pages[4]) is True
    assert backend.exists(keys[4]) and not backend.exists("0" * 64)
    targets = [pool.get_dummy_flat_data_page() for _ in range(6)]
    found = backend.batch_get(keys + ["f" * 64], targets)
    assert found[5] is None and same([raw(page) for page in found[:5]], [raw(page) for page in pages])
    assert torch.equal(raw(backend.get(keys[2], pool.get_dummy_flat_data_page())), raw(pages[2]))
    assert backend.get("e" * 64, pool.get_dummy_flat_data_page()) is None
    # What cannot be answered is a failure, softly.
    assert backend.get(keys[0]) is None and backend.batch_get(keys, None) == [None] * 5
    assert backend.batch_set(keys, pages[:2]) is False and backend.set(keys[0]) is False
    assert backend.set("d" * 64, pages[0][:1]) is False, "a tensor of another size was taken"
    assert not backend.exists("d" * 64)
    backend.close()


def test_v0_and_v1_keep_the_same_bytes_where_a_page_is_in_one_piece(store_dir):
    pool = filled(sgl.MLA, "page_first")
    backend = sgl.backend(sgl.MLA, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(pool.page_size)
    (key,) = keys_for(sgl.MLA, 1)
    assert backend.batch_set_v1([key], indices) == [True]
    assert torch.equal(raw(backend.get(key, pool.get_dummy_flat_data_page())), pages_of(pool, indices)[0])
    backend.close()


@pytest.mark.parametrize(
    "change",
    [
        dict(model_name="other"),
        dict(tp_rank=1),
        dict(tp_size=4),
        dict(pp_rank=1),
        dict(pp_size=4),
        dict(attn_cp_rank=1),
        dict(attn_cp_size=4),
        dict(dp_rank=1),
    ],
    ids=lambda change: "-".join(change),
)
def test_nothing_is_shared_between_models_or_ranks(change, store_dir):
    if "dp_rank" in change and sgl.version() < (0, 5, 23):
        pytest.skip("sglang 0.5.17 has no dp_rank")
    pool, other = filled(sgl.MHA), filled(sgl.MHA, seed=9)
    size = dict(tp_size=2, pp_size=2, attn_cp_size=2)
    keys = keys_for(sgl.MHA, 2)
    extra = sgl.extra_config(store_dir)
    first = sgl.backend(sgl.MHA, pool, extra, **size)
    # Both open at once, as two ranks of one node are.
    second = sgl.backend(sgl.MHA, other, extra, **{**size, **change})
    assert all(first.batch_set_v1(keys, pool.alloc(2 * pool.page_size)))
    assert second.batch_exists(keys) == 0
    first.close()
    second.close()


@pytest.mark.parametrize("change", ["layout", "dtype", "page_tokens", "layers"])
def test_nothing_is_shared_between_formats(change, store_dir):
    shape = vars(sgl.MHA).copy()
    layout, dtype = "page_first", torch.bfloat16
    if change == "layout":
        layout = "page_first_direct"
    elif change == "dtype":
        dtype = torch.float16
    else:
        shape[change] //= 2
    geometry = sgl.Geometry(**shape)
    pool = filled(sgl.MHA)
    first = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    keys = keys_for(sgl.MHA, 2)
    assert all(first.batch_set_v1(keys, pool.alloc(2 * pool.page_size)))
    other = sgl.host_pool(geometry, sgl.device_pool(geometry, 4, dtype), layout)
    second = sgl.backend(geometry, other, sgl.extra_config(store_dir))
    assert second.batch_exists(keys) == 0
    first.close()
    second.close()


def test_one_store_has_one_server(store_dir):
    pool = filled(sgl.MHA)
    first = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    with pytest.raises(StoreError, match="lock"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    first.close()


def test_mla_with_tensor_parallelism_is_refused_without_a_service(store_dir):
    pool = filled(sgl.MLA)
    with pytest.raises(ConfigError, match="service.*'off'.*2 ranks.*shared by processes"):
        sgl.backend(sgl.MLA, pool, sgl.extra_config(store_dir, service="off"), tp_size=2)
    assert list(store_dir.iterdir()) == []


def test_capacity_bounds_the_disk_and_the_coldest_leaves_go(store_dir):
    geometry = sgl.MHA
    pool = filled(geometry, pages=64)
    page = pool.size_per_token * pool.page_size
    capacity = 20 * page + (1 << 20)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir, capacity=capacity, host_bytes=8 * page))
    slots = backend.stats()["pools"]["kv"]["tiers"]["disk"]["slots"]
    assert slots == 20
    indices = pool.alloc(16 * pool.page_size)
    want = pages_of(pool, indices)
    chains = [keys_for(geometry, 16, salt) for salt in range(4)]
    for chain in chains:
        assert backend.batch_set_v1(chain, indices) == [True] * 16
    files = [os.path.join(root, name) for root, _, names in os.walk(store_dir) for name in names]
    assert 0 < sum(os.path.getsize(name) for name in files) <= capacity
    # The last chain is whole; what is left of the others are leading runs, for leaves go first.
    assert backend.batch_exists(chains[3]) == 16
    present = [[backend.exists(key) for key in chain] for chain in chains[:3]]
    for there in present:
        assert there == sorted(there, reverse=True), f"a page without its prefix is left: {there}"
    assert sum(map(sum, present)) + 16 <= slots
    noise(pool, 5)
    assert all(backend.batch_get_v1(chains[3], indices))
    assert same(pages_of(pool, indices), want)
    backend.close()


def test_a_full_file_system_is_refused_before_anything_is_made(store_dir):
    pool = filled(sgl.MHA)
    with pytest.raises(StoreError, match="bytes free, expected"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, capacity="900TiB"))
    assert [name for _, _, names in os.walk(store_dir) for name in names] == []


@pytest.mark.parametrize(
    "field,value",
    [
        ("capacity", "lots"), ("capacity", 0), ("capacity", "1KiB"), ("host_bytes", "1KiB"), ("path", "relative"),
        ("path", []), ("write_policy", "sometimes"), ("direct_io", "maybe"), ("paht", "/x"), ("deadline_ms", 0),
        ("pool_shares", {"mamba": 2}),
    ],
)  # fmt: skip
def test_a_wrong_setting_fails_the_attach_with_its_name(field, value, store_dir):
    pool = filled(sgl.MHA)
    with pytest.raises(ConfigError, match=f"^{field}: found") as raised:
        sgl.backend(sgl.MHA, pool, {**sgl.extra_config(store_dir), field: value})
    assert raised.value.field == field


def test_nothing_raises_into_sglang(store_dir, caplog):
    geometry = sgl.MHA
    pool = filled(geometry)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(2 * pool.page_size)
    keys = keys_for(geometry, 2)
    with caplog.at_level(logging.WARNING):
        assert backend.batch_set_v1(keys, indices[:-1]) == [False, False]
        assert backend.batch_get_v1(keys, None) == [False, False]
        assert backend.batch_exists([None]) == 0
        assert backend.batch_get_v2([_transfer("nobody", keys, indices)]) == {"nobody": [False, False]}
        assert backend.batch_set_v1([], indices[:0]) == [] == backend.batch_get_v1([], indices[:0])
        pool.get_page_buffer_meta = lambda _: ([1, 2, 3, 4], [8, 8, 8, 8])
        assert backend.batch_set_v1(keys, indices) == [False, False]
        pool.get_page_buffer_meta = lambda _: ([4096] * 4, [backend._stores["kv"].geometry.page_bytes // 2] * 4)
        assert backend.batch_get_v1(keys, indices) == [False, False], "addresses in no pool were taken"
    assert backend.counters["batch_set_v1"] == 2 and backend.counters["batch_get_v1"] == 2
    assert backend.counters["pages"] >= 8
    assert sum("failed" in record.message for record in caplog.records) >= 5
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, indices) == [False, False]
    backend.close()


def test_a_page_that_failed_is_false_and_counted(store_dir, caplog):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    keys, indices = keys_for(sgl.MHA, 3), pool.alloc(3 * pool.page_size)
    failed = [True, TimeoutError("too slow"), False]
    backend._stores["kv"].get = lambda *_: list(failed)
    backend._stores["kv"].set = lambda *_: list(failed)
    assert backend.batch_get_v1(keys, indices) == backend.batch_set_v1(keys, indices) == [True, False, False]
    assert backend.counters == {"batch_get_v1": 1, "batch_set_v1": 1, "pages": 2}
    assert caplog.text.count("1 of 3 pages of pool kv: too slow") == 2
    backend.close()


def test_a_damaged_page_is_a_miss_and_not_wrong_bytes(store_dir):
    geometry = sgl.MHA
    pool = filled(geometry)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(4 * pool.page_size)
    keys, want = keys_for(geometry, 4), pages_of(pool, indices)
    assert all(backend.batch_set_v1(keys, indices))
    backend.close()
    (store,) = store_dir.rglob("kvhoist.store")
    data = bytearray(store.read_bytes())
    at = data.find(bytes(want[2][:64].tolist()))
    assert at > 0
    data[at + 7] ^= 1
    store.write_bytes(data)
    noise(pool, 6)
    backend = sgl.backend(geometry, pool, sgl.extra_config(store_dir))
    assert backend.batch_exists(keys) == 4, "nothing is read before it is asked for"
    assert backend.batch_get_v1(keys, indices) == [True, True, False, True]
    got = pages_of(pool, indices)
    assert same(got[:2] + got[3:], want[:2] + want[3:])
    assert backend.batch_exists(keys) == 2
    assert backend.stats()["pools"]["kv"]["checksum_failures"] == 1
    backend.close()


def test_clear_forgets_everything_also_on_disk(store_dir):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(3 * pool.page_size)
    keys = keys_for(sgl.MHA, 3)
    assert all(backend.batch_set_v1(keys, indices))
    assert backend.clear() is True
    assert backend.batch_exists(keys) == 0
    assert all(backend.batch_set_v1(keys[:1], indices[: pool.page_size]))
    backend.close()
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    assert backend.batch_exists(keys) == 1
    backend.close()


def test_stats_fill_sglangs_own_metrics_once(store_dir):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    indices = pool.alloc(3 * pool.page_size)
    keys = keys_for(sgl.MHA, 3)
    backend.batch_set_v1(keys, indices)
    backend.batch_get_v1(keys[:2], indices[: 2 * pool.page_size])
    metrics = backend.get_stats()
    assert type(metrics).__name__ == "StorageMetrics"
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3], [2])
    assert metrics.backup_bandwidth[0] > 0 and metrics.prefetch_bandwidth[0] > 0
    again = backend.get_stats()
    assert (again.backup_pgs, again.prefetch_pgs, again.backup_bandwidth) == ([], [], [])
    backend.close()


def test_settings_come_from_the_environment_too(store_dir, monkeypatch):
    monkeypatch.setenv("KVHOIST_PATH", f"{store_dir}/a{os.pathsep}{store_dir}/b")
    monkeypatch.setenv("KVHOIST_CAPACITY", "8MiB")
    monkeypatch.setenv("KVHOIST_HOST_BYTES", "4MiB")
    extra = {k: v for k, v in sgl.extra_config(store_dir).items() if k not in ("path", "capacity")}
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, extra)
    assert [len(list((store_dir / name).rglob("kvhoist.store"))) for name in "ab"] == [1, 1]
    assert backend.config.host_bytes == 8 << 20, "extra_config goes before the environment"
    keys, indices = keys_for(sgl.MHA, 8), pool.alloc(8 * pool.page_size)
    assert all(backend.batch_set_v1(keys, indices)) and all(backend.batch_get_v1(keys, indices))
    backend.close()


# v2: pools beside the KV pool


def _transfer(name, keys, indices, policy=None, **more):
    storage = sgl.boot().storage
    policy = policy or storage.PoolHitPolicy.ALL_PAGES
    return storage.PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=policy, **more)


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
        [_transfer(storage.PoolName.KV, keys, here), _transfer(storage.PoolName.MAMBA, keys, there)]
    )
    assert done == {storage.PoolName.KV: [True] * 4, storage.PoolName.MAMBA: [True] * 4}
    noise(main, 7)
    noise(side, 8)
    done = backend.batch_get_v2(
        [_transfer(storage.PoolName.KV, keys, here), _transfer(storage.PoolName.MAMBA, keys, there)]
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
    backend.batch_set_v2([_transfer("kv", keys[:5], here[: 5 * main.page_size])])
    # The side pool lacks pages 1 and 4.
    for page in (0, 2, 3):
        at = slice(page * side.page_size, (page + 1) * side.page_size)
        assert backend.batch_set_v2([_transfer("mamba", [keys[page]], there[at])]) == {"mamba": [True]}

    def ask(hit_policy, window):
        return backend.batch_exists_v2(keys, [_transfer(storage.PoolName.MAMBA, keys[:window], None, hit_policy)])

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
    nothing = backend.batch_exists_v2(["0" * 64], [_transfer("mamba", keys, None)])
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
                transfer = _transfer(storage.PoolName(name), [key], indices[at])
                assert backend.batch_set_v2([transfer]) == reference.batch_set_v2([transfer])
    for hit_policy in (storage.PoolHitPolicy.ALL_PAGES, storage.PoolHitPolicy.TRAILING_PAGES):
        for window in (1, 2, 3, 8):
            ask = [_transfer(storage.PoolName.MAMBA, keys[:window], None, hit_policy)]
            ours, theirs = backend.batch_exists_v2(keys, ask), reference.batch_exists_v2(keys, ask)
            assert (ours.kv_hit_pages, ours.restorable_prefix_pages) == (
                theirs.kv_hit_pages,
                theirs.restorable_prefix_pages,
            )
            assert ours.extra_pool_hit_pages == theirs.extra_pool_hit_pages
    backend.close()


def test_a_pool_that_comes_unannounced_needs_a_share(store_dir):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    with pytest.raises(ConfigError, match="pool_shares.*draft"):
        backend.register_mem_host_pool_v2(filled(sgl.MLA), "draft")
    backend.close()


def _serve_with(monkeypatch, **server_args):
    """As in a server that was started with these arguments."""
    from types import SimpleNamespace

    sgl.boot()
    import sglang.srt.runtime_context as context

    monkeypatch.setattr(context, "get_server_args", lambda: SimpleNamespace(**server_args), raising=False)


def test_servers_with_other_weights_share_nothing(store_dir, monkeypatch):
    pool = filled(sgl.MHA)
    servers = [
        (dict(model_path="meta/tiny"), {}),
        (dict(model_path="/models/other"), {}),
        (dict(model_path="meta/tiny", revision="abc"), {}),
        (dict(model_path="meta/tiny", quantization="fp8"), {}),
        (dict(model_path="meta/tiny"), dict(revision="2026-11-22")),
    ]
    keys, indices = keys_for(sgl.MHA, 2), pool.alloc(2 * pool.page_size)
    for round_, found in enumerate((0, 2)):
        for server, settings in servers:
            _serve_with(monkeypatch, **server)
            backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, **settings))
            assert backend.batch_exists(keys) == found, (round_, server, settings)
            assert all(backend.batch_set_v1(keys, indices))
            backend.close()


def test_adapters_whose_pages_have_the_same_keys_are_refused(store_dir, monkeypatch):
    pool = filled(sgl.MHA)
    _serve_with(monkeypatch, model_path="meta/tiny", enable_lora=True)
    from sglang.srt.mem_cache import utils

    if hasattr(utils, "storage_namespace_seed"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()
        monkeypatch.delattr(utils, "storage_namespace_seed")
    with pytest.raises(ConfigError, match="^enable_lora: found True"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
