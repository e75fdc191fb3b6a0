"""asyncio over submissions: what `Cache` and `Client` have in common."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections import deque
from typing import Any, Sequence

#: Submissions that one event loop may have outstanding.
_LOOP_DEPTH = 65_536


class AsyncFace:
    """Coroutines over a queue of submissions for each event loop. Whoever has it has `_loops` and `queue`."""

    async def fetch(self: Any, key: str | bytes) -> bytes | None:
        """The bytes of a block, or None. Cancelled, the read may still finish and make the block resident."""
        block = bytearray(self.block_bytes)
        (found,) = await self.load_async([key], [block])
        return bytes(block) if found else None

    async def load_async(self: Any, keys: Sequence[str | bytes], blocks: Sequence[Any]) -> list:
        """``load`` for coroutines. Cancelled, the loads go on, and their memory is kept until they have ended."""
        return _raised(await self._loop().submit(lambda queue: queue.submit_load(keys, blocks)))

    async def store_async(
        self: Any, keys: Sequence[str | bytes], blocks: Sequence[Any], *, parent: str | bytes | None = None
    ) -> list:
        """``store`` for coroutines. Cancelled, the stores go on: the memory must not change until ``sync`` or later."""
        return _raised(await self._loop().submit(lambda queue: queue.submit_store(keys, blocks, parent)))

    async def remove_async(self: Any, key: str | bytes, *, durable: bool = False) -> bool:
        """``remove`` for coroutines, on a thread of the loop's executor. Cancelled, the removal goes on."""
        remove = functools.partial(self.remove, key, durable=durable)
        return await asyncio.get_running_loop().run_in_executor(None, remove)

    async def release_async(self: Any, keys: Sequence[str | bytes]) -> int:
        """``release`` for coroutines, on a thread of the loop's executor. Cancelled, the release goes on."""
        return await asyncio.get_running_loop().run_in_executor(None, self.release, keys)

    async def keep_async(self: Any, keys: Sequence[str | bytes], seconds: float) -> int:
        """``keep`` for coroutines, on a thread of the loop's executor. Cancelled, the blocks are kept all the same."""
        return await asyncio.get_running_loop().run_in_executor(None, self.keep, keys, seconds)

    def _loop(self: Any) -> "_LoopFace":
        loop = asyncio.get_running_loop()
        face = self._loops.get(loop)
        if face is None:
            face = self._loops[loop] = _LoopFace(loop, self.queue(_LOOP_DEPTH))
        return face


def _raised(results: list) -> list:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class _LoopFace:
    """One event loop's queue: its completions as futures of the loop.

    The loop watches the eventfd only while something is outstanding, so that nothing keeps the cache alive in an idle
    loop, nor the descriptor in one that goes on without it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: Any) -> None:
        # Not the loop itself: this is a value under its key.
        self._loop = weakref.ref(loop)
        self._queue = queue
        self._waiting: dict[int, asyncio.Future] = {}
        #: Drained, and not handed on yet.
        self._done: deque = deque()

    def submit(self, begin) -> "asyncio.Future[list]":
        loop = self._loop()
        assert loop is not None, "the coroutine that submits runs in it"
        future = loop.create_future()
        # Before the submission: whatever fails from here on, what completes is drained.
        if not self._queue.outstanding:
            loop.add_reader(self._queue.event_fd, self._drain)
        try:
            # A cancelled future stays: what it waits for goes on, and the memory with it.
            self._waiting[begin(self._queue)] = future
        except BaseException:
            self._watch_no_longer_than_needed(loop)
            raise
        return future

    def _drain(self) -> None:
        self._done.extend(self._queue.drain())
        while self._done:
            ticket, results = self._done.popleft()
            # None: its submitter was interrupted before it could wait.
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(results)
        loop = self._loop()
        assert loop is not None, "it calls this"
        self._watch_no_longer_than_needed(loop)

    def _watch_no_longer_than_needed(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._queue.outstanding:
            loop.remove_reader(self._queue.event_fd)
