"""Ctrl-C in a call that waits: it ends the wait, and nothing that the call left under way does harm."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import select
import signal
import struct
import sys
import threading
import weakref
from types import SimpleNamespace

import nodes
import pytest

import kvhoist
from kvhoist._event_loops import LoopQueue

BLOCK = 8192
PAGE = mmap.PAGESIZE


class Stalled:
    """Memory that whoever touches it first waits for, until `release`: its pages are to come from this program."""

    UFFDIO_API, UFFDIO_REGISTER, UFFDIO_ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04

    def __init__(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # userfaultfd(O_CLOEXEC | UFFD_USER_MODE_ONLY), on x86-64 and AArch64.
        number = 323 if os.uname().machine == "x86_64" else 282
        self.fd = libc.syscall(number, os.O_CLOEXEC | 1)
        if self.fd < 0:
            pytest.skip(f"no userfaultfd here: {os.strerror(ctypes.get_errno())}")
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # Cannot be released while a movement uses it.
        self.view = memoryview(memory)
        self.nbytes, self.released = nbytes, False
        fcntl.ioctl(self.fd, self.UFFDIO_API, struct.pack("QQQ", 0xAA, 0, 0))
        fcntl.ioctl(self.fd, self.UFFDIO_REGISTER, struct.pack("QQQQ", self.address, nbytes, 1, 0))

    def await_touch(self) -> None:
        """Returns when somebody waits for a page."""
        assert len(os.read(self.fd, 32)) == 32

    def release(self) -> None:
        if not self.released:
            self.released = True
            for page in range(self.address, self.address + self.nbytes, PAGE):
                try:
                    fcntl.ioctl(self.fd, self.UFFDIO_ZEROPAGE, bytearray(struct.pack("QQQq", page, PAGE, 0, 0)))
                except OSError as error:
                    if error.errno != errno.EEXIST:
                        raise
            os.close(self.fd)


@pytest.fixture
def stalled():
    made = Stalled(BLOCK)
    yield made
    made.release()


class Handled(Exception):
    """What the signal's handler raises, so that nothing else is taken for it."""


@pytest.fixture
def interrupted():
    """Makes a call, in which SIGINT comes, and expects that it ends with what the handler raises."""

    def handler(_signal, _frame):
        raise Handled

    def interrupted_in(call):
        go = threading.Lock()

        def kill():
            with go:
                os.kill(os.getpid(), signal.SIGINT)

        go.acquire()
        thread = threading.Thread(target=kill)
        thread.start()
        # So long that the other thread runs only where this one lets go of the interpreter's lock: in the call.
        switch = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            with pytest.raises(Handled):
                go.release()
                call()
        finally:
            sys.setswitchinterval(switch)
            thread.join()

    before = signal.signal(signal.SIGINT, handler)
    yield interrupted_in
    signal.signal(signal.SIGINT, before)


def in_memory(**settings):
    return kvhoist.Cache(block_bytes=BLOCK, host_bytes=4 * BLOCK, **settings)


def test_a_load_that_waits_is_interrupted_and_its_buffer_kept(stalled, interrupted):
    cache = in_memory()
    cache.store(["a"], [b"x" * BLOCK])
    interrupted(lambda: cache.load(["a"], [stalled.view]))
    with pytest.raises(BufferError):
        stalled.view.release()  # The load goes on.
    stalled.release()
    cache.close()
    assert stalled.view[:] == b"x" * BLOCK
    stalled.view.release()


def test_the_memory_of_an_interrupted_load_is_let_go_of_by_a_later_call(stalled, interrupted):
    with in_memory() as cache:
        cache.store(["a"], [b"x" * BLOCK])
        interrupted(lambda: cache.load(["a"], [stalled.view]))
        stalled.release()
        while True:
            cache.load(["a"], [bytearray(BLOCK)])
            try:
                stalled.view.release()
                break
            except BufferError:
                continue  # The load may end after a later one.


def test_unregister_is_interrupted_and_waits_again(stalled, interrupted):
    cache = in_memory()
    cache.store(["a"], [b"x" * BLOCK])
    region, queue = cache.register_host(stalled.view), cache.queue()
    queue.submit_load(["a"], [(region.address, BLOCK)])
    stalled.await_touch()
    for _ in range(2):
        interrupted(region.unregister)
        with pytest.raises(BufferError):
            stalled.view.release()
    stalled.release()
    region.unregister()
    assert stalled.view[:] == b"x" * BLOCK
    stalled.view.release()
    cache.close()


