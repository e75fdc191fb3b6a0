"""asyncio over a queue of submissions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections import deque
from typing import Any, Callable

from .errors import BusyError

#: Submissions that one event loop may have outstanding.
LOOP_DEPTH = 65_536


class LoopQueue:
    """One event loop's queue: its completions as futures of the loop.

    The loop watches the eventfd only while something is outstanding, so that nothing keeps the cache alive in an idle
    loop, nor the descriptor in one that goes on without it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: Any) -> None:
        # Not the loop itself: this is a value under its key.
        self._loop = weakref.ref(loop)
        self._queue = queue
        self._waiting: dict[int, asyncio.Future] = {}
        #: Of the submission that waits for room; the others wait behind it.
        self._turn = asyncio.Lock()
        self._drained = asyncio.Event()
        #: Drained, and not handed on yet.
        self._completions: deque[tuple[int, list]] = deque()

    async def submit(self, begin: Callable[[Any], int]) -> "asyncio.Future[list]":
        """Begins a submission once the queue has room for it. Cancelled while it waits for room, it begins nothing.

        Raises BusyError where others have taken the room, and what this loop has outstanding will free none.
        """
        async with self._turn:
            while True:
                try:
                    return self._begin(begin)
                except BusyError:
                    if not self._queue.outstanding:
                        raise
                self._drained.clear()
                await self._drained.wait()

    def _begin(self, begin: Callable[[Any], int]) -> "asyncio.Future[list]":
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
        loop = self._loop()
        assert loop is not None, "it calls this"
        try:
            # Drained and kept by one call into C: no signal handler runs in between.
            self._completions.extend(itertools.chain.from_iterable(iter(self._queue.drain, [])))
            self._drained.set()
            while self._completions:
                ticket, results = self._completions[0]
                # None: its submitter was interrupted before it could wait.
                future = self._waiting.get(ticket)
                if future is not None and not future.done():
                    future.set_result(results)
                self._waiting.pop(ticket, None)
                self._completions.popleft()
            self._watch_no_longer_than_needed(loop)
        except BaseException:
            # A signal handler raised. The loop may go on, also to cancel its tasks, and they wait for the rest.
            loop.call_soon(self._drain)
            raise

    def _watch_no_longer_than_needed(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._queue.outstanding:
            loop.remove_reader(self._queue.event_fd)

    def is_over(self) -> bool:
        """Whether a loop that is closed, and drains no more, has nothing outstanding."""
        self._queue.drain()
        return not self._queue.outstanding


async def ended(future: asyncio.Future) -> None:
    """Returns when a future has ended, however often it is cancelled: the work behind it uses the caller's memory."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    future.exception()  # Nobody else gets it.
