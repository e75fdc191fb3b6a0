"""Device memory of a program's own, played by host memory: registered once, blocks in many segments."""

from __future__ import annotations

import array
import select

import pytest
from segments import EACH, SEGMENT, Pool

from kvhoist import ArgumentError, Cache, UnavailableError


def drained(queue):
    select.select([queue.event_fd], [], [])
    return queue.drain()


def test_blocks_in_many_segments_go_to_a_device_and_back(store_dir):
    settings = dict(block_bytes=EACH * SEGMENT, host_bytes="1MiB", capacity="4MiB", direct_io="prefer")
    pool, keys = Pool(64), [f"key {n}" for n in range(8)]
    for n in range(64):
        pool.memory[n * SEGMENT : (n + 1) * SEGMENT] = bytes([n]) * SEGMENT
    # Layer by layer, as an engine's pool lies: segment l of block b is at 16 * l + b.
    stored = [16 * layer + block for block in range(8) for layer in range(EACH)]
    with Cache(store_dir, **settings, device="simulated", device_blocks=1) as cache:
        region = cache.register_device(pool.address, len(pool.memory))
        assert not region.pinned
        queue = cache.queue()
        ticket = queue.submit_store_pages(keys, pool.addresses(stored), [SEGMENT] * EACH)
        assert drained(queue) == [(ticket, [True] * 8)]
        loaded = [16 * layer + 8 + block for block in range(8) for layer in range(EACH)]
        ticket = queue.submit_load_pages(keys[::-1], pool.addresses(loaded), [SEGMENT] * EACH)
        assert drained(queue) == [(ticket, [True] * 8)]
        for there, here in zip(loaded, [16 * layer + block for block in range(7, -1, -1) for layer in range(EACH)]):
            assert pool.memory[there * SEGMENT] == here
        with pytest.raises(ArgumentError, match="4 addresses of 8 bytes for each of 8 keys"):
            queue.submit_load_pages(keys, pool.addresses(loaded[1:]), [SEGMENT] * EACH)
        with pytest.raises(ArgumentError, match="one block of 4096 bytes"):
            queue.submit_load_pages(keys[:1], pool.addresses(loaded[:4]), [SEGMENT, SEGMENT, SEGMENT, 8])
        with pytest.raises(ArgumentError, match="sizes"):
            queue.submit_load_pages(keys[:1], pool.addresses(loaded[:4]), "abcd")
        outside = array.array("q", [pool.address + 64 * SEGMENT] * EACH)
        with pytest.raises(ArgumentError, match="no registered region"):
            queue.submit_load_pages(keys[:1], outside, [SEGMENT] * EACH)
        region.unregister()
        with pytest.raises(ArgumentError, match="no registered region"):
            queue.submit_load_pages(keys, pool.addresses(loaded), [SEGMENT] * EACH)


def test_a_cache_without_a_device_says_so(store_dir):
    with Cache(store_dir, block_bytes=4096, host_bytes="1MiB", capacity="4MiB", direct_io="prefer") as cache:
        with pytest.raises(UnavailableError):
            cache.register_device(4096, 4096)
