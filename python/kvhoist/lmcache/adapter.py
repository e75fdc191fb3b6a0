"""kvhoist as a tier of LMCache: an L2 adapter of the type `plugin`, LMCache 0.5.

    lmcache server --l1-size-gb 64 --l2-adapter '{"type": "plugin", "module_path": "kvhoist.lmcache",
        "class_name": "KvhoistL2", "adapter_params": {"path": "/mnt/nvme/kvhoist", "capacity": "200GiB"}}'

`docs/lmcache.md` has the settings.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Callable, Iterable, Mapping, Sequence

import lmcache

from .._versions import supported

VERSION = supported(lmcache, "L2 adapters kvhoist.lmcache")
VERSION.check()
try:
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

    try:
        from lmcache.lmcache_native import Bitmap
    except ImportError:  # Before 0.5.6.
        from lmcache.native_storage_ops import Bitmap
except ImportError as error:
    raise ImportError(f"{VERSION.refusal()} ({error})") from error

from .._guard import Failures  # noqa: E402
from .._jobs import Ended  # noqa: E402
from .._misses import Misses  # noqa: E402
from .._native import __version__  # noqa: E402
from .._stores import Place, tier_settings  # noqa: E402
from .._values import config_error, parse_bytes, warn_of_keywords  # noqa: E402
from ..errors import ArgumentError, ClosedError, UnavailableError  # noqa: E402
from .announced import Announced  # noqa: E402
from .lock_times import LockTimes  # noqa: E402
from .object_names import ObjectNames, row_of  # noqa: E402
from .objects import ObjectStore, StoredObject  # noqa: E402
from .unread import Unread  # noqa: E402

logger = logging.getLogger(__name__)

#: Changes whenever stored objects would be read differently.
FORMAT = "lmcache-l2-v2"

DEFAULT_BLOCK_BYTES = 2 << 20

#: Objects whose place in a prefix is remembered from their lookup until they are stored.
_PREFIXES_MAX = 65_536

#: Age of the oldest store under way from which on no more are taken: those that wait then end in time.
_BEHIND_S = 60


class KvhoistL2(L2AdapterInterface):
    """Objects of LMCache's L1 on NVMe.

    The constructor raises for wrong settings. Later only calls after `close`, and :meth:`delete` of what it knows nothing
    of, raise into LMCache's threads: a failure is a miss or a failed task, a line in the log, and a count in
    ``counters``.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None, **more: Any) -> None:
        super().__init__()
        VERSION.warn()
        warn_of_keywords("KvhoistL2", more)
        if l1_memory_desc is None:
            raise config_error("l1_memory_desc", None, "an L1 in host memory: kvhoist reads and writes it in place")
        settings = dict(config)
        block_bytes = parse_bytes(settings.pop("block_bytes", DEFAULT_BLOCK_BYTES), "block_bytes")
        self._times = LockTimes.of_the_server()
        self.config = tier_settings(settings)
        failures = Failures(logger, "objects")
        self._guarded, self._failed = failures.guarded, failures.failed
        #: Failed calls by method; `objects` counts failed objects.
        self.counters = failures.counters
        #: Guards the fields below; never held during a call of LMCache or the store.
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._task_ids = itertools.count()
        #: Tasks under way, then results that LMCache has not taken yet.
        self._under_way: dict[int, _Task] = {}
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        #: Objects that a lookup found and no unlock has released.
        self._locked: Counter = Counter()
        self._names = ObjectNames(l1_memory_desc.align_bytes)
        #: For each object that a lookup did not find: the object before it in its prefix.
        self._before: OrderedDict[StoredObject, StoredObject] = OrderedDict()
        #: What is to be removed and is not yet: misses.
        self._doubted: set[StoredObject] = set()
        self._announced = Announced(self)
        self._unread = Unread()
        self._closed = False
        place = Place("lmcache", "l2", _identity(block_bytes, self.config.revision))
        self.store = ObjectStore(self.config, place, block_bytes, _pieces(l1_memory_desc), self._end)
        self._misses = Misses(self.store.cache)
        self._fds = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(3)]
        self._store_fd, self._lookup_fd, self._load_fd = self._fds
        self._announce(l1_memory_desc)

    def _announce(self, memory: Any) -> None:
        stats = self.store.cache.stats()
        disk = stats["tiers"]["disk"]
        logger.info(
            "kvhoist: L2 in %s: %d slots of %d-byte blocks, %d resident; storage %s, direct I/O %s; %d bytes of L1 "
            "registered, %d pinned by the ring",
            self.store.directories, disk["slots"], self.store.block_bytes, disk["resident"], stats["storage"],
            stats["direct_io"], memory.size, self.store.pinned,
        )  # fmt: skip

    # Descriptors

    def get_store_event_fd(self) -> int:
        """Readable when a store task has ended."""
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        """Readable when a load task has ended."""
        return self._load_fd

    # Store

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begins to store objects from L1. The task succeeds if all objects do; stored objects stay."""

        def begin(task_id: int, task: _Task) -> None:
            with self._lock:
                age = self._oldest_s(is_load=False)
                if age > _BEHIND_S:
                    raise UnavailableError(f"the drive is {age:.0f} s behind: nothing more is stored yet")
                after = [self._before.pop(one, None) for one in task.named]
            self.store.submit_store(task_id, task.named, _addresses(objects), after)

        unread = self._unread.take(keys)
        if unread:
            why = "their last load has failed, and LMCache before 0.5.6 may store what lay in their memory"
            self._failed("store", why, len(unread))
            written = [(key, obj) for key, obj in zip(keys, objects) if key not in unread]
            keys, objects = [key for key, _ in written], [obj for _, obj in written]
        return self._begun("submit_store_task", keys, objects, begin, False, bool(unread))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The store tasks that have ended since the last call. Does not wait."""
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    # Lookup

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any = None) -> int:
        """Looks objects up, in this call. Found objects count as used, and are evicted last."""
        self._check_open()
        keys = list(keys)
        found = self._guarded("lookup", [], lambda: self._look_up(keys, group_layout_descs), len(keys))
        with self._lock:
            task_id = next(self._task_ids)
            self._found[task_id] = _bitmap(len(keys), found)
            self._locked.update(keys[n] for n in found)
            self._signal(self._lookup_fd)
        return task_id

    def _look_up(self, keys: list, layouts: Any) -> list[int]:
        named = self._names.of_keys(keys, layouts)
        doubted = self._doubtful()
        there = iter(self.store.contains_each([one for one in named if one is not None]))
        found: list[int] = []
        before: dict[tuple, StoredObject] = {}
        for n, (key, one) in enumerate(zip(keys, named)):
            if one is None:
                continue
            row = row_of(key)
            if next(there) and one not in doubted:
                found.append(n)
            elif row in before:
                self._remember(one, before[row])
            before[row] = one
        hits = [one for n in found if (one := named[n]) is not None]
        self.store.touch(hits)
        self._names.found([keys[n] for n in found], layouts)
        self._announced.add([keys[n] for n in found], hits)
        return found

    def _remember(self, one: StoredObject, before: StoredObject) -> None:
        with self._lock:
            self._before[one] = before
            if len(self._before) > _PREFIXES_MAX:
                self._before.popitem(last=False)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """The result of a lookup, once."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Releases objects that lookups found: `delete` may take them.

        Where LMCache gives up a request whose load is under way, it frees the memory after this, of the very objects
        that it has had loaded. So this waits for such a load, which ends on the store's thread, for as long as LMCache
        keeps the memory of any. A load that LMCache knows to have ended is under way no more.
        """
        keys = list(keys)
        with self._lock:
            _take(self._locked, keys)
            # Another request may load the same: whose load it is cannot be told.
            loads = [n for n, task in self._under_way.items() if task.is_load and list(task.keys) == keys]
            self._load_ended.wait_for(lambda: not any(n in self._under_way for n in loads), self._times.staged_s)

    # Load

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begins to read objects into L1; each succeeds or fails on its own."""

        def begin(task_id: int, task: _Task) -> None:
            self.store.submit_load(task_id, task.named, _addresses(objects))

        return self._begun("submit_load_task", keys, objects, begin, True)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """The result of a load task, once; None while it is under way."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # Tasks

    def _begun(
        self,
        method: str,
        keys: Sequence[Any],
        objects: Sequence[Any],
        begin: Callable[[int, _Task], None],
        is_load: bool,
        partial: bool = False,
    ) -> int:
        """Begins a task. If it cannot begin, it fails; `begin` submits in its last step."""
        self._check_open()
        task = _Task(list(keys), partial, is_load)
        with self._lock:
            task_id = next(self._task_ids)
            self._under_way[task_id] = task

        def named_and_begun() -> None:
            if len(objects) != len(task.keys):
                raise ArgumentError(f"objects: found {len(objects)}, expected one for each of {len(task.keys)} keys")
            task.named = self._names.of_objects(task.keys, objects)
            begin(task_id, task)

        if self._guarded(method, self, named_and_begun, len(task.keys)) is self:
            self._end(Ended(task_id, is_load, [], {}, 0.0))
        return task_id

    def _oldest_s(self, is_load: bool) -> float:
        """The age of the oldest load or store under way, 0.0 without one. With the lock held."""
        now = time.monotonic()
        return now - next((task.begun for task in self._under_way.values() if task.is_load == is_load), now)

    def _end(self, ended: Ended) -> None:
        """Takes the end of a task, on the store's thread."""
        with self._lock:
            task = self._under_way[ended.job_id]
        age = time.monotonic() - task.begun
        if not ended.is_load and ended.good and age > self._times.locked_s:
            ended = self._undone(ended, task, age)
        elif not ended.is_load:
            with self._lock:
                self._doubted.difference_update(task.named[n] for n in ended.good)
        if self._doubted:
            self._guarded("remove", None, self._remove_doubted)
        with self._lock:
            del self._under_way[ended.job_id]
            if ended.is_load:
                self._load_ended.notify_all()
        self._guarded("account", None, lambda: self._account(ended, task))
        moved = sorted(ended.good)
        if ended.is_load:
            good = set(moved)
            self._unread.loaded(task.keys, [n in good for n in range(len(task.keys))])
        with self._lock:
            if ended.is_load:
                self._loaded[ended.job_id] = _bitmap(len(task.keys), moved)
                self._signal(self._load_fd)
            else:
                good = len(moved) == len(task.keys) and not task.partial
                nbytes = sum(one.nbytes for one in task.named) if good else 0
                self._stored[ended.job_id] = L2StoreResult(good, nbytes)
                self._signal(self._store_fd)

    def _undone(self, ended: Ended, task: _Task, age: float) -> Ended:
        """Doubts what a task has stored that LMCache's locks did not cover to its end: it may be of other objects."""
        with self._lock:
            self._doubted.update(task.named[n] for n in ended.good)
        why = f"it took {age:.0f} s, and LMCache keeps the memory for {self._times.locked_s}"
        return replace(ended, good=[], failed={**ended.failed, **dict.fromkeys(ended.good, why)})

    def _remove_doubted(self) -> None:
        """Removes what is doubted. What cannot be removed now, as without its service, is tried with the next task."""
        with self._lock:
            doubted = list(self._doubted)
        for one in doubted:
            self.store.remove(one)
            with self._lock:
                self._doubted.discard(one)

    def _doubtful(self) -> set[StoredObject]:
        """What is doubted, and what is still being stored after LMCache has forgotten its lock."""
        with self._lock:
            now, found = time.monotonic(), set(self._doubted)
            for task in self._under_way.values():
                if now - task.begun <= self._times.locked_s:
                    break
                if not task.is_load:
                    found.update(task.named)
            return found

    def _account(self, ended: Ended, task: _Task) -> None:
        moved = sorted(ended.good)
        keys = [task.keys[n] for n in moved]
        self._announced.add(keys, [task.named[n] for n in moved])
        if ended.is_load and keys:
            self._notify_keys_accessed(keys)
        if ended.failed:
            why = next((why for why in ended.failed.values() if why is not False), None)
            why = why or self._misses.why("stored in another layout" if self._lies_otherwise(ended, task) else None)
            self._failed("load" if ended.is_load else "store", why, len(ended.failed))

    def _lies_otherwise(self, ended: Ended, task: _Task) -> bool:
        """Whether the first object that was not loaded is there in another layout, which a lookup has taken for its own."""
        missed = [n for n, why in ended.failed.items() if why is False and ended.is_load]
        others = [one for n in missed[:1] for one in self._names.all_of(task.keys[n]) if one != task.named[n]]
        try:
            return any(self.store.contains_each(others))
        except Exception:  # The service is away: the reason is another.
            return False

    def _signal(self, fd: int) -> None:
        """Signals a descriptor. With the lock held: a closed descriptor may be another file's."""
        if not self._closed:
            os.eventfd_write(fd, 1)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the adapter is closed")

    # Deletion, usage and status

    @property
    def supports_global_eviction(self) -> bool:
        """False: the store evicts by itself, ends of prefixes first. Quotas of salts are LMCache's."""
        return False

    def delete(self, keys: Sequence[Any]) -> None:
        """Forgets objects, except those between a lookup and its unlock.

        Raises UnavailableError, once the others are forgotten, for keys of which nothing is known: neither stored nor
        found was an object of their model, rank and object group since the start. LMCache's evictions, whose thread an
        error ends, have none of these: they know objects that were announced.
        """
        with self._lock:
            free = [key for key in keys if key not in self._locked]
        named = {key: self._names.all_of(key) for key in free}
        gone = [key for key in free if self._guarded("delete", False, lambda key=key: self._remove(named[key]), 1)]
        self._guarded("delete", None, lambda: self._announced.remove(gone))
        if unknown := sum(not objects for objects in named.values()):
            why = (
                f"found {unknown} keys of a model, rank and object group of which nothing was stored or found since the "
                "start, expected one that was: the shapes and dtypes in the objects' names are unknown; look one up first"
            )
            self._failed("delete", why, unknown)
            raise UnavailableError(f"delete: {why}")

    def _remove(self, objects: Iterable[StoredObject]) -> bool:
        for one in objects:
            self.store.remove(one)
        return True

    def get_usage(self) -> AdapterUsage:
        """Bytes on disk of all objects, and by salt those of objects stored or found since the start."""
        by_salt = super().get_usage().bytes_by_cache_salt
        disk = self._guarded("get_usage", {}, lambda: self.store.cache.stats()["tiers"]["disk"])
        used, slots = (disk.get(name, 0) * self.store.block_bytes for name in ("resident", "slots"))
        return AdapterUsage(used, slots, MappingProxyType(dict(by_salt)))

    def report_status(self) -> dict:
        """Health, tasks under way, and the store's figures."""
        return self._guarded("report_status", {"is_healthy": False, "type": type(self).__name__}, self._status)

    def _status(self) -> dict:
        stats = self.store.cache.stats()
        disk, (stores, loads) = stats["tiers"]["disk"], self.store.tasks
        out = stats["disk_retired"] or stats["disk_read_only"]
        with self._lock:
            oldest_store, oldest_load = self._oldest_s(is_load=False), self._oldest_s(is_load=True)
        figures = ("checksum_failures", "read_errors", "write_errors", "writes_refused", "storage", "direct_io")
        return {
            "is_healthy": not self._closed and not out and oldest_load <= self._times.staged_s,
            "type": type(self).__name__,
            "kvhoist_version": __version__,
            "out_of_service": str(out or ""),
            "store_inflight_task_count": stores,
            "store_inflight_oldest_s": round(oldest_store, 3),
            "load_inflight_task_count": loads,
            "load_inflight_oldest_s": round(oldest_load, 3),
            "locked_object_count": len(self._locked),
            "block_bytes": self.store.block_bytes,
            "slots": disk["slots"],
            "resident": disk["resident"],
            "evictions": disk["evictions"],
            "pinned_bytes": self.store.pinned,
            **{name: stats[name] for name in figures},
            "failures": dict(self.counters),
        }

    def close(self) -> None:
        """Waits for the tasks, unregisters L1, and closes the store and the descriptors. Again: does nothing."""
        self._guarded("close", None, self.store.close)
        with self._lock:
            fds, self._fds, self._closed = self._fds, [], True
        for fd in fds:
            os.close(fd)


