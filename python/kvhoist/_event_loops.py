"""asyncio over a queue of submissions."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any

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
