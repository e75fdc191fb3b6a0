"""The cache as Python sees it: bytes, results, errors, memory, threads, asyncio, fork, kill."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import mmap
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nodes import await_unlocked

import kvhoist
from kvhoist import _native
from kvhoist._native import chunk_keys
from kvhoist._settings import EngineSettings

BLOCK = 8192


@pytest.fixture
def cache(store_dir):
    with opened(store_dir) as cache:
        yield cache


def opened(path, **more):
    values = dict(block_bytes=BLOCK, host_bytes=8 * BLOCK, capacity=(1 << 20) + 64 * BLOCK, direct_io="prefer")
    return kvhoist.Cache(path, **{**values, **more})


def block(n: int) -> bytes:
    return n.to_bytes(4, "little") * (BLOCK // 4)


def key(n: int) -> str:
    return f"{n:064x}"


def test_blocks_come_back_as_they_were(cache):
    keys, blocks = [key(n) for n in range(20)], [block(n) for n in range(20)]
    assert cache.store(keys, blocks) == [True] * 20
    assert cache.match_prefix(keys + ["no"]) == 20 and cache.match_prefix(["no"] + keys) == 0
    out = [bytearray(BLOCK) for _ in range(21)]
    assert cache.load(keys + ["no"], out) == [True] * 20 + [False]
    assert [bytes(b) for b in out] == blocks + [bytes(BLOCK)]
    assert cache.get(keys[3]) == blocks[3] and cache.get("no") is None
    assert cache.contains_each([keys[0], "no", keys[1]]) == [True, False, True]
    assert cache.remove(keys[0]) is True and cache.remove(keys[0]) is False
    assert cache.get(keys[0]) is None
    cache.validate()


def test_a_cache_is_counted_listed_and_cleared(cache):
    assert (len(cache), list(cache), bool(cache)) == (0, [], True)
    keys = [bytes([n]) * 32 for n in range(20)]
    cache.store(keys, [block(n) for n in range(20)])
    cache.store(["name"], [block(20)])
    assert len(cache) == 21 and len(set(cache)) == 21
    assert set(keys) < set(cache.keys())
    (name,) = set(cache) - set(keys)
    assert cache.get(name) == block(20), "a name is listed as its key"
    listed = iter(cache)
    assert iter(listed) is listed and next(listed) in cache
    assert cache.clear() == 21
    assert (len(cache), list(cache), cache.clear()) == (0, [], 0)
    assert cache.get("name") is None
    cache.close()
    assert (len(cache), list(cache)) == (0, [])
    with pytest.raises(kvhoist.ClosedError):
        cache.clear()


def test_keys_of_every_kind(cache):
    digest = bytes(range(32))
    names = [digest, "name", b"name", "N" * 64, digest.hex().upper()[:-1] + "g", "é" * 32]
    for n, name in enumerate(names):
        cache.store([name], [block(n)])
    for n, name in enumerate(names):
        assert cache.get(name) == (block(1) if name == b"name" else block(n)), name
    assert cache.get(digest.hex()) == cache.get(digest.hex().upper()) == block(0), "hex and bytes are one key"
    for wrong in (3, None, bytearray(32)):
        with pytest.raises(kvhoist.ArgumentError, match="key.*expected a str or bytes"):
            cache.get(wrong)
    with pytest.raises(kvhoist.ArgumentError, match="keys.*list"):
        cache.match_prefix("abc")


def test_hex_is_read_as_python_reads_it(cache):
    good = "0123456789abcdef" * 4
    cache.store([bytes.fromhex(good)], [block(0)])
    texts = [good[:at] + chr(code) + good[at + 1 :] for at in range(64) for code in range(128)]
    # With a character that is no digit it is a name, and names another block.
    expected = [text.lower() == good for text in texts]
    assert sum(expected) == 64 + 24
    assert cache.contains_each(texts) == expected


def test_a_restart_keeps_the_blocks(store_dir):
    keys = [key(n) for n in range(30)]
    with opened(store_dir) as cache:
        cache.store(keys, [block(n) for n in range(30)])
    with opened(store_dir) as cache:
        assert cache.match_prefix(keys) == 30
        assert [cache.get(k) for k in keys] == [block(n) for n in range(30)]
    with pytest.raises(kvhoist.StoreError, match="namespace"):
        opened(store_dir, namespace="other")


def test_segments_and_registered_memory(cache):
    memory = bytearray(os.urandom(4 * BLOCK))
    with cache.register_host(memory) as region:
        assert region.nbytes == 4 * BLOCK
        # A block in three pieces, out of order.
        pieces = [(region.address + BLOCK, 4096), (region.address, 1000), (region.address + 1000, 3096)]
        assert cache.store(["scattered"], [pieces]) == [True]
        want = bytes(memory[BLOCK : BLOCK + 4096] + memory[:4096])
        assert cache.get("scattered") == want
        back = [(region.address + 2 * BLOCK, BLOCK)]
        assert cache.load(["scattered"], back) == [True]
        assert bytes(memory[2 * BLOCK : 3 * BLOCK]) == want
        flat = cache.load_pages(["scattered"], [a for a, _ in pieces], [n for _, n in pieces])
        assert flat == [True] and bytes(memory[BLOCK : BLOCK + 4096]) == want[:4096]
        with pytest.raises(BufferError):
            memory.clear()  # It is exported for as long as it is registered.
    memory.clear()


def test_blocks_go_straight_to_memory_that_direct_io_can_reach(store_dir):
    segment = 64 << 10
    memory = mmap.mmap(-1, 8 * segment)
    with opened(store_dir, block_bytes=2 * segment, host_bytes="1MiB", capacity="4MiB", bypass_host=True) as cache:
        memory[:] = os.urandom(8 * segment)
        with cache.register_host(memory) as region:
            halves = [[(region.address + (i + 4 * half) * segment, segment) for half in (0, 1)] for i in range(4)]
            want = memory[:]
            keys = ["a", "b", "c", "d"]
            assert cache.store(keys, halves) == [True] * 4
            memory[:] = bytes(8 * segment)
            assert cache.load(keys, halves) == [True] * 4
            assert memory[:] == want
            stats = cache.stats()
            straight = [stats["routes"][way]["blocks"] for way in ("region_to_disk", "disk_to_region")]
            assert straight == [4, 4] and stats["tiers"]["host"]["resident"] == 0
    with pytest.raises(kvhoist.ConfigError, match="bypass_host"):
        opened(store_dir, bypass_host="yes")


def test_pinned_memory_is_read_into_and_stored_from(store_dir):
    segment = 64 << 10
    with opened(store_dir, block_bytes=segment, host_bytes="1MiB", capacity="4MiB", bypass_host=True) as cache:
        pools = [mmap.mmap(-1, 4 * segment) for _ in range(2)]
        regions = [cache.register_host(pool, pin=True) for pool in pools]
        # Where there is a ring, and as much memory may be locked.
        assert {region.pinned for region in regions} == {cache.stats()["registered"]}
        assert not cache.register_host(mmap.mmap(-1, 4096)).pinned
        payload = os.urandom(segment)
        pools[0][segment : 2 * segment] = payload
        assert cache.store(["a"], [[(regions[0].address + segment, segment)]]) == [True]
        regions[0].unregister()
        assert cache.load(["a"], [[(regions[1].address, segment)]]) == [True]
        assert pools[1][:segment] == payload and pools[1][segment:] == bytes(3 * segment)


def test_pinned_memory_lies_in_huge_pages_where_the_system_moves_it(store_dir):
    from kvhoist.sglang.pool_memory import huge_page_share

    nbytes = 16 << 20
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[:] = bytes(range(256)) * (nbytes // 256)
        assert huge_page_share([(address, nbytes)]) == 0.0
        assert huge_page_share([]) is None
        memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(25)  # MADV_COLLAPSE, of Linux 6.1
        except OSError as error:
            pytest.skip(f"this system moves no memory into huge pages: {error}")
        memory.madvise(mmap.MADV_DONTNEED)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[:] = bytes(range(256)) * (nbytes // 256)
        with opened(store_dir) as cache:
            region = cache.register_host(memory, pin=True)
            # Not those at the ends, which others may share.
            assert huge_page_share([(address, nbytes)]) >= 0.75
            assert memory[:] == bytes(range(256)) * (nbytes // 256)
            region.unregister()
        del region


def test_memory_that_is_not_registered_is_refused(cache):
    memory = bytearray(BLOCK)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cache.store(["a"], [block(1)])
    bad = [
        (address, BLOCK), (0, BLOCK), (16, BLOCK), (2**64 - 4096, BLOCK), (2**64 - BLOCK, BLOCK),
    ]  # fmt: skip
    for pointer in bad:
        with pytest.raises(kvhoist.ArgumentError, match="no registered region"):
            cache.load(["a"], [pointer])
        with pytest.raises(kvhoist.ArgumentError, match="no registered region"):
            cache.store(["b"], [pointer])
    region = cache.register_host(address, BLOCK)
    for pieces in ([(address + 1, BLOCK)], [(address - 1, BLOCK)], [(address, 1), (address + BLOCK, BLOCK - 1)]):
        with pytest.raises(kvhoist.ArgumentError, match="no registered region"):
            cache.load(["a"], [pieces])
    with pytest.raises(kvhoist.ArgumentError, match="part of which is registered"):
        cache.register_host(address + BLOCK - 1, BLOCK)
    assert cache.load(["a"], [(address, BLOCK)]) == [True] and bytes(memory) == block(1)
    region.unregister()
    region.unregister()
    with pytest.raises(kvhoist.ArgumentError, match="no registered region"):
        cache.load(["a"], [(address, BLOCK)])
    for wrong in ((0, 10), (address, 0)):
        with pytest.raises(kvhoist.ArgumentError, match="region"):
            cache.register_host(*wrong)
    assert cache.match_prefix(["b"]) == 0


def test_wrong_arguments_move_nothing(cache):
    good = bytearray(BLOCK)
    cases = [
        (["a", "b"], [good]), (["a"], [good[:-1]]), (["a"], [[good, good]]), (["a"], good), (["a"], [3]), (["a"], [()]),
        (["a"], [[]]), (["a"], [(-1, BLOCK)]), (["a"], [("x", BLOCK)]), (["a"], [memoryview(bytes(2 * BLOCK))[::2]]),
    ]  # fmt: skip
    for keys, blocks in cases:
        for call in (cache.store, cache.load):
            with pytest.raises((kvhoist.ArgumentError, TypeError, OverflowError, BufferError)):
                call(keys, blocks)
    with pytest.raises(BufferError):
        cache.load(["a"], [bytes(BLOCK)])
    with pytest.raises(kvhoist.ArgumentError, match="errors.*'raise'"):
        cache.load(["a"], [good], errors="ignore")
    with pytest.raises(kvhoist.ArgumentError, match="segments"):
        cache.load_pages(["a", "b"], [1, 2, 3], [1, 2, 3])
    assert cache.stats()["stores"] == 0
    good.clear()  # Nothing holds on to it.


def test_the_buffers_of_a_call_are_let_go(cache):
    blocks = [bytearray(block(n)) for n in range(4)]
    cache.store([key(n) for n in range(4)], blocks)
    for b in blocks:
        b.clear()


@pytest.mark.parametrize(
    "field,change",
    [
        ("block_bytes", dict(block_bytes=0)), ("block_bytes", dict(block_bytes=True)),
        ("host_bytes", dict(host_bytes=1)),
        ("host_bytes", dict(host_bytes="many")), ("capacity", dict(capacity=None)), ("capacity", dict(capacity="1MiB")),
        ("write_policy", dict(write_policy="never")), ("deadline_ms", dict(deadline_ms=0)),
        ("deadline_ms", dict(deadline_ms=-1)), ("waiters_max", dict(waiters_max=2**40)),
        ("namespace", dict(namespace="")),
        ("selective_hits", dict(selective_hits=256)), ("storage", dict(storage=3)), ("direct_io", dict(direct_io="no")),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(field, change, store_dir):
    with pytest.raises(kvhoist.ConfigError, match=f"^{field}: found .*, expected") as raised:
        opened(store_dir, **change)
    assert raised.value.field == field and isinstance(raised.value, ValueError)
    assert list(store_dir.iterdir()) == [], "a refused setting left something behind"


def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant(store_dir):
    for unknown, meant in (("spin_uss", "spin_us"), ("write_polcy", "write_policy"), ("capasity", "capacity")):
        with pytest.raises(kvhoist.ArgumentError, match=f"{unknown}: .* did you mean {meant}"):
            opened(store_dir, **{unknown: 3})
    with pytest.raises(kvhoist.ArgumentError, match="one of background_max, block_bytes, "):
        opened(store_dir, zzz=3)


def test_every_setting_of_the_engine_is_a_keyword_with_a_type():
    of_cache = {"block_bytes", "namespace", "host_bytes", "host_blocks", "disks"}
    assert set(EngineSettings.__annotations__) == set(_native.setting_names()) - of_cache


def test_the_reference_of_settings_is_taken_with_its_defaults_and_sizes_as_text(store_dir):
    given = dict(
        low_watermark=0.1, high_watermark=0.2, device_layout=[BLOCK // 2, BLOCK // 2], device_bytes="1MiB", copy=None,
        copy_prefer="latency", gdr="off", gdr_device=None, gdr_stuck_ms=9_000, cufile_stuck_ms=4_000, workers=None,
        read_bytes_in_flight_max="96MiB", write_bytes_in_flight_max="32MiB", write_budget=None,
    )  # fmt: skip
    with opened(store_dir, **given) as cache:
        cache.store(["a"], [block(1)])
        assert cache.get("a") == block(1)
    for name, value, expected in (
        ("read_bytes_in_flight_max", "10 apples", "a positive number of bytes, such as"),
        ("high_watermark", "much", "a number"),
        ("deadline_ms", 2.5, "a whole number from 0 to 18446744073709551615"),
        ("workers", -1, "a whole number from 0 to 4294967295"),
        ("selective_hits", 300, "a whole number from 0 to 255"),
        ("direct_io", True, "`require` or `prefer`"),
        ("write_policy", 5, "one of `write_through`, "),
        ("device_layout", "x", "a list"),
        ("bypass_host", 1, "true or false"),
        ("low_watermark", float("nan"), "a finite number"),
        ("copy", object(), "a number, a bool, text"),
    ):
        with pytest.raises(kvhoist.ConfigError, match=f"^{name}: found .*, expected {expected}"):
            opened(store_dir / "refused", **{name: value})


def test_a_path_that_is_not_there_is_an_io_error(store_dir):
    with pytest.raises(kvhoist.Error) as raised:
        opened(store_dir / "no" / "such" / "folder")
    assert "no/such/folder" in str(raised.value)
    assert isinstance(raised.value, (kvhoist.IoError, kvhoist.StoreError))


def test_a_closed_cache_says_so(store_dir):
    cache = opened(store_dir)
    queue = cache.queue()
    cache.close()
    cache.close()
    assert cache.closed and "closed" in repr(cache)
    with pytest.raises(kvhoist.ClosedError):
        cache.get("a")
    with pytest.raises(kvhoist.ClosedError):
        cache.store(["a"], [block(1)])
    with pytest.raises(kvhoist.ClosedError):
        queue.submit_load(["a"], [bytearray(BLOCK)])


def test_it_is_not_pickled_or_copied(cache):
    import copy

    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="[Cc]ache"):
            attempt(cache)
    with pytest.raises(TypeError, match="Queue"):
        pickle.dumps(cache.queue())


def test_by_value_counts_what_a_budget_has_no_room_for(store_dir):
    with pytest.raises(kvhoist.ConfigError, match="write_budget"):
        opened(store_dir, write_budget=1 << 40)
    cache = opened(store_dir, write_policy="by_value", write_budget=240 * (BLOCK + 8192), host_bytes=64 * BLOCK)
    cache.store([key(n) for n in range(10)], [block(n) for n in range(10)])
    # The budget of a new store begins with a tenth of an hour's writes: one block.
    cache.sync()
    stats = cache.stats()
    assert (stats["dirty"], stats["writes_over_budget"], stats["writes_declined"]) == (0, 9, 0)
    cache.close()


def test_write_back_is_on_disk_after_the_last_reference_is_gone(store_dir):
    cache = opened(store_dir, write_policy="write_back", host_bytes=64 * BLOCK)
    cache.store([key(n) for n in range(10)], [block(n) for n in range(10)])
    assert cache.stats()["dirty"] == 10
    del cache
    gc.collect()
    with opened(store_dir) as cache:
        assert cache.match_prefix([key(n) for n in range(10)]) == 10


# Property: whatever is done in whatever order, it is a dict that may forget.

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("load"), st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("remove"), st.integers(0, 15)),
        st.tuples(st.just("match"), st.lists(st.integers(0, 15), max_size=8)),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("sync"), st.none()),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("slots", [64, 8])
def test_it_is_a_dict(policy, slots, store_dir):
    """With room for all it forgets nothing; with less it may forget, and never gives another block's bytes."""
    runs = iter(range(10**9))

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(OPERATIONS)
    def run(operations):
        path = store_dir / str(next(runs))
        path.mkdir()
        options = dict(write_policy=policy, capacity=(1 << 20) + slots * BLOCK, host_bytes=6 * BLOCK)
        model, roomy = {}, slots == 64
        cache = opened(path, **options)
        try:
            for name, what in operations:
                if name == "store":
                    assert cache.store([key(n) for n in what], [block(n) for n in what]) == [True] * len(what)
                    model.update((n, block(n)) for n in what)
                elif name == "load":
                    out = [bytearray(b"\xee" * BLOCK) for _ in what]
                    for n, there, found in zip(what, cache.load([key(n) for n in what], out), out):
                        assert there == (n in model) if roomy else (not there or n in model)
                        assert bytes(found) == (model[n] if there else b"\xee" * BLOCK)
                elif name == "remove":
                    assert cache.remove(key(what)) == (what in model) or not roomy
                    model.pop(what, None)
                elif name == "match":
                    run_ = next((i for i, n in enumerate(what) if n not in model), len(what))
                    found = cache.match_prefix([key(n) for n in what])
                    assert found == run_ if roomy else found <= run_
                elif name == "sync":
                    cache.sync()
                else:
                    cache.close()
                    cache = opened(path, **options)
            cache.validate()
        finally:
            cache.close()

    run()


