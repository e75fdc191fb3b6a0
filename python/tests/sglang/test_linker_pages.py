"""Pages of the linker that could not be read. Needs no engine."""

from __future__ import annotations

import numpy
import pytest

from kvhoist import Cache
from kvhoist.sglang import linker_pages
from kvhoist.sglang.linker_pages import Pages, Piece

BYTES = 4096
KEYS = [bytes([n]) * 32 for n in range(4)]


@pytest.fixture
def pages(store_dir):
    """Pages of one buffer, all of which are stored."""
    buffer = numpy.zeros((len(KEYS), BYTES), dtype=numpy.uint8)
    with Cache(store_dir, block_bytes=BYTES, host_bytes="1MiB", capacity="4MiB", direct_io="prefer") as cache:
        region = cache.register_host(buffer.ctypes.data, buffer.nbytes)
        made = Pages("kv", [Piece(0, buffer.ctypes.data, BYTES, BYTES, 0)], cache, "disk")
        assert made.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
        yield made
        region.unregister()


@pytest.fixture
def clock(monkeypatch):
    """What the pages see of time; add to its only item."""
    now = [1000.0]
    monkeypatch.setattr(linker_pages.time, "monotonic", lambda: now[0])
    return now


def test_pages_that_could_not_be_read_stay_and_are_offered_later_each_time(pages, clock):
    bad = KEYS[1:3]
    for pause in (60, 120, 240):
        pages.not_read(bad)
        assert pages.cache.contains_each(KEYS) == [True] * len(KEYS), "other ranks have them"
        # They are there, so nothing is stored, and nothing says that they can be read.
        assert pages.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
        clock[0] += pause - 1
        assert pages.there(KEYS) == [True, False, False, True]
        assert len(pages.tiers(KEYS)) == 1
        clock[0] += 1
        assert pages.there(KEYS) == [True] * len(KEYS)
        assert len(pages.tiers(KEYS)) == len(KEYS)


def test_a_page_is_offered_again_within_minutes_and_is_as_any_other_once_it_was_read(pages, clock):
    for pause in (60, 120, 240, 480, 960, 960):
        pages.not_read(KEYS[:1])
        clock[0] += pause
        assert pages.there(KEYS) == [True] * len(KEYS)
    pages.was_read(KEYS)
    pages.not_read(KEYS[:1])
    clock[0] += 60
    assert pages.there(KEYS) == [True] * len(KEYS)


def test_a_page_of_several_requests_that_could_not_be_read_once_is_paused_once(pages, clock):
    pages.not_read([KEYS[0]] * 5 + [KEYS[1]])
    clock[0] += 59
    assert pages.there(KEYS) == [False, False, True, True]
    clock[0] += 1
    assert pages.there(KEYS) == [True] * len(KEYS)


def test_batches_that_had_begun_before_a_pause_neither_lengthen_nor_end_it(pages, clock):
    pages.refused()
    pages.not_read(KEYS[:1])
    clock[0] += 30
    pages.refused()
    pages.not_read(KEYS[:1])
    pages.was_read(KEYS[1:])
    clock[0] += 29
    assert (pages.tiers(KEYS), pages.there(KEYS)) == ([], [False] * len(KEYS))
    clock[0] += 1
    assert pages.there(KEYS) == [True] * len(KEYS)
    pages.refused()
    clock[0] += 119
    assert pages.tiers(KEYS) == []
    clock[0] += 1
    pages.was_read(KEYS)
    pages.refused()
    clock[0] += 60
    assert pages.there(KEYS) == [True] * len(KEYS)


def test_a_page_that_the_cache_has_dropped_is_offered_when_it_is_stored_again(pages, clock):
    pages.cache.remove(KEYS[1])
    pages.not_read(KEYS[1:3])
    assert pages.there(KEYS) == [True, False, False, True]
    assert pages.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
    assert pages.there(KEYS) == [True, True, False, True]


def test_the_last_pages_that_could_not_be_read_are_remembered(pages, clock, monkeypatch):
    monkeypatch.setattr(linker_pages, "_UNREAD_MAX", 2)
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[3]):
        pages.not_read([key])
    assert pages.there(KEYS) == [False, True, True, False]
