"""Loads that complete layer by layer, blocks that are held, and stores that come after an event."""

from __future__ import annotations

import pytest
from segments import EACH, SEGMENT, Pool

from kvhoist import ArgumentError, Cache, ClosedError, UnavailableError

BLOCK = EACH * SEGMENT
BLOCKS = 8
SETTINGS = dict(block_bytes=BLOCK, capacity="4MiB", direct_io="prefer")


def by_layer(pool, first: int, blocks) -> object:
    """Addresses of the segments of blocks, in a pool that lies layer by layer."""
    return pool.addresses([16 * layer + first + block for block in blocks for layer in range(EACH)])


@pytest.fixture(params=["host", "simulated"])
def filled(request, store_dir):
    """A cache with eight blocks out of a pool whose second half is empty."""
    pool, keys = Pool(64), [f"key {n}" for n in range(BLOCKS)]
    for n in range(64):
        if n % 16 < BLOCKS:
            pool.memory[n * SEGMENT : (n + 1) * SEGMENT] = bytes([n + 1]) * SEGMENT
    device = dict(device="simulated", device_blocks=1) if request.param == "simulated" else {}
    with Cache(store_dir, **SETTINGS, host_bytes="1MiB", **device) as cache:
        register = cache.register_device if device else cache.register_host
        register(pool.address, len(pool.memory))
        addresses = list(by_layer(pool, 0, range(BLOCKS)))
        assert cache.store_pages(keys, addresses, [SEGMENT] * len(addresses)) == [True] * BLOCKS
        yield cache, pool, keys


def test_a_load_completes_layer_by_layer(filled):
    cache, pool, keys = filled
    load = cache.load_layers(keys, by_layer(pool, 8, range(BLOCKS)), [SEGMENT] * EACH, range(EACH))
    assert load.layers == EACH
    for layer in range(EACH):
        # Where there is no CUDA device the call waits, stream or not.
        load.wait(layer, stream=7 if layer % 2 else None)
        assert load.layer(layer) == (BLOCKS, None)
        for block in range(BLOCKS):
            there = (16 * layer + 8 + block) * SEGMENT
            assert pool.memory[there : there + SEGMENT] == bytes([16 * layer + block + 1]) * SEGMENT
    assert load.blocks() == [True] * BLOCKS
    with pytest.raises(ArgumentError, match="layer"):
        load.wait(EACH)
    with pytest.raises(UnavailableError, match="await the layer"):
        load.poison_address(0)


def test_a_block_that_is_nowhere_ends_its_layers(filled):
    cache, pool, keys = filled
    asked = [*keys[:3], "nowhere", *keys[4:]]
    load = cache.load_layers(asked, by_layer(pool, 8, range(BLOCKS)), [SEGMENT] * EACH, range(EACH))
    for layer in range(EACH):
        assert load.layer(layer) == (3, None)
    assert load.blocks() == [True, True, True, False, True, True, True, True]
    # Its own places are as they were.
    assert not any(pool.memory[(16 * layer + 8 + 3) * SEGMENT] for layer in range(EACH))


def test_wrong_layers_are_refused_before_anything_moves(filled):
    cache, pool, keys = filled
    addresses = by_layer(pool, 8, range(BLOCKS))
    for layer_of in ([0, 1, 1], [0, 2, 2, 3], []):
        with pytest.raises(ArgumentError):
            cache.load_layers(keys, addresses, [SEGMENT] * EACH, layer_of)
    assert not any(pool.memory[8 * SEGMENT : 16 * SEGMENT])
    load = cache.load_layers([], pool.addresses([]), [SEGMENT] * EACH, range(EACH))
    assert load.blocks() == []
    cache.close()
    with pytest.raises((ClosedError, ArgumentError)):
        cache.load_layers(keys, addresses, [SEGMENT] * EACH, range(EACH))


def test_held_blocks_stay_in_host_memory():
    with Cache(None, block_bytes=BLOCK, host_blocks=8) as cache:
        cache.store(["first", "second"], [b"1" * BLOCK, b"2" * BLOCK])
        held = cache.hold(["first", "nowhere", "second"], 8)
        assert len(held) == 2
        assert len(cache.hold(["first", "second"], 1)) == 1
        for n in range(32):
            cache.store([f"other {n}"], [bytes(BLOCK)])
        assert cache.tiers(["first", "second", "nowhere"]) == ["host", "host"]
        held.release()
        held.release()
        assert len(held) == 0
        for n in range(32, 64):
            cache.store([f"other {n}"], [bytes(BLOCK)])
        assert cache.tiers(["first"]) == []


def test_a_store_begins_after_its_events():
    block = bytearray(BLOCK)

    class Event:
        """Of a stream that has still to write the block."""

        def synchronize(self) -> None:
            block[:] = b"written" + bytes(BLOCK - 7)

    with Cache(None, block_bytes=BLOCK, host_blocks=8) as cache:
        assert cache.store(["key"], [block], after=[Event()]) == [True]
        assert cache.get("key") == bytes(block) == b"written" + bytes(BLOCK - 7)