# Threads


def test_threads_share_a_cache(cache, seed):
    import random

    wrong, stop = [], threading.Event()

    def work(n):
        rng = random.Random(seed + n)
        try:
            for _ in range(60):
                picked = rng.sample(range(40), 4)
                names = [key(p) for p in picked]
                if rng.random() < 0.4:
                    cache.store(names, [block(p) for p in picked])
                out = [bytearray(BLOCK) for _ in picked]
                for p, there, found in zip(picked, cache.load(names, out), out):
                    if there and bytes(found) != block(p):
                        wrong.append(p)
                if rng.random() < 0.1:
                    cache.remove(names[0])
        except Exception as error:  # noqa: BLE001  Shown below.
            wrong.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    cache.validate()


def test_threads_store_from_one_buffer_at_a_time(cache):
    """Buffers that several calls lend at once: each keeps its own until it is done."""
    shared = bytearray(block(7))
    done = []
    threads = [threading.Thread(target=lambda n=n: done.extend(cache.store([f"s{n}"], [shared]))) for n in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert done == [True] * 16
    assert all(cache.get(f"s{n}") == block(7) for n in range(16))
    shared.clear()


def test_other_threads_run_while_one_waits(store_dir):
    """The interpreter's lock is not held: a call that waits for slots lets the thread run that makes them free."""
    with opened(store_dir, host_bytes=BLOCK) as cache:
        counted, stop = [0], threading.Event()

        def count():
            while not stop.is_set():
                counted[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        interval = sys.getswitchinterval()
        # So long that the other thread runs only where the lock is let go.
        sys.setswitchinterval(1)
        try:
            before = counted[0]
            cache.store([key(n) for n in range(32)], [block(n) for n in range(32)])
            assert counted[0] > before
            before = counted[0]
            # A flush may end before another thread has woken: not every time.
            for _ in range(50):
                cache.sync()
                if counted[0] > before:
                    break
            assert counted[0] > before
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            thread.join()


# submit, eventfd, drain


def test_submissions_complete_once(cache):
    queue = cache.queue(depth=8)
    poll = select.poll()
    poll.register(queue.event_fd, select.POLLIN)
    assert poll.poll(0) == []
    tickets = [queue.submit_store([key(n)], [block(n)]) for n in range(8)]
    with pytest.raises(kvhoist.BusyError, match="depth"):
        queue.submit_store(["x"], [block(9)])
    done = {}
    while len(done) < 8:
        assert poll.poll(30_000), "nothing completed"
        done.update(queue.drain())
    assert done == {ticket: [True] for ticket in tickets} and queue.outstanding == 0
    assert poll.poll(0) == []
    out = [bytearray(BLOCK) for _ in range(2)]
    ticket = queue.submit_load([key(3), "no"], out)
    assert poll.poll(30_000) and queue.drain() == [(ticket, [True, False])]
    assert bytes(out[0]) == block(3)
    out[0].clear()


def test_a_queue_that_is_dropped_waits_for_its_memory(cache):
    memory = [bytearray(BLOCK) for _ in range(16)]
    cache.store([key(n) for n in range(16)], [block(n) for n in range(16)])
    queue = cache.queue()
    for n in range(16):
        queue.submit_load([key(n)], [memory[n]])
    del queue
    gc.collect()
    for b in memory:
        b.clear()  # A BufferError, or worse, if a load still used it.


# asyncio


def test_awaiting(cache):
    async def main():
        keys = [key(n) for n in range(30)]
        await asyncio.gather(*(cache.store_async([k], [block(n)]) for n, k in enumerate(keys)))
        found = await asyncio.gather(*(cache.fetch(k) for k in keys), cache.fetch("no"))
        assert found == [block(n) for n in range(30)] + [None]
        with pytest.raises(kvhoist.ArgumentError):
            await cache.load_async(["a"], [bytearray(3)])

    asyncio.run(main())
    asyncio.run(main())  # Another loop.


def test_a_cancelled_load_keeps_its_memory_until_it_has_ended(cache):
    cache.store([key(n) for n in range(32)], [block(n) for n in range(32)])

    async def main():
        memory = [bytearray(BLOCK) for _ in range(32)]
        tasks = [asyncio.create_task(cache.load_async([key(n)], [memory[n]])) for n in range(32)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
        assert results[1::2] == [[True]] * 16
        face = cache._loops[asyncio.get_running_loop()]
        while face._waiting:
            await asyncio.sleep(0.001)
        for n, b in enumerate(memory):
            assert bytes(b) in (block(n), bytes(BLOCK))
            b.clear()
        # And the loop is as before.
        assert await cache.fetch(key(5)) == block(5)

    asyncio.run(main())


def test_a_deadline_of_asyncio_ends_the_wait(cache):
    async def main():
        cache.store(["a"], [block(1)])
        try:
            await asyncio.wait_for(cache.fetch("a"), 1e-9)
        except asyncio.TimeoutError:
            pass
        assert await cache.fetch("a") == block(1)

    asyncio.run(main())


# fork


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_the_parent_goes_on(store_dir):
    cache = opened(store_dir)
    region = cache.register_host(bytearray(BLOCK))
    queue = cache.queue()
    cache.store(["a"], [block(1)])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for attempt in (
                lambda: cache.get("a"), lambda: cache.store(["b"], [block(2)]), cache.close, cache.stats, queue.drain,
                region.unregister, lambda: cache.match_prefix(["a"]),
            ):  # fmt: skip
                with pytest.raises(kvhoist.ForkError, match="another process"):
                    attempt()
            del cache, queue, region
            gc.collect()
            # A cache of its own works.
            with kvhoist.Cache(block_bytes=16) as own:
                own.store(["x"], [bytes(16)])
                status = 0 if own.get("x") == bytes(16) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.get("a") == block(1)
    cache.store(["c"], [block(3)])
    cache.close()
    with opened(store_dir) as cache:
        assert cache.match_prefix(["a", "c"]) == 2


# kill

CHILD = """
import sys, kvhoist
block, path = 8192, sys.argv[1]
sizes = dict(block_bytes=block, host_bytes=64 * block, capacity=(1 << 20) + 256 * block)
cache = kvhoist.Cache(path, direct_io="prefer", **sizes)
n = int(sys.argv[2])
while True:
    keys = [f"{i:064x}" for i in range(n, n + 16)]
    cache.store(keys, [i.to_bytes(4, "little") * (block // 4) for i in range(n, n + 16)])
    n += 16
    print(n, flush=True)
"""


def test_a_killed_process_leaves_whole_blocks_or_none(store_dir, seed):
    import random

    rng = random.Random(seed)
    stored = 0
    for _ in range(5):
        first = stored
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(store_dir), str(first)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(rng.randrange(1, 6)):
            stored = int(child.stdout.readline())
        time.sleep(rng.random() * 0.01)  # To be in the middle of a store, not to wait for one.
        child.send_signal(signal.SIGKILL)
        child.wait()
        await_unlocked(store_dir)
        # It may have been far ahead of us, and what it stored meanwhile makes earlier blocks give way.
        stored = max([stored, *map(int, child.stdout)])
        child.stdout.close()
        with opened(store_dir, capacity=(1 << 20) + 256 * BLOCK) as cache:
            for n in range(max(0, stored - 200), stored + 64):
                found = cache.get(key(n))
                assert found in (None, block(n)), n
                # The last ones are younger than all that had to make way.
                assert found is not None or n >= stored or n < stored - 64
            cache.validate()


def test_the_examples_in_the_docs_run(store_dir, monkeypatch):
    import doctest

    monkeypatch.setenv("TMPDIR", str(store_dir))
    for module in (kvhoist, kvhoist._values):
        failed, tried = doctest.testmod(module)
        assert tried > 0 and failed == 0


def test_chunks_of_any_names_have_keys_of_their_own(seed):
    rng = random.Random(seed)
    whole = rng.randbytes(64)
    names = [whole[:length] for length in range(65)]
    # As an engine has them: one hash in several groups, and hashes that differ in one byte.
    names += [whole[:32] + group.to_bytes(4, "big") for group in range(1, 300)]
    names += [bytes(n) + b"\1" + bytes(35 - n) for n in range(28)]
    keys = chunk_keys(list(names))
    assert all(len(key) == 32 for key in keys)
    assert len(set(keys)) == len(set(names)) == len(names)
    assert chunk_keys(list(names)) == keys
    with pytest.raises(kvhoist.ArgumentError):
        chunk_keys(["a name"])


def test_answers_are_the_programs_own_objects():
    there, lost, gone = (hashlib.sha256(name).digest() + bytes(4) for name in (b"a", b"b", b"c"))
    hit, miss, retry, known = object(), object(), object(), {}
    with kvhoist.Cache(block_bytes=16, host_bytes="1MiB") as cache:
        cache.store(chunk_keys([there, lost]), [bytes(16)] * 2)
        answer = cache.answers(hit, miss, known).answer
        assert answer(there) is answer(lost, "whoever asks") is hit
        assert answer(gone) is answer(None) is answer("a name") is miss
        known |= {lost: miss, gone: retry}
        assert [answer(name) for name in (there, lost, gone)] == [hit, miss, retry]
        known.clear()
        cache.remove(*chunk_keys([there]))
        assert [answer(name) for name in (there, lost, gone)] == [miss, hit, miss]
    assert answer(lost) is miss, "a cache that is closed has nothing"
