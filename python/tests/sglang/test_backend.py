"""The HiCache backend under SGLang's own factory and host pools: bytes, restarts, limits, failures."""

from __future__ import annotations

import contextlib
import logging
import os

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_pages import MHA_LAYOUTS, MLA_LAYOUTS, filled, keys_for, noise, pages_of, raw, same, transfer_of  # noqa: E402

from kvhoist import (  # noqa: E402
    Cache,
    ClosedError,
    ConfigError,
    DeadlineError,
    IoError,
    RefusedError,
    StoreError,
    UnavailableError,
)

CASES = [
    *((sgl.MHA, layout) for layout in MHA_LAYOUTS),
    *((sgl.MLA, layout) for layout in MLA_LAYOUTS),
    *((sgl.MLA_ODD, layout) for layout in ("layer_first", "page_first")),
]
cases = pytest.mark.parametrize("geometry,layout", CASES, ids=[f"{g.kind}{g.page_tokens}-{name}" for g, name in CASES])


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
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, capacity="60TiB"))
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
        assert backend.batch_get_v2([transfer_of("nobody", keys, indices)]) == {"nobody": [False, False]}
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


def test_after_a_clear_with_a_service_nothing_is_found_or_stored(store_dir, monkeypatch, caplog):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    indices, keys = pool.alloc(2 * pool.page_size), keys_for(sgl.MHA, 2)
    assert all(backend.batch_set_v1(keys, indices)) and backend.batch_exists(keys) == 2
    monkeypatch.setattr("kvhoist.sglang.backend._hidden", set())
    monkeypatch.setattr(backend, "_keeper", object())
    assert backend.clear() is False
    assert "whatever SGLang answers" in caplog.text
    assert backend.batch_exists(keys) == 0
    assert not any(backend.batch_get_v1(keys, indices)) and not any(backend.batch_set_v1(keys, indices))
    monkeypatch.setattr(backend, "_keeper", None)
    backend.close()
    # Attached again in the same process, which may have other weights now, the backend would find them.
    with pytest.raises(ConfigError, match="^revision: found '', expected another one, or a restart"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    again = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, revision="2"))
    assert again.batch_exists(keys) == 0
    again.close()


def test_pages_that_a_clear_could_not_remove_are_not_found(store_dir, monkeypatch, caplog):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    monkeypatch.setattr("kvhoist.sglang.backend._hidden", set())
    indices, keys = pool.alloc(2 * pool.page_size), keys_for(sgl.MHA, 2)
    assert all(backend.batch_set_v1(keys, indices)) and backend.batch_exists(keys) == 2

    def refused(path, **_more):
        raise PermissionError(f"found {path} of another user")

    with monkeypatch.context() as patched:
        patched.setattr("kvhoist.sglang.pools.os.unlink", refused)
        assert backend.clear() is False
    assert "could not be removed" in caplog.text
    assert backend.batch_exists(keys) == 0 and not any(backend.batch_get_v1(keys, indices))
    backend.close()


@pytest.mark.parametrize("error", [None, RefusedError, IoError, DeadlineError, ClosedError], ids=str)
def test_a_clear_succeeds_where_the_file_is_gone_or_its_close_fails(store_dir, monkeypatch, caplog, error):
    pool = filled(sgl.MHA)
    backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, write_policy="write_back"))
    monkeypatch.setattr("kvhoist.sglang.backend._hidden", set())
    indices, keys = pool.alloc(2 * pool.page_size), keys_for(sgl.MHA, 2)
    assert all(backend.batch_set_v1(keys, indices))
    if error is None:
        (store,) = store_dir.rglob("kvhoist.store")
        store.unlink()
    else:
        cache, close = backend._stores["kv"].cache, Cache.close

        def failing(self):
            with contextlib.suppress(UnavailableError):
                close(self)
            if self is cache:
                raise error("some pages were not written")

        monkeypatch.setattr(Cache, "close", failing)
    assert backend.clear() is True
    assert ("some pages were not written" in caplog.text) == (error is not None)
    assert backend.batch_exists(keys) == 0
    assert all(backend.batch_set_v1(keys, indices)) and backend.batch_exists(keys) == 2
    assert backend.clear() is True and backend.batch_exists(keys) == 0
    backend.close()


def test_what_decides_the_bytes_is_in_the_identity():
    from types import SimpleNamespace

    from kvhoist.sglang.identity import Identity

    def of(extra=None, mla=False, **args):
        config = SimpleNamespace(model_name="m", tp_rank=0, tp_size=1, is_mla_model=mla, extra_config=extra)
        return Identity.of(config, SimpleNamespace(model_path="m", **args))

    flat = {"class_name": "HiCacheKvhoist"}
    assert of() == of({**flat, "interface_v1": 1}) == of(load_format="auto", weight_version="default", torchao_config="")
    others = [of(flat), of(load_format="dummy"), of(weight_version="2"), of(torchao_config="int4wo-128"), of(mla=True)]
    assert of(flat, mla=True) == of(mla=True), "one order"
    assert len({one.weights for one in [of(), *others[:-1]]}) == len(others)


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
