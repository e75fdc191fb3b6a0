"""Hints: released blocks are evicted first, kept ones last."""

from __future__ import annotations

import asyncio
import math

import pytest

import kvhoist

BLOCK = 4096


@pytest.fixture
def cache():
    with kvhoist.Cache(block_bytes=BLOCK, host_blocks=8) as cache:
        yield cache


def store(cache, keys: list[str]) -> None:
    assert cache.store(keys, [bytes(BLOCK)] * len(keys)) == [True] * len(keys)


def scan(cache, blocks: int) -> None:
    first = cache.stats()["stores"]
    for n in range(first, first + blocks):
        store(cache, [f"scanned {n}"])


def test_a_chain_that_is_over_goes_first(cache):
    store(cache, ["cold"])
    store(cache, ["a", "b", "c"])
    assert cache.release(["a", "b", "c", "nowhere"]) == 3
    scan(cache, 7)
    assert cache.contains_each(["cold", "a", "b", "c"]) == [True, False, False, False]
    assert cache.stats()["released"] == 3
    cache.validate()


def test_what_is_kept_goes_last_within_its_time(cache):
    store(cache, ["a", "b"])
    store(cache, ["c"])
    assert cache.keep(["a", "b", "nowhere"], 3600) == 2
    assert cache.keep(["c"], 0.0) == 1
    scan(cache, 30)
    assert cache.contains_each(["a", "b", "c"]) == [True, True, False]
    assert cache.stats()["tiers"]["host"]["kept"] == 2
    cache.validate()


def test_coroutines_give_hints(cache):
    async def hint():
        return await cache.release_async(["a", "b"]), await cache.keep_async(["cold"], 3600)

    store(cache, ["cold"])
    store(cache, ["a", "b"])
    assert asyncio.run(hint()) == (2, 1)
    scan(cache, 20)
    assert cache.contains_each(["cold", "a", "b"]) == [True, False, False]


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "long", None])
def test_a_time_that_is_none_is_named(cache, seconds):
    with pytest.raises(kvhoist.ArgumentError, match="seconds.*expected a number of seconds"):
        cache.keep(["a"], seconds)
