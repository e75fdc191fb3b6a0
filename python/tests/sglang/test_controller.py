"""SGLang's real HiCacheController and its threads over kvhoist: down to disk and up again, failures, a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sgl
from nodes import await_unlocked

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_controller import backup, device_noise, prefetch, rows  # noqa: E402
from sgl_pages import filled, keys_for, noise, pages_of, raw, same  # noqa: E402


@pytest.mark.parametrize("interface", ["v0", "v1"])
@pytest.mark.parametrize(
    "geometry,layout",
    [
        (sgl.MHA, "page_first_direct"),
        (sgl.MHA, "layer_first"),
        (sgl.MLA, "page_first_direct"),
        (sgl.MLA, "layer_first"),
    ],
    ids=["mha-direct", "mha-layer_first", "mla-direct", "mla-layer_first"],
)
def test_down_to_disk_and_up_again(geometry, layout, interface, store_dir):
    pages, tokens_of = 8, geometry.page_tokens
    device = sgl.device_pool(geometry, 24)
    host = sgl.host_pool(geometry, device, layout)
    extra = sgl.extra_config(store_dir)
    if interface == "v0":
        del extra["interface_v1"]
    controller = sgl.controller(device, host, tokens_of, extra)
    try:
        buffers = device_noise(device, 11)
        tokens = list(range(5000, 5000 + pages * tokens_of))
        keys = sgl.page_keys(tokens, tokens_of)
        assert keys == controller.get_hash_str(tokens, None, page_size=tokens_of)
        # L1 -> L2, by the pool's own copies; pages out of order.
        on_device = torch.arange(2 * tokens_of, (2 + pages) * tokens_of).reshape(pages, -1).flip(0).reshape(-1)
        want = rows(buffers, on_device)
        down = host.alloc(pages * tokens_of)
        host.backup_from_device_all_layer(device, down, on_device, "direct")
        # L2 -> L3, by the controller's backup thread.
        assert backup(controller, down, keys).completed_tokens == pages * tokens_of
        host.free(down)
        noise(host, 12)
        device_noise(device, 13)
        # L3 -> L2, by its prefetch threads; one page more is asked for than there is.
        operation = prefetch(controller, host, tokens + list(range(tokens_of)))
        assert operation.storage_hit_count == pages * tokens_of
        assert operation.completed_tokens == pages * tokens_of
        # L2 -> L1, to other places.
        back = torch.arange(12 * tokens_of, (12 + pages) * tokens_of)
        for layer in range(geometry.layers):
            host.load_to_device_per_layer(device, operation.host_indices, back, layer, "direct")
        assert same(rows(buffers, back), want)
        assert controller.storage_backend.counters == {}
    finally:
        controller.detach_storage_backend()


def test_detach_and_attach_again_keep_the_pages(store_dir):
    geometry = sgl.MHA
    device = sgl.device_pool(geometry, 16)
    host = sgl.host_pool(geometry, device, "page_first_direct")
    extra = sgl.extra_config(store_dir)
    controller = sgl.controller(device, host, geometry.page_tokens, dict(extra))
    noise(host, 1)
    tokens = list(range(4 * geometry.page_tokens))
    down = host.alloc(4 * geometry.page_tokens)
    assert backup(controller, down, sgl.page_keys(tokens, geometry.page_tokens)).completed_tokens == len(tokens)
    want = pages_of(host, down)
    controller.detach_storage_backend()
    noise(host, 2)
    controller.attach_storage_backend("dynamic", geometry.page_tokens, "meta/tiny", dict(extra))
    operation = prefetch(controller, host, tokens)
    assert operation.completed_tokens == len(tokens)
    assert same(pages_of(host, operation.host_indices), want)
    controller.detach_storage_backend()


def test_a_wrong_setting_fails_the_attach_and_nothing_else(store_dir):
    geometry = sgl.MHA
    device = sgl.device_pool(geometry, 4)
    host = sgl.host_pool(geometry, device, "page_first")
    with pytest.raises(ValueError, match="capacity: found 'lots'"):
        sgl.controller(device, host, geometry.page_tokens, sgl.extra_config(store_dir, capacity="lots"))


def test_random_failures_and_delays_never_give_wrong_bytes(store_dir, seed, monkeypatch):
    """SGLang's own wrappers around the backend, as its tests turn them on."""
    import random

    wrapper = sgl.boot().storage.__dict__.get("HiCacheStorageFailureInjector")
    if wrapper is None:
        pytest.skip("this version of sglang has no failure injector")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.003")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    rng = random.Random(seed)
    geometry = sgl.MHA
    device = sgl.device_pool(geometry, 64)
    host = sgl.host_pool(geometry, device, "page_first_direct")
    controller = sgl.controller(device, host, geometry.page_tokens, sgl.extra_config(store_dir, capacity="3MiB"))
    assert type(controller.storage_backend).__name__ == "HiCacheStorageFailureInjector"
    try:
        written, hits = {}, 0
        for step in range(60):
            chain = rng.randrange(6)
            pages = rng.randrange(1, 9)
            tokens = [chain * 1_000_000 + i for i in range(pages * geometry.page_tokens)]
            keys = sgl.page_keys(tokens, geometry.page_tokens)
            if rng.random() < 0.5:
                indices = host.alloc(len(tokens))
                # What a key names is the same bytes always, as with a model.
                for i, key in enumerate(keys):
                    page = host.get_dummy_flat_data_page()
                    raw(page).random_(0, 256, generator=torch.Generator().manual_seed(int(key[:12], 16)))
                    host.set_from_flat_data_page(int(indices[i * geometry.page_tokens]), page)
                    written[key] = raw(page).clone()
                backup(controller, indices, keys)
                host.free(indices)
                continue
            operation = prefetch(controller, host, tokens)
            if operation.host_indices is None:
                continue
            noise_free = operation.completed_tokens // geometry.page_tokens
            got = pages_of(host, operation.host_indices)
            for key, page in list(zip(operation.hash_value, got))[:noise_free]:
                assert torch.equal(page, written[key]), f"step {step}: wrong bytes"
                hits += 1
            host.free(operation.host_indices)
        assert hits > 0
    finally:
        controller.detach_storage_backend()


