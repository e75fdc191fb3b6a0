"""kvhoist as the third tier of SGLang's HiCache: a dynamic storage backend for sglang.

`docs/sglang.md` has the launch line and the settings.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, Optional

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from .. import _figures
from .._guard import Failures
from .._values import config_error, warn_of_keywords
from ..errors import ClosedError, DeadlineError, RefusedError, UnavailableError
from ..service.pause import Pause
from ..service.supervisor import ServiceSupervisor
from .batch_stats import BatchStats
from .hits import policy, pool_result, trailing
from .identity import Identity
from .pool_service import is_writer, wants_service
from .pools import PoolStore, prefix_parent, split_capacity
from .refusals import (
    refuse_adapters_without_keys,
    refuse_copies_of_chunks,
    refuse_replicas,
    refuse_unknown_shares,
    refuse_what_is_not_kept,
    server_args,
    warn_of_copies,
    warn_of_images,
    warn_of_long_rope,
    warn_of_salts,
)
from .settings import backend_settings, key_scheme
from .unified import UnifiedStore, agreed, plan

logger = logging.getLogger(__name__)

#: SGLang's name of the pool that `register_mem_pool_host` registers.
KV = "kv"

#: Ranks whose pages a clear has left. They stay hidden while this process lives, also from a later attach.
_hidden: set[Identity] = set()


class HiCacheKvhoist(HiCacheStorage):
    """Pages of SGLang's host pools on NVMe.

    The constructor and the registration of pools raise errors in the settings. Later calls never raise into SGLang's
    threads: a failure is a miss or a `False`, a line in the log, and a count in ``counters``.
    """

    def __init__(self, storage_config: Any, kwargs: Optional[dict] = None, **more: Any) -> None:
        warn_of_keywords("HiCacheKvhoist", more)
        self.config = backend_settings(storage_config.extra_config)
        args = server_args()
        self._scheme = agreed(key_scheme(storage_config.extra_config), storage_config, args)
        self._plan = partial(plan, self._scheme, storage_config=storage_config, server_args=args)
        self.identity = Identity.of(storage_config, args, self.config.revision)
        if self.identity in _hidden:
            expected = "another one, or a restart: a clear has left the pages of this one"
            raise config_error("revision", self.config.revision, expected)
        refuse_adapters_without_keys(args)
        warn_of_salts()
        warn_of_images(args)
        warn_of_long_rope(args)
        if self._scheme.unified:
            refuse_copies_of_chunks(storage_config.extra_config)
        warn_of_copies(storage_config.extra_config)
        in_service = wants_service(self.config, storage_config, args)
        refuse_what_is_not_kept(storage_config, in_service)
        refuse_replicas(args, in_service)
        self.config = self.config.for_ranks(self.identity.parts_of_total(args, in_service))
        #: Finds or starts the node's service, if that has the pages.
        self._keeper = ServiceSupervisor(self.config) if in_service else None
        if self._keeper is None:
            _figures.serve(self.config.metrics_port, self.identity.number())
        self._lines = _figures.Lines()
        self._pause = Pause()
        #: One of the ranks with the same pages of the KV pool stores them.
        self._is_writer = not in_service or is_writer(storage_config)
        self.registered_pools: dict[str, Any] = {}
        #: The stores of all registered pools, and those that are open.
        self._registered: dict[str, PoolStore | UnifiedStore] = {}
        self._stores: dict[str, PoolStore | UnifiedStore] = {}
        self._announced = False
        self._closed = False
        self._lock = threading.RLock()
        #: Failed calls by the method's name, and failed pages of all methods as `pages`.
        failures = Failures(logger, "pages", self._missed)
        self._guarded, self._failed = failures.guarded, failures.failed
        self.counters = failures.counters
        self._batches = BatchStats()

    # Attaching: errors are raised, for the operator.

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Closes what is open where the attach fails, for the next one. SGLang does not, once its threads run."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers SGLang's host pool. Raises if the store cannot be opened.

        SGLang undoes an attach that fails here, and none that fails later. So all is checked here that can be.
        """
        with self._attaching():
            self.mem_pool_host = mem_pool_host
            store = self._add(KV, mem_pool_host)
            refuse_unknown_shares(self.config.pool_shares, {KV, *map(str, PoolName)})
            # Without a share it has a part of the capacity that only the last pool decides.
            store.check(self._kv_capacity(), has_size=KV in self.config.pool_shares)
            if not hasattr(HiCacheStorage, "on_host_pools_registered"):
                # A version before 0.5.23, which does not say which pool is the last; a group of pools has all of them.
                for entry in getattr(mem_pool_host, "entries", ()):
                    self._announced = True
                    self._add(str(entry.name), entry.host_pool)
                self._open_waiting()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers another host pool of the model (Mamba, SWA, an indexer, a draft), with a store of its own."""
        name = str(host_pool_name)
        self.registered_pools[name] = host_pool
        with self._attaching():
            self._add(name, host_pool)
            if name in self._stores or not self._stores:
                return
            if name not in self.config.pool_shares:
                raise config_error(
                    "pool_shares",
                    self.config.pool_shares,
                    f"a share for pool {name!r}, which comes after the others were opened: {{{name!r}: 0.2}}",
                )
            self._open_waiting()

    def on_host_pools_registered(self) -> None:
        """Opens the stores: the number of pools that share the capacity is known now."""
        self._announced = True
        with self._attaching():
            self._open_waiting()

    def _add(self, name: str, pool: Any) -> PoolStore | UnifiedStore:
        with self._lock:
            if name in self._registered:
                # KV comes a second time: the same pool, or the one that it wraps.
                return self._registered[name]
            tokens = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)
            socket = self._keeper.socket if self._keeper else None
            identity = self.identity if socket is None else self.identity.shared(name)
            given = self.config, identity, name, pool, tokens, socket
            store = UnifiedStore(*given, self._plan(name, pool)) if self._scheme.unified else PoolStore(*given)
            self._registered[name] = store
            return store

    def _open_waiting(self) -> None:
        """Opens a store for each pool without one."""
        with self._lock:
            if self._closed:
                raise ClosedError("the backend is closed")
            waiting = {name: store for name, store in self._registered.items() if name not in self._stores}
            # The capacity is that of all ranks with the same KV pages: pools that are each rank's have a part for each.
            parts = {name: self.identity.parts(name) for name in waiting}
            sizes = {name: store.page_bytes * parts[name] for name, store in waiting.items()}
            split = {name: nbytes // parts[name] for name, nbytes in split_capacity(self.config, sizes).items()}
            if not self._announced:
                # Pools that are registered later have shares in the settings.
                split = {n: b if n in self.config.pool_shares else self._kv_capacity() for n, b in split.items()}
            for name, store in waiting.items():
                store.open(split[name])
                self._stores[name] = store
                for part in store.parts():
                    part.say(self._writes(name))
                    self._lines.begin(part.name, part.cache.stats())

    def _writes(self, name: str) -> bool:
        """Whether this rank stores a pool's pages."""
        return self._is_writer or self.identity.parts(name) > 1

    def _kv_capacity(self) -> int:
        """Of the KV pool, which has what the shares of others leave: at most, where some have none."""
        shares = self.config.pool_shares
        return int(self.config.capacity * shares.get(KV, 1 - sum(shares.values())))

    def _parts(self) -> list[PoolStore]:
        """The stores that are open."""
        return [part for store in list(self._stores.values()) for part in store.parts()]

    def _store(self, name: str) -> PoolStore | UnifiedStore:
        if self.identity in _hidden:
            raise RefusedError("pages: hidden since a clear; restart the server")
        store = self._stores.get(name)
        if store is None:
            if name not in self._registered:
                raise LookupError(f"pool {name!r} was never registered; known: {sorted(self._registered)}")
            self._open_waiting()
            store = self._stores[name]
        return store

    # v1: pages of the KV pool, in place

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The number of leading pages that are resident."""
        return self._asked("batch_exists", 0, lambda: self._store(KV).match(keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Reads pages into the host pool; a result for each."""
        got = self._batches.prefetched
        return self._move(KV, "batch_get_v1", keys, lambda store: store.get(keys, host_indices), got)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool; a result for each."""
        if not self._is_writer:
            return [True] * len(keys)
        parent = prefix_parent(extra_info)
        return self._move(
            KV, "batch_set_v1", keys, lambda store: store.set(keys, host_indices, parent), self._batches.backed_up
        )

    # v2: pages of all pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Optional[list] = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The longest prefix that all pools can restore, by their hit policies."""
        empty = pool_result(0, {}, [])
        return self._asked("batch_exists_v2", empty, lambda: self._exists_v2(keys, pool_transfers or []))

    def _exists_v2(self, keys: list[str], transfers: list) -> PoolTransferResult:
        kv_pages = self._store(KV).match(keys)
        hits = {KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in transfers:
            name, wanted = str(transfer.name), policy(transfer)
            if wanted == "block_groups":
                # A second form of the pages, which does not limit the others.
                group, block = int(transfer.group_pages), int(transfer.block_pages)
                groups = self._store(name).match(list(transfer.keys or [])) // group if group else 0
                if groups:
                    hits[name] = groups * block
                continue
            if not restorable:
                break
            if wanted == "all_pages":
                boundary = self._store(name).match(keys[:kv_pages])
                reachable = range(1, boundary + 1)
            else:
                reachable = trailing(self._store(name).contains(keys[:kv_pages]), max(1, len(transfer.keys or ())))
                boundary = max(reachable, default=0)
            if boundary:
                hits[name] = boundary
            restorable = [pages for pages in restorable if pages in reachable]
        return pool_result(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: list, extra_info: Any = None) -> dict:
        """Reads pages of each pool; one result for each page of each."""
        return {
            transfer.name: self._move(
                str(transfer.name),
                "batch_get_v2",
                list(transfer.keys or []),
                lambda store, t=transfer: store.get(list(t.keys or []), t.host_indices),
                self._batches.prefetched,
            )
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: list, extra_info: Any = None) -> dict:
        """Stores pages of each pool; one result for each page of each."""
        parent = prefix_parent(extra_info)

        def stored(store: PoolStore | UnifiedStore, transfer: Any) -> list:
            # The parent precedes the first page of the node, which trailing pages need not include.
            before = parent if policy(transfer) == "all_pages" else None
            return store.set(list(transfer.keys or []), transfer.host_indices, before)

        return {
            transfer.name: self._move(
                str(transfer.name),
                "batch_set_v2",
                list(transfer.keys or []),
                lambda store, t=transfer: stored(store, t),
                self._batches.backed_up,
            )
            if self._writes(str(transfer.name))
            else [True] * len(transfer.keys or [])
            for transfer in transfers
        }

    # v0: pages as tensors, copied

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page in `target_location`, a tensor of a page; None for a miss."""
        return self._get_tensors("get", [key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list:
        """The pages, each in its tensor of `target_locations`; None for each miss."""
        return self._get_tensors("batch_get", keys, target_locations)

    def _get_tensors(self, method: str, keys: list[str], targets: Any) -> list:
        targets = list(targets) if targets is not None else []
        if len(targets) != len(keys) or any(target is None for target in targets):
            why = f"found {len(targets)} targets, expected a tensor for each of {len(keys)} keys"
            self._failed(method, why, len(keys))
            return [None] * len(keys)
        done = self._move(KV, method, keys, lambda store: store.get_flat(keys, targets), self._batches.prefetched)
        return [target if there else None for target, there in zip(targets, done)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a tensor of a page."""
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores tensors of a page each; True if all are stored."""
        values = list(values) if values is not None else []
        if not self._is_writer:
            return True
        if len(values) != len(keys):
            why = f"found {len(values)} values, expected one for each of {len(keys)} keys"
            self._failed("batch_set", why, len(keys))
            return False
        stored = self._batches.backed_up
        return all(self._move(KV, "batch_set", keys, lambda store: store.set_flat(keys, values), stored))

    def exists(self, key: str) -> bool:
        """Whether the page is there."""
        return self.batch_exists([key]) == 1

    # The rest

    def clear(self) -> bool:
        """Forgets every page of this rank, also on disk. Where they stay, as those of a service, which are others' too,
        this rank uses none of them, and stores none, as long as it runs."""

        def cleared() -> bool:
            for store in list(self._stores.values()):
                store.clear()
            return True

        if self._keeper is None and self._guarded("clear", False, cleared):
            return True
        _hidden.add(self.identity)
        logger.error(
            "kvhoist: clear: pages %s, and stay, whatever SGLang answers; this rank finds and stores none until it is "
            "restarted",
            "of a service are other ranks' and servers' too" if self._keeper else "could not be removed",
        )
        return False

    def get_stats(self) -> Any:
        """Pages and GB/s of each batch since the last call."""
        return self._guarded("get_stats", None, self._batches.take)

    def stats(self) -> dict:
        """The cache's figures of each pool, and the counts of failures."""
        return {
            "pools": {part.name: part.cache.stats() for part in self._parts()},
            "failed": dict(self.counters),
        }

    def close(self) -> None:
        """Writes dirty pages and releases the files. Later calls are misses."""
        with self._lock:
            self._closed = True
            stores = list(self._stores.values())
        for store in stores:
            self._guarded("close", None, store.close)

    # Never raising

    def _asked(self, method: str, otherwise: Any, run: Callable[[], Any]) -> Any:
        """As `_guarded`, for questions to the index. A service that has just let one wait is not asked."""
        return otherwise if self._pause.is_on() else self._guarded(method, otherwise, run)

    def _move(
        self, pool: str, method: str, keys: list[str], run: Callable[[PoolStore | UnifiedStore], list], batches: Any
    ) -> list[bool]:
        if self._pause.is_on():
            self._failed(method, "the service has not answered a moment ago", len(keys))
            return [False] * len(keys)
        started = time.perf_counter()
        # SGLang gets a bool for each page; the log gets the error.
        results = self._guarded(method, None, lambda: (store := self._store(pool), run(store)), units=len(keys))
        if results is None:
            return [False] * len(keys)
        store, results = results
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            self._page_errors(method, keys, errors, store)
            self._failed(method, f"{len(errors)} of {len(keys)} pages of pool {pool}: {errors[0]}", len(errors))
        moved = sum(result is True for result in results)
        if moved:
            elapsed = max(time.perf_counter() - started, 1e-9)
            batches.append((moved, moved * store.page_bytes / elapsed / 1e9))
        self._guarded("stats", None, self._say_figures)
        return [result is True for result in results]

    def _say_figures(self) -> None:
        # Of the ranks that share a space one says its figures, which are those of all.
        stores = [store for name, store in list(self._stores.items()) if self._keeper is None or self._speaks_for(name)]
        if stores:
            self._lines.turn(lambda: {part.name: part.cache.stats for store in stores for part in store.parts()})

    def _speaks_for(self, name: str) -> bool:
        return self._writes(name) and self.identity.dp_rank == 0

    def _page_errors(
        self, method: str, keys: list[str], errors: list[BaseException], store: PoolStore | UnifiedStore
    ) -> None:
        """Takes the errors of pages: a page that was late is no sign of a service that does not answer."""
        away = next((error for error in errors if isinstance(error, UnavailableError)), None)
        if away is not None:
            self._missed(away)
        elif self._keeper is not None and len(errors) == len(keys) and isinstance(errors[0], DeadlineError):
            # Also a call as a whole has its error in the place of each page. A short question tells the two apart.
            self._asked(method, None, lambda: store.contains(keys[:1]))

    def _missed(self, error: BaseException) -> None:
        """Starts the service again if it is away, and leaves it alone for a while if it does not answer."""
        if self._keeper is None or self._closed:
            return
        if isinstance(error, UnavailableError):
            self._keeper.missed()
        elif isinstance(error, DeadlineError):
            self._pause.begin(error)
