"""Memory that Python lends: it is kept while a movement uses it, and let go of afterwards, however things end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import re
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import kvhoist

BLOCK = 8192


def opened(path, **more):
    values = dict(block_bytes=BLOCK, host_bytes=8 * BLOCK, capacity=(1 << 20) + 64 * BLOCK, direct_io="prefer")
    return kvhoist.Cache(path, **{**values, **more})


@pytest.fixture
def cache(store_dir):
    with opened(store_dir) as cache:
        yield cache


def block(n: int) -> bytes:
    return n.to_bytes(4, "little") * (BLOCK // 4)


def key(n: int) -> str:
    return f"{n:064x}"


def python(program: str, *arguments) -> subprocess.CompletedProcess:
    """Another interpreter: for what may hang, crash, or happens at its end."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


class Memory(bytearray):
    """A buffer object with attributes, finalizers and weak references."""


# Lending


def test_a_call_takes_more_buffers_than_may_be_registered(cache):
    pieces = [bytes([n % 251, n // 251]) for n in range(BLOCK // 2)]
    keys = [key(n) for n in range(3)]
    assert cache.store(keys, [pieces] * 3) == [True] * 3  # 12,288 buffers.
    into = [[bytearray(2) for _ in pieces] for _ in keys]
    assert cache.load(keys, into) == [True] * 3
    assert all(b"".join(parts) == b"".join(pieces) for parts in into)
    queue = cache.queue()
    ticket = queue.submit_load(keys[:2], into[:2])
    poll = select.poll()
    poll.register(queue.event_fd, select.POLLIN)
    assert poll.poll(60_000)
    done = queue.drain()
    assert done == [(ticket, [True, True])]
    for part in into[0]:
        part.clear()


def test_sequences_of_every_kind_are_taken(cache):
    from collections import deque

    keys = [key(n) for n in range(2)]
    blocks = [block(n) for n in range(2)]
    halves = tuple((b[:100], b[100:]) for b in blocks)
    for names, places in ((tuple(keys), tuple(blocks)), (deque(keys), deque(blocks)), (keys, halves)):
        assert cache.store(names, places) == [True] * 2
        assert [cache.get(k) for k in keys] == blocks and cache.match_prefix(names) == 2
        assert all(cache.remove(k) for k in keys)
    memory = bytearray(BLOCK)
    with cache.register_host(memory) as region:
        pairs = ((region.address, 100), (region.address + 100, BLOCK - 100))
        assert cache.store(keys[:1], (pairs,)) == [True]
    for flat in (bytes(BLOCK), bytearray(BLOCK), memoryview(bytes(BLOCK)), "text", 3, None):
        with pytest.raises(kvhoist.ArgumentError, match="^blocks: found .*, expected a sequence"):
            cache.store(["x"], flat)


# Regions


def test_every_caller_of_unregister_waits_for_the_loads(store_dir):
    """What a caller may free when it returns, no load writes to any longer."""
    big = 1 << 20
    with opened(store_dir, block_bytes=big, host_bytes=4 * big, capacity="64MiB", bypass_host=True) as cache:
        keys, blocks = [key(n) for n in range(32)], [bytes([n + 1]) * big for n in range(32)]
        cache.store(keys, blocks)
        for _ in range(3):
            memory = mmap.mmap(-1, 32 * big)
            region, queue, torn = cache.register_host(memory), cache.queue(), []
            barrier = threading.Barrier(4)

            def leave(region=region, memory=memory, barrier=barrier, torn=torn):
                barrier.wait()
                region.unregister()
                # Every load has ended: its block is there to the last byte.
                torn.extend(n for n in range(32) if memory[(n + 1) * big - 1] != n + 1)

            threads = [threading.Thread(target=leave) for _ in range(3)]
            [thread.start() for thread in threads]
            for n, k in enumerate(keys):
                queue.submit_load([k], [(region.address + n * big, big)])
            barrier.wait()
            [thread.join() for thread in threads]
            assert torn == []
            memory.close()


def test_a_finalizer_may_unregister_its_own_region():
    program = """
import kvhoist
class Memory(bytearray):
    def __del__(self):
        region.unregister()
        print("again", flush=True)
cache = kvhoist.Cache(block_bytes=4096)
region = cache.register_host(Memory(4096))
region.unregister()
print("done")
"""
    ended = python(program)
    assert (ended.returncode, ended.stdout.split()) == (0, ["again", "done"]), ended.stderr


def test_what_is_unregistered_is_forgotten(cache):
    seen = []
    for _ in range(100):
        memory = Memory(BLOCK)
        seen.append(weakref.ref(memory))
        region = cache.register_host(memory)
        region.unregister()
        assert sys.getrefcount(region) == 2, "somebody keeps it"
        del memory
    assert [ref for ref in seen if ref() is not None] == []
    # What is not stays registered, whether or not somebody keeps the region.
    memory = Memory(BLOCK)
    address = cache.register_host(memory).address
    gc.collect()
    assert cache.store([key(1)], [(address, BLOCK)]) == [True]
    cache.close()
    memory.clear()


# Cycles


def test_a_queue_in_a_cycle_with_its_memory_is_collected(cache):
    cache.store([key(1)], [block(1)])
    memory, queue = Memory(BLOCK), cache.queue()
    queue.submit_load([key(1)], [memory])
    memory.queue, gone = queue, weakref.ref(memory)
    del memory, queue
    gc.collect()
    assert gone() is None


def test_a_cache_in_a_cycle_with_registered_memory_is_collected():
    cache, memory = kvhoist.Cache(block_bytes=BLOCK), Memory(BLOCK)
    cache.register_host(memory)
    memory.cache, gone = cache, [weakref.ref(memory), weakref.ref(cache)]
    del memory, cache
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# The end of a cache


@pytest.mark.parametrize("who", ["the caller", "the interpreter"])
def test_what_a_close_has_raised_the_last_reference_does_not_report(store_dir, monkeypatch, who):
    reported = []
    cache = opened(store_dir)
    (store_dir / "kvhoist.store").unlink()
    if who == "the caller":
        with pytest.raises(kvhoist.UnavailableError, match="deleted"):
            cache.close()
    monkeypatch.setattr(sys, "unraisablehook", lambda told: reported.append(type(told.exc_value)))
    del cache
    assert reported == ([] if who == "the caller" else [kvhoist.UnavailableError])


# The end of the interpreter

AT_EXIT = """
import asyncio, sys, kvhoist
cache = kvhoist.Cache(sys.argv[1], block_bytes=4096, host_bytes="1MiB", capacity="4MiB", direct_io="prefer")
keys = [f"k{n}" for n in range(64)]
cache.store(keys, [bytes(4096)] * 64)
"""


@pytest.mark.parametrize(
    "program",
    [
        "queue = cache.queue()\nfor k in keys: queue.submit_load([k], [bytearray(4096)])",
        "region = cache.register_host(bytearray(4096))\nqueue = cache.queue()\n"
        "for k in keys: queue.submit_load([k], [(region.address, 4096)])\n",
        "async def main():\n"
        "    task = asyncio.create_task(cache.fetch('k1'))\n"
        "    await asyncio.sleep(0)\n"
        "    task.cancel()\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(main())\n",
    ],
    ids=["queue", "region", "cancelled"],
)
def test_an_interpreter_ends_in_silence_with_work_under_way(program, store_dir):
    ended = python(AT_EXIT + program, store_dir)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# asyncio


def test_a_ticket_without_a_waiter_holds_nobody_up(cache):
    cache.store([key(n) for n in range(8)], [block(n) for n in range(8)])

    async def main():
        assert await cache.fetch(key(0)) == block(0)
        (face,) = cache._loops.values()
        waiting = [asyncio.create_task(cache.fetch(key(n))) for n in range(1, 4)]
        await asyncio.sleep(0)
        # As where the submitter is interrupted right after its submission.
        face._queue.submit_load([key(4)], [bytearray(BLOCK)])
        waiting += [asyncio.create_task(cache.fetch(key(n))) for n in range(5, 8)]
        found = await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert found == [block(n) for n in (1, 2, 3, 5, 6, 7)]

    asyncio.run(main())


def test_a_loop_that_cannot_watch_submits_nothing(cache):
    async def main():
        loop = asyncio.get_running_loop()
        watch, loop.add_reader = loop.add_reader, None
        with pytest.raises(TypeError):
            await cache.store_async([key(1)], [block(1)])
        loop.add_reader = watch
        (face,) = cache._loops.values()
        assert face._queue.outstanding == 0
        assert await cache.fetch(key(1)) is None
        assert await cache.store_async([key(1)], [block(1)]) == [True]
        assert await cache.fetch(key(1)) == block(1)

    asyncio.run(main())


# fork


def _mappings() -> dict[int, int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(start, 16): int(end, 16) for start, end in (re.match(r"(\w+)-(\w+)", line).groups() for line in lines)}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_its_own_memory_where_the_parents_was(store_dir):
    """The engine's mappings are not inherited: a child's own may be there when it drops what it inherited."""
    cache = opened(store_dir, host_bytes="4MiB")
    region, queue = cache.register_host(bytearray(BLOCK)), cache.queue()
    cache.close()
    del cache
    # Before the fork: what a child allocates may lie where the parent's memory was.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    before = _mappings()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            holes = [start for start in before if start not in _mappings()]
            # A page of each, where nothing that the child has allocated lies.
            # PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
            own = [start for start in holes if libc.mmap(start, 4096, 1, 0x100022, -1, 0) == start]
            del region
            gc.collect()
            del queue
            gc.collect()
            after = _mappings().items()
            kept = [any(s <= start < e for s, e in after) for start in own]
            status = 0 if own and all(kept) else 2 if own else 3
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