CHILD = """
import os, sys
sys.path[:0] = {paths!r}
import sgl
from sgl_pages import filled, keys_for
pool = filled(sgl.MHA, pages=64)
backend = sgl.backend(sgl.MHA, pool, sgl.extra_config({store!r}))
indices = pool.alloc(64 * pool.page_size)
print("ready", flush=True)
salt = 0
while True:
    # The bytes of a page are its pool's, whatever its chain.
    assert all(backend.batch_set_v1(keys_for(sgl.MHA, 64, salt), indices))
    salt += 1
    print(salt, flush=True)
"""


def test_a_process_killed_in_mid_backup_leaves_whole_pages_or_none(store_dir, seed):
    import random

    rng = random.Random(seed)
    rounds = 1  # Each child imports torch and SGLang anew; `test_cache.py` kills more often.
    pool = filled(sgl.MHA, pages=64)
    indices = pool.alloc(64 * pool.page_size)
    want = pages_of(pool, indices)
    paths = [str(Path(sgl.__file__).parent), *(p for p in sys.path if p)]
    served = 0
    for _ in range(rounds):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(paths=paths, store=str(store_dir))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip
        line = child.stdout.readline()
        assert line == "ready\n", child.stderr.read()
        salts = [int(child.stdout.readline()) for _ in range(rng.randrange(1, 4))][-1]
        time.sleep(rng.random() * 0.02)  # Not to wait for something: to be in the middle of it.
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        child.stderr.close()
        await_unlocked(store_dir)
        backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
        for salt in range(max(0, salts - 2), salts + 2):
            keys = keys_for(sgl.MHA, 64, salt)
            noise(pool, salt)
            results = backend.batch_get_v1(keys, indices)
            got = pages_of(pool, indices)
            for there, page, expected in zip(results, got, want):
                assert not there or torch.equal(page, expected)
            served += sum(results)
            assert backend.batch_exists(keys) == (results.index(False) if False in results else 64)
            if salt < salts:
                assert all(results), "a backup that was acknowledged is not there"
        backend.close()
    assert served > 0