@dataclass
class _Task:
    keys: list
    #: Some of its objects are refused already, and not among the keys.
    partial: bool
    is_load: bool
    #: Empty if the task did not begin.
    named: list[StoredObject] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)


def _take(counted: Counter, keys: Iterable[Any]) -> None:
    """Takes one of each key away."""
    for key in keys:
        if counted[key] > 1:
            counted[key] -= 1
        else:
            del counted[key]


def _bitmap(size: int, places: Iterable[int]) -> Bitmap:
    bitmap = Bitmap(size)
    for n in places:
        bitmap.set(n)
    return bitmap


def _addresses(objects: Sequence[Any]) -> list[int]:
    return [obj.data_ptr for obj in objects]


def _identity(block_bytes: int, revision: str) -> dict[str, Any]:
    # The layout of an object depends on the version.
    return {"format": FORMAT, "block_bytes": block_bytes, "lmcache": VERSION.layout(), "revision": revision}


def _pieces(memory: Any) -> list[tuple[int, int, bool]]:
    """LMCache's L1 in pieces, with whether the ring pins each: only the part that is allocated."""
    address, nbytes = memory.ptr, memory.size
    # Unknown before 0.5.6; None: all of it, shared memory.
    stable = getattr(memory, "stable_registration_size", 0)
    stable = nbytes if stable is None else min(stable, nbytes) // 4096 * 4096
    pieces = [(address, stable, True), (address + stable, nbytes - stable, False)]
    return [piece for piece in pieces if piece[1]]
