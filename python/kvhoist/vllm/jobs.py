"""Chunks of a cache, and the jobs that move them. Needs no engine."""

from __future__ import annotations

import logging
import select
from typing import Any, Callable, Collection, Iterable, Sequence

from .._jobs import Ended, JobTable, Submission
from .._native import chunk_keys

logger = logging.getLogger(__name__)

#: Most jobs under way. An engine has a few for each of its requests.
JOBS_MAX = 16_384

#: Seconds between log lines about a wait for jobs.
_LONG_WAIT_S = 10


class ChunkJobs:
    """The chunks of a cache, and the jobs that move them.

    Methods raise, and the adapter handles it. Only `drain` waits.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.jobs = JobTable(cache.queue(JOBS_MAX))

    def contains(self, name: bytes) -> bool:
        """Whether one chunk is there. No I/O."""
        return self.cache.contains(*chunk_keys([name]))

    def answers(
        self,
        resident: Any,
        absent: Any,
        known: dict[bytes, Any],
        prefix: Callable[[Any], Collection[bytes]] | None = None,
    ) -> Callable[[bytes, Any], Any]:
        """A fast `contains` with the engine's own objects as answers, for every key of every prompt.

        Answers in `known` override the index. `prefix` names all keys of a request, for a store that asks for them at
        once.
        """
        return self.cache.answers(resident, absent, known).answer

    def touch(self, names: Iterable[bytes]) -> None:
        """Counts a use of chunks, given in the order of their prefix. No I/O."""
        self.cache.touch(chunk_keys(list(names)))

    def release(self, names: Iterable[bytes]) -> None:
        """Releases a chain, given in the order of its prefix. No I/O."""
        self.cache.release(chunk_keys(list(names)))

    def keep(self, names: Iterable[bytes], seconds: float) -> None:
        """Keeps a chain, given in the order of its prefix, for so many seconds. No I/O."""
        self.cache.keep(chunk_keys(list(names)), seconds)

    def begin(self, job_id: int, is_load: bool, parts: Iterable[tuple[Sequence[bytes], Callable[[Any], int]]]) -> None:
        """Begins a job of submissions: (keys, function that submits them to a queue and returns the ticket)."""
        self.jobs.begin(job_id, is_load, [Submission(list(keys), submit) for keys, submit in parts])

    def fail(self, job_id: int, keys: Sequence[bytes], is_load: bool) -> None:
        """Ends a job that did not begin."""
        self.jobs.fail(job_id, is_load, keys)

    def finished(self) -> list[Ended]:
        """The jobs that have ended since the last call. Does not wait."""
        self.jobs.drain()
        return self.jobs.take()

    def drain(self, job_ids: Collection[int] | None = None) -> None:
        """Waits until none of these jobs is under way, or no job at all; `finished` has their results.

        It has no deadline: the drive may still write to the memory.
        """
        poll = select.poll()
        poll.register(self.jobs.queue.event_fd, select.POLLIN)
        waited = 0
        while True:
            self.jobs.drain()
            running = set(self.jobs.under_way)
            if not (running if job_ids is None else running & set(job_ids)):
                return
            if not poll.poll(_LONG_WAIT_S * 1000):
                waited += _LONG_WAIT_S
                logger.warning("kvhoist: %d jobs still under way after %d s", len(running), waited)
