"""Pages of an engine's device pools, host memory and drives behind them: the linker's parts that need no engine."""

from __future__ import annotations

import logging
import queue
import select
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, compress, islice
from typing import Any, Callable, NamedTuple, Sequence

import numpy

from .._guard import Failures
from ..cache import Cache
from ..errors import Error
from ..service.space import ServiceSpace

logger = logging.getLogger(__name__)

#: The share of host memory's slots that requests may hold between a lookup and the end of their load.
HELD_SHARE = 4

#: Seconds for which a page is not offered that could not be read for a moment, or no page where a service refused a
#: load; twice as long after each further time, up to the second of these.
_UNREAD_S, _UNREAD_S_MAX = 60.0, 960.0

#: What is known of a page that can be read: until when it is not offered, and for how many seconds that is.
_READ = (0.0, _UNREAD_S / 2)

#: Pages that could not be read that are remembered.
_UNREAD_MAX = 65_536


class Piece(NamedTuple):
    """One page's bytes in one buffer: row `n` of the buffer's pool has `nbytes` at `address + n * stride`."""

    #: Which of the component's pools it belongs to: pools number their rows on their own.
    pool: int
    address: int
    stride: int
    nbytes: int
    #: The first layer of the model that reads it.
    layer: int


class Pages:
    """The pages of one component: a cache, or a space of a node's service, whose blocks are the bytes of a page in all buffers, layer after layer.

    Methods raise; the linker catches.
    """

    def __init__(self, name: str, pieces: Sequence[Piece], cache: Cache | ServiceSpace, offer: str) -> None:
        self.name, self.cache = name, cache
        #: Layers of the model that have bytes here, in order.
        self.layers = sorted({piece.layer for piece in pieces})
        self._layer_of = [self.layers.index(piece.layer) for piece in pieces]
        self._sizes = [piece.nbytes for piece in pieces]
        self._pools = numpy.array([piece.pool for piece in pieces])
        self._bases = numpy.array([piece.address for piece in pieces], dtype=numpy.int64)
        self._strides = numpy.array([piece.stride for piece in pieces], dtype=numpy.int64)
        self._offered: tuple[str, ...] = ("device", "host") if offer == "host" else ("device", "host", "disk")
        self._queue = cache.queue(1)
        #: Submissions of the queue that have not been drained.
        self._submitted = 0
        #: Pages that could not be read: until when they are not offered, and for how many seconds that is. Those of the
        #: last failure come last.
        self._unread: dict[str, tuple[float, float]] = {}
        #: The same of all pages, since the service refused a load.
        self._refused = _READ
        #: Slots of host memory that requests hold, and may hold.
        self.held, self.held_max = 0, cache.stats()["tiers"]["host"]["slots"] // HELD_SHARE

    def _addresses(self, rows: Sequence[Sequence[int]]) -> Any:
        """The addresses of all pieces of pages, page after page; `rows` are the rows of each pool."""
        numbers = numpy.array(rows, dtype=numpy.int64)
        return numpy.ascontiguousarray(self._bases + numbers[self._pools].T * self._strides)

    def tiers(self, keys: Sequence[str]) -> list[str]:
        """The tier of each leading page that is offered."""
        now = time.monotonic()
        if now < self._refused[0]:
            return []
        found = self.cache.tiers(keys)
        for at, (key, tier) in enumerate(zip(keys, found)):
            if tier not in self._offered or self._is_unread(key, now):
                return found[:at]
        return found

    def there(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page is offered."""
        now = time.monotonic()
        if now < self._refused[0]:
            return [False] * len(keys)
        if "disk" in self._offered:
            found = self.cache.contains_each(keys)
            return [there and not self._is_unread(key, now) for key, there in zip(keys, found)]
        return [len(self.tiers([key])) == 1 for key in keys]

    def hold(self, keys: Sequence[str], part: int = 1) -> Any:
        """Holds those of the pages that are in host memory, as far as there is room, or in this part of the room."""
        held = self.cache.hold(keys, -(-max(self.held_max - self.held, 0) // part))
        self.held += len(held)
        return held

    def release(self, held: Any) -> None:
        """Lets pages go that are held. Again: does nothing."""
        self.held -= len(held)
        held.release()

    def load(self, keys: Sequence[str], rows: Sequence[Sequence[int]]) -> Any:
        """Begins to load pages into rows of the pools, layer by layer. Offers none for a while if a service refuses it."""
        try:
            return self.cache.load_layers(keys, self._addresses(rows), self._sizes, self._layer_of)
        except Error:
            # One that is there refuses all loads, as where it lacks the memory. Of one that is away nothing is offered.
            if isinstance(self.cache, ServiceSpace) and self.cache.connected:
                self.refused()
            raise

    def store(self, keys: Sequence[str], rows: Sequence[Sequence[int]]) -> list:
        """Stores the pages of a chain out of rows of the pools: for each True, False, or why not. Waits."""
        # `select` takes no descriptor from 1024 on, and a server with many connections has such.
        poll = select.poll()
        poll.register(self._queue.event_fd, select.POLLIN)
        while self._submitted:
            # A wait that raised has left its submission: the queue has room for one.
            poll.poll()
            self._submitted -= len(self._queue.drain())
        self._queue.submit_store_pages(keys, self._addresses(rows), self._sizes)
        self._submitted = 1
        while not (ended := self._queue.drain()):
            poll.poll()
        self._submitted = 0
        return ended[0][1]

    def not_read(self, keys: Sequence[str]) -> None:
        """Offers these pages no more for a while, unless they are gone: a cache drops a page that is bad, and what is
        stored in its place is another. A page that stays is right, and could not be read for a moment.

        Who stores it meanwhile stores nothing: it is there. So only time tells whether it can be read.
        """
        # The requests of a batch that begin alike load the same pages.
        keys = list(dict.fromkeys(keys))
        # A service may be late with its answer.
        there = self.cache.contains_each(keys) if isinstance(self.cache, Cache) else [True] * len(keys)
        for key in compress(keys, there):
            self._unread[key] = _longer(self._unread.pop(key, _READ))
        for key in list(islice(self._unread, max(0, len(self._unread) - _UNREAD_MAX))):
            del self._unread[key]

    def refused(self) -> None:
        """Offers no page for a while: the service takes no load."""
        self._refused = _longer(self._refused)

    def was_read(self, keys: Sequence[str]) -> None:
        """Forgets that these pages could not be read, and a pause of all pages that is over."""
        # Of one that goes on, the load had begun before.
        if keys and time.monotonic() >= self._refused[0]:
            self._refused = _READ
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)

    def retire(self) -> None:
        """Offers no page any more: the device is out of service until the process ends."""
        self._offered = ()

    def _is_unread(self, key: str, now: float) -> bool:
        unread = self._unread.get(key)
        return unread is not None and now < unread[0]


def _longer(last: tuple[float, float]) -> tuple[float, float]:
    """The pause that follows this one: until when it lasts, and for how many seconds that is. One that goes on stays:
    what failed meanwhile had begun before it."""
    now, pause = time.monotonic(), min(2 * last[1], _UNREAD_S_MAX)
    return last if now < last[0] else (now + pause, pause)


class Held(NamedTuple):
    """What a request's last lookup has found, held for its load."""

    until: float
    #: The tier of each page of the longest prefix.
    found: list[str]
    #: Of each component: its pages, and what is held of them for the longest prefix.
    parts: list[tuple[Pages, Any]]
    #: The same for the shorter ones alone.
    shorter: list[tuple[Pages, Any]]

    def release(self) -> None:
        for pages, held in self.parts + self.shorter:
            pages.release(held)

    def release_shorter(self) -> None:
        for pages, held in self.shorter:
            pages.release(held)


class Part(NamedTuple):
    """Pages of one component, and their rows in each of its pools."""

    pages: Pages
    keys: list[str]
    rows: list[list[int]]


class Batch:
    """The loads of the requests of one batch, all under way at once.

    They begin when all events that `behind` records have happened, on the thread of `begins`; without events at once.
    """

    def __init__(
        self, rids: Sequence[str], parts: Sequence[Part], behind: Callable[[], Sequence[Any]],
        begins: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        self.rids = list(rids)
        self.error: Exception | None = None
        #: Of each component: its pages, all their keys, and their load.
        self._loads: list[tuple[Pages, list[str], Any]] = []
        #: How many of each component's layers a stream waits for already.
        self._waited: dict[int | None, list[int]] = {}
        self._begun: Future[None] | None = None
        try:
            events = list(behind())
            if events:
                self._begun = begins.submit(self._begin, parts, events)
            else:
                # On this thread: the other one's turn at the interpreter would only delay the first layer.
                self._begin(parts, events)
        except Exception as error:
            self.error = error

    def _begin(self, parts: Sequence[Part], events: Sequence[Any]) -> None:
        try:
            for event in events:
                event.synchronize()
            for pages in dict.fromkeys(part.pages for part in parts):
                mine = [part for part in parts if part.pages is pages]
                keys = [key for part in mine for key in part.keys]
                rows = [list(chain.from_iterable(of_pool)) for of_pool in zip(*(part.rows for part in mine))]
                self._loads.append((pages, keys, pages.load(keys, rows)))
        except Exception as error:
            # What has begun is waited for like all else.
            self.error = error

    def _have_begun(self) -> None:
        """Returns when the loads are under way, or have failed to begin."""
        if self._begun is not None:
            self._begun.result()

    def wait(self, layer: int, stream: int | None) -> int:
        """Waits for all layers up to this one, `stream` on the device where there is one. Returns for how many."""
        self._have_begun()
        waited = self._waited.setdefault(stream, [0] * len(self._loads))
        count = 0
        for at, (pages, _, load) in enumerate(self._loads):
            while waited[at] < len(pages.layers) and pages.layers[waited[at]] <= layer:
                try:
                    load.wait(waited[at], stream)
                except Exception as error:
                    logger.warning("kvhoist: a stream cannot wait for a layer, so its thread does: %s", error)
                    load.layer(waited[at])
                waited[at] += 1
                count += 1
        return count

    def finish(self) -> list[tuple[Pages, list[tuple[str, object]]]]:
        """Waits for the end of all loads. Of each component with pages that are not there: their keys, and why each."""
        self._have_begun()
        failed = []
        for pages, keys, load in self._loads:
            results = load.blocks()
            pages.was_read([key for key, result in zip(keys, results) if result is True])
            missing = [(key, result) for key, result in zip(keys, results) if result is not True]
            if missing:
                failed.append((pages, missing))
        return failed


class Offloads:
    """A thread that stores pages behind the forward, one node of the tree after the other."""

    def __init__(self, name: str, failures: Failures) -> None:
        self._failures = failures
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.results: queue.Queue[bool] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offload(self, store: Callable[[], bool]) -> None:
        """Puts one result into `results` when `store` has ended."""
        self._tasks.put(lambda: self.results.put(self._failures.guarded("offload", False, store)))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            self._tasks.task_done()
        self._tasks.task_done()

    def join(self) -> None:
        """Waits for all tasks."""
        self._tasks.join()

    def close(self) -> None:
        """Ends the thread behind its tasks."""
        self._tasks.put(None)
        self._thread.join()


class Figures(Counter):
    """What the linker has done, by name; `described` is one line of the log."""

    def described(self) -> str:
        """All figures that are not zero."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.items()) if count) or "none"