def test_a_close_that_waits_is_interrupted_and_goes_on(stalled, interrupted):
    cache = in_memory()
    cache.store(["a"], [b"x" * BLOCK])
    region, queue = cache.register_host(stalled.view), cache.queue()
    ticket = queue.submit_load(["a"], [(region.address, BLOCK)])
    stalled.await_touch()
    interrupted(cache.close)
    with pytest.raises(BufferError):
        stalled.view.release()
    stalled.release()
    cache.close()
    assert [done[0] for done in queue.drain()] == [ticket]
    stalled.view.release()


def test_an_open_that_waits_for_a_lock_is_interrupted(store_dir, interrupted):
    """Another process has the store locked; that its lock goes is waited for some time."""
    settings = dict(block_bytes=BLOCK, host_bytes="1MiB", capacity="4MiB", direct_io="prefer")
    kvhoist.Cache(store_dir, **settings).close()
    (store,) = store_dir.iterdir()
    with open(store, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        interrupted(lambda: kvhoist.Cache(store_dir, **settings))


def test_a_loop_is_not_held_up(stalled):
    """What a coroutine awaits keeps nobody else waiting."""

    async def main(cache):
        loading = asyncio.create_task(cache.load_async(["a"], [stalled.view]))
        await asyncio.sleep(0)
        stalled.await_touch()
        assert not loading.done()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        stalled.release()

    with in_memory() as cache:
        cache.store(["a"], [b"x" * BLOCK])
        asyncio.run(main(cache))


def test_a_cancelled_store_has_ended_when_its_coroutine_has(stalled):
    """Its memory may change then."""

    async def main(cache):
        storing = asyncio.create_task(cache.store_async(["a"], [stalled.view]))
        await asyncio.sleep(0)
        stalled.await_touch()
        for _ in range(3):
            storing.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        waits = not storing.done()
        stalled.release()
        assert waits
        with pytest.raises(asyncio.CancelledError):
            await storing
        stalled.view[:] = b"x" * BLOCK
        assert cache.get("a") == bytes(BLOCK)

    with in_memory() as cache:
        asyncio.run(main(cache))


def test_a_closed_loop_is_let_go_of_once_its_cancelled_calls_have_ended(stalled):
    async def cancelled(cache):
        loading = asyncio.create_task(cache.load_async(["a"], [stalled.view]))
        await asyncio.sleep(0)
        stalled.await_touch()
        loading.cancel()
        return weakref.ref(asyncio.get_running_loop())

    with in_memory() as cache:
        cache.store(["a"], [b"x" * BLOCK])
        loop = asyncio.run(cancelled(cache))
        (queue,) = cache._loops.values()
        cache._forget_closed_loops()
        gc.collect()
        is_kept = loop() is not None
        stalled.release()
        assert is_kept, "its load goes on"
        ended = select.poll()
        ended.register(queue._queue.event_fd, select.POLLIN)
        assert ended.poll(1000 * nodes.PATIENCE_S)
        del queue
        assert asyncio.run(cache.fetch("b")) is None
        gc.collect()
        assert loop() is None and not cache._loops


def test_a_burst_of_calls_waits_for_room(stalled):
    """While the engine's thread is away, as here in a copy, no movement ends."""

    async def main(cache):
        loading = asyncio.create_task(cache.load_async(["a"], [stalled.view]))
        await asyncio.sleep(0)
        stalled.await_touch()
        fetching = [asyncio.create_task(cache.fetch("a")) for _ in range(2000)]
        await asyncio.sleep(0)
        fetching.pop().cancel()
        await asyncio.sleep(0)
        wait = cache._loop()._turn.locked() and not any(task.done() for task in fetching)
        stalled.release()
        assert wait
        assert await loading == [True]
        assert set(await asyncio.gather(*fetching)) == {b"x" * BLOCK}

    with in_memory(movements_max=100) as cache:
        cache.store(["a"], [b"x" * BLOCK])
        asyncio.run(main(cache))


def test_a_drain_that_is_interrupted_hands_the_rest_on():
    class Interrupted(asyncio.Future):
        """Whose result a signal comes with, once."""

        signals = [Handled]

        def set_result(self, result):
            if self.signals:
                raise self.signals.pop()
            super().set_result(result)

    async def main():
        completed = iter([[(1, ["a"]), (2, ["b"])]])
        native = SimpleNamespace(drain=lambda: next(completed, []), outstanding=0, event_fd=0)
        queue = LoopQueue(asyncio.get_running_loop(), native)
        queue._waiting = {1: Interrupted(), 2: asyncio.Future()}
        futures = list(queue._waiting.values())
        with pytest.raises(Handled):
            queue._drain()
        assert queue._drained.is_set(), "or calls wait for room that they have"
        await asyncio.sleep(0)
        assert [future.done() and future.result() for future in futures] == [["a"], ["b"]]
        assert not queue._waiting

    asyncio.run(main())
