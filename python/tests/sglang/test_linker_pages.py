"""Pages of the linker that could not be read, and their removal. Needs no engine."""

from __future__ import annotations

import numpy
import pytest

from kvhoist import Cache, DeadlineError, IoError, UnavailableError
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


def test_pages_whose_removal_failed_are_not_offered_and_removed_by_a_later_call(pages, monkeypatch):
    remove, refused = pages.cache.remove, [KEYS[1]]

    def slow(key):
        if key in refused:
            raise UnavailableError("on purpose")
        return remove(key)

    monkeypatch.setattr(pages.cache, "remove", slow)
    bad = KEYS[:3]
    pages.not_read(bad)
    with pytest.raises(UnavailableError):
        pages.remove_unread()
    assert pages.there(KEYS) == [False, False, False, True]
    assert pages.cache.contains_each(KEYS) == [False, True, True, True]
    # It keeps no other page from being stored.
    assert pages.store(KEYS[:1], [[0]]) == [True]
    assert pages.there(KEYS) == [True, False, False, True]
    refused.clear()
    pages.remove_unread()
    assert pages.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
    assert pages.there(KEYS) == [True] * len(KEYS)


@pytest.mark.parametrize("error", [IoError, DeadlineError])
def test_a_page_whose_record_could_not_be_cleared_is_forgotten_all_the_same(pages, monkeypatch, error):
    remove, calls = pages.cache.remove, []

    def failing(key):
        remove(key)
        calls.append(key)
        raise error("on purpose")

    monkeypatch.setattr(pages.cache, "remove", failing)
    pages.not_read(KEYS)
    while len(calls) < len(KEYS):
        with pytest.raises(error):
            pages.remove_unread()
    pages.remove_unread()
    assert calls == KEYS, "each is removed once"
    assert pages.cache.contains_each(KEYS) == [False] * len(KEYS)
    monkeypatch.undo()
    assert pages.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
    assert pages.there(KEYS) == [True] * len(KEYS)
