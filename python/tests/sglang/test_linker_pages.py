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


@pytest.mark.parametrize("error", [DeadlineError, UnavailableError])
def test_pages_whose_removal_failed_are_not_offered_and_removed_before_the_next_store(pages, monkeypatch, error):
    remove, refused = pages.cache.remove, [KEYS[1]]

    def slow(key):
        if key in refused:
            raise error("on purpose")
        return remove(key)

    monkeypatch.setattr(pages.cache, "remove", slow)
    bad = KEYS[:3]
    pages.not_read(bad)
    with pytest.raises(error):
        pages.remove(bad)
    assert pages.there(KEYS) == [False, False, False, True]
    assert pages.cache.contains_each(KEYS) == [False, True, True, True]
    with pytest.raises(error):
        pages.store(KEYS, [range(len(KEYS))])
    refused.clear()
    assert pages.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
    assert pages.there(KEYS) == [True] * len(KEYS)


def test_a_page_whose_record_could_not_be_cleared_is_forgotten_all_the_same(pages, monkeypatch):
    remove = pages.cache.remove

    def failing(key):
        remove(key)
        raise IoError("on purpose")

    monkeypatch.setattr(pages.cache, "remove", failing)
    pages.not_read(KEYS)
    with pytest.raises(IoError):
        pages.remove(KEYS)
    assert pages.cache.contains_each(KEYS) == [False] * len(KEYS)
    monkeypatch.undo()
    assert pages.store(KEYS, [range(len(KEYS))]) == [True] * len(KEYS)
    assert pages.there(KEYS) == [True] * len(KEYS)
