"""The jobs of an engine. A job is a number of submissions to a queue, and ends when all of them have ended."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Callable, Collection, Iterable, NamedTuple, Sequence

logger = logging.getLogger(__name__)


class Submission(NamedTuple):
    """A part of a job."""

    #: What is moved, in the engine's names.
    names: Sequence[Any]
    #: Submits the blocks of all of it to a queue, and returns the ticket.
    submit: Callable[[Any], int]
    #: The number of blocks of each; one where it is not given.
    blocks: Sequence[int] | None = None


@dataclass
class Ended:
    """A job that has ended: each of its names is in `good` or in `failed`."""

    job_id: int
    is_load: bool
    #: What was moved whole.
    good: list
    #: The first error of everything else; `False` for what was not found.
    failed: dict
    seconds: float


@dataclass
class _Job:
    is_load: bool
    started: float
    good: list = field(default_factory=list)
    failed: dict = field(default_factory=dict)
    #: Submissions that have not ended, by their tickets.
    submissions: dict[int, Submission] = field(default_factory=dict)


class JobTable:
    """The jobs over one queue, for any thread."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        #: The job of each ticket.
        self._owner: dict[int, int] = {}
        self._ended: list[Ended] = []

    @property
    def under_way(self) -> Collection[int]:
        """The jobs that have not ended."""
        with self._lock:
            return set(self._jobs)

    @property
    def loads(self) -> int:
        """How many of them are loads."""
        with self._lock:
            return sum(job.is_load for job in self._jobs.values())

    @property
    def has_ended(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._ended)

    def begin(self, job_id: int, is_load: bool, submissions: Iterable[Submission]) -> None:
        """Begins a job. A submission that cannot begin fails its names."""
        with self._lock:
            job = self._jobs[job_id] = _Job(is_load, time.monotonic())
            for one in submissions:
                try:
                    ticket = one.submit(self.queue)
                except Exception as error:
                    job.failed.update(dict.fromkeys(one.names, error))
                    continue
                job.submissions[ticket] = one
                self._owner[ticket] = job_id
            self._end_if_done(job_id, job)

    def fail(self, job_id: int, is_load: bool, names: Iterable[Any]) -> None:
        """Ends a job that did not begin."""
        with self._lock:
            self._ended.append(Ended(job_id, is_load, [], dict.fromkeys(names, "not begun"), 0.0))

    def take(self) -> list[Ended]:
        """The jobs that have ended since the last call, as far as `drain` has seen it."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Takes what the queue has completed. Does not wait."""
        with self._lock:
            for ticket, results in self.queue.drain():
                # Each on its own: an engine waits for ever for a job whose end is not reported.
                try:
                    self._complete(ticket, results)
                except Exception:
                    logger.exception("kvhoist: the end of submission %d could not be taken", ticket)

    def _complete(self, ticket: int, results: list) -> None:
        job_id = self._owner.pop(ticket)
        job = self._jobs[job_id]
        one = job.submissions.pop(ticket)
        at = 0
        for name, blocks in zip(one.names, one.blocks or repeat(1)):
            bad = [result for result in results[at : at + blocks] if result is not True]
            at += blocks
            if bad:
                job.failed[name] = next((why for why in bad if why is not False), False)
            else:
                job.good.append(name)
        self._end_if_done(job_id, job)

    def _end_if_done(self, job_id: int, job: _Job) -> None:
        if not job.submissions:
            del self._jobs[job_id]
            self._ended.append(Ended(job_id, job.is_load, job.good, job.failed, time.monotonic() - job.started))
