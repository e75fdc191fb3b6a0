"""One host pool's pages on disk: the parts of the SGLang backend that need torch's tensors and not SGLang."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Sequence

from .._folders import make_folder, make_private_folders, make_store_folder, refuse_locked
from .._native import Region
from .._store_settings import StoreSettings
from .._stores import slug
from .._values import config_error
from ..cache import Cache, slot_bytes, slots_on_each, store_bytes
from ..client import Client
from ..errors import ClosedError, ConfigError, Error, RefusedError, UnavailableError
from ..service.launch import listens
from .identity import Identity, holds_draft
from .pool_memory import flat_bytes, huge_page_share, percent, pool_memory
from .pool_service import connect_pool
from .refusals import refuse_empty_pages, warn_of_small_pages

logger = logging.getLogger(__name__)

#: Changed whenever stored pages would be read differently.
FORMAT = "hicache-v1"

#: Pages with several segments that are shorter than this go through the cache's memory, in one operation each.
STRAIGHT_SEGMENT_BYTES_MIN = 64 << 10

@dataclass(frozen=True)
class Geometry:
    """How a pool's pages lie in memory."""

    page_bytes: int
    page_tokens: int
    #: Segments of a page; 0 where SGLang gives no addresses, and pages are copied whole.
    segments: int
    layout: str
    dtype: str

    @classmethod
    def of(cls, pool: Any, page_tokens: int) -> "Geometry":
        """Asks the pool about its first page."""
        sizes: Sequence[int] = ()
        try:
            _, sizes = pool.get_page_buffer_meta(_page_indices(page_tokens))
        except (AttributeError, NotImplementedError, ValueError, TypeError):
            pass  # No addresses for this kind of pool or layout.
        sizes = [int(size) for size in sizes]
        if not sizes:
            page_bytes = pool.get_dummy_flat_data_page().nbytes
        else:
            page_bytes = sum(sizes)
        layout, dtype = str(getattr(pool, "layout", "unknown")), str(getattr(pool, "dtype", "unknown"))
        if (on_device := device_layout(pool)) != "nhd":
            layout = f"{layout} of {on_device}"
        # A pool of recurrent states names the type of its convolutions alone.
        states = str(getattr(pool, "temporal_dtype", dtype))
        return cls(page_bytes, page_tokens, len(sizes), layout, dtype if states == dtype else f"{dtype}, {states}")


def device_layout(pool: Any) -> str:
    """The order of a page on the device, as SGLang names it: `nhd` has tokens before heads. SGLang may copy pages to
    the host as they are, whatever the host pool says of its dimensions."""
    # 0.5.23 describes the device's buffers to the host pool. Before, the host pool had the device's.
    if infos := getattr(pool, "_buffer_infos", ()):
        layout = getattr(getattr(infos[0], "buffers", None), "layout", "nhd")
        return str(getattr(layout, "value", layout)).removeprefix("paged_")
    return str(getattr(getattr(pool, "device_pool", None), "kv_cache_layout", "nhd"))


def _page_indices(page_tokens: int) -> Any:
    import torch

    return torch.arange(page_tokens, dtype=torch.int64)


class PoolStore:
    """The store of one pool of one rank; `open` comes before all that moves pages.

    Methods raise; the backend catches. One thread may read while another stores and a third looks keys up.
    """

    cache: Cache | Client

    def __init__(
        self, config: StoreSettings, identity: Identity, name: str, pool: Any, page_tokens: int,
        socket: str | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.pool = pool
        self.config = config
        self.identity = identity
        self.geometry = Geometry.of(pool, page_tokens)
        refuse_empty_pages(name, pool, self.geometry.page_bytes)
        #: Bytes on disk, from `open` on.
        self.capacity = 0
        #: The socket of the service that has the pages, or `None` where this process has them.
        self.socket = socket
        #: The pool's memory, where it is lent to a service.
        self.regions: list[Region] = []
        self._open_lock = threading.Lock()
        self.directories = self._directories()

    # Opening

    def check(self, capacity: int, has_size: bool) -> None:
        """Raises what would keep a store of so many bytes from being opened, where that is known already.

        Unless it `has_size`, so many are the most that it may get: the room for them is tested by `open`.
        """
        if self.socket is not None:
            if not listens(self.socket):
                raise UnavailableError(f"service: found none that listens at {self.socket}, expected one; start it")
            return
        self._make_folders(capacity, has_size)
        for directory in self.directories:
            refuse_locked(directory)

    def open(self, capacity: int) -> None:
        """Opens the store, or attaches to its space, with so many bytes on disk."""
        self.capacity = capacity
        self.cache = self._open() if self.socket is None else connect_pool(self, self.socket)

    def namespace(self) -> str:
        """The cache's namespace: readable words, then a digest of everything that the bytes depend on."""
        identity = self.identity.digested(holds_draft(self.name, self.pool))
        what = {"format": FORMAT, "pool": self.name, **identity, **asdict(self.geometry)}
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{slug(self.identity.model_name)[:80]}/{self.identity.rank_name()}/{slug(self.name)}/{digest[:32]}"

    def _directories(self) -> list[str]:
        model, rank, pool, digest = self.namespace().split("/")
        return [os.path.join(path, f"{model}-{digest[:12]}", rank, pool) for path in self.config.path]

    def _make_folders(self, capacity: int, has_size: bool) -> None:
        """Makes the folders of the store. Raises what is wrong with its sizes, or, if it has its size, lack of room."""
        page = self.geometry.page_bytes
        slot = slot_bytes(page)
        try:
            slots = slots_on_each(capacity, len(self.directories), page)
        except ConfigError as error:
            raise config_error("capacity", capacity, f"room for pages of pool {self.name!r}: {error}") from None
        if self.config.host_bytes < slot:
            expected = f"room for one page of {slot} bytes of pool {self.name!r}"
            raise config_error("host_bytes", self.config.host_bytes, expected)
        for path, directory in zip(self.config.path, self.directories):
            if has_size:
                make_store_folder(path, directory, store_bytes(slots, page))
            else:
                make_folder(path, store_bytes(slots, page))
                make_private_folders(directory)

    def _open(self) -> Cache:
        self._make_folders(self.capacity, has_size=True)
        cache = Cache(
            self.directories,
            block_bytes=self.geometry.page_bytes,
            host_bytes=self.config.host_bytes,
            capacity=self.capacity,
            namespace=self.namespace(),
            **self.write_settings(),
            direct_io=self.config.direct_io,
            storage=self.config.storage,
            # SGLang's pool is the host tier: pages that direct I/O can reach need no second one.
            bypass_host=not self.config.keep_in_host,
            deadline_ms=self.config.deadline_ms,
            read_bytes_in_flight_max=self.config.read_bytes_in_flight_max,
            write_bytes_in_flight_max=self.config.write_bytes_in_flight_max,
        )
        try:
            if self.geometry.segments:
                pin, pieces = self._goes_straight(cache), pool_memory(self.pool)
                gib = sum(nbytes for _, nbytes in pieces) / (1 << 30)
                what = "moving it into huge pages and pinning it" if pin else "registering it"
                logger.info("kvhoist: pool %s of %.1f GiB: %s", self.name, gib, what)
                for address, nbytes in pieces:
                    cache.register_host(address, nbytes, pin=pin)
        except BaseException:
            cache.close()
            raise
        return cache

    def write_settings(self) -> dict[str, Any]:
        """When this pool's pages go to disk: a budget is divided between the pools as the disk is."""
        settings: dict[str, Any] = {"write_policy": self.config.write_policy}
        if self.config.write_budget is not None:
            settings["write_budget"] = self.config.write_budget * self.capacity // self.config.capacity
        return settings

    def goes_straight(self) -> bool:
        """Whether pages go directly between drive and pool, without a copy in the cache's memory."""
        return self._goes_straight(self.cache)

    def pool_bytes(self) -> int:
        """Bytes of the pool's memory."""
        return sum(nbytes for _, nbytes in pool_memory(self.pool))

    def _goes_straight(self, cache: Cache | Client) -> bool:
        if not self.geometry.segments or self.config.keep_in_host:
            return False
        try:
            # Two pages, for the distance between them.
            addresses, sizes = self.pool.get_page_buffer_meta(_page_indices(2 * self.geometry.page_tokens))
        except IndexError:
            addresses, sizes = self.pool.get_page_buffer_meta(_page_indices(self.geometry.page_tokens))
        # A service maps pools at pages of memory, and does not say which smaller alignment its drives accept.
        align = 4096 if isinstance(cache, Client) else cache.stats()["memory_align_bytes"]
        long = self.geometry.segments == 1 or all(size >= STRAIGHT_SEGMENT_BYTES_MIN for size in sizes)
        return long and all(a % align == 0 and size % 4096 == 0 for a, size in zip(addresses, sizes))

    def say(self, is_writer: bool) -> None:
        """Logs where the pages are and how they move."""
        stats, geometry, straight = self.cache.stats(), self.geometry, self.goes_straight()
        disk = stats["tiers"]["disk"]
        what = "%d slots of %d-byte pages (%d segments, layout %s), %d resident"
        found = disk["slots"], geometry.page_bytes, geometry.segments, geometry.layout, disk["resident"]
        if self.socket is not None:
            logger.info(
                f"kvhoist: pool %s in the service at %s: {what}; pages go %s, this rank %s",
                self.name, self.socket, *found,
                "straight to the pool where the service can map it" if straight else "through host memory",
                "stores pages" if is_writer else "reads what another rank stores",
            )  # fmt: skip
            return
        share = huge_page_share(pool_memory(self.pool))
        logger.info(
            f"kvhoist: pool %s in %s: {what}; storage %s, direct I/O %s, pages go %s, %s of the pool lies in huge pages",
            self.name, self.directories, *found, stats["storage"], stats["direct_io"],
            "straight to the pool" if straight else "through the cache's memory", percent(share),
        )  # fmt: skip
        warn_of_small_pages(self.name, self.pool_bytes(), share)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.geometry.page_bytes

    def parts(self) -> "list[PoolStore]":
        """The stores that have the pages: this one."""
        return [self]

    # Pages

    def match(self, keys: list[str]) -> int:
        """The number of leading keys that are resident."""
        return self.cache.match_prefix(keys)

    def contains(self, keys: list[str]) -> list[bool]:
        """Which keys are resident."""
        return self.cache.contains_each(keys)

    def get(self, keys: list[str], host_indices: Any) -> list:
        """Reads pages into the pool. A result for each: True, False for a miss, or an exception."""
        self._check(keys, host_indices)
        if not keys:
            return []
        if self.geometry.segments:
            addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
            return self.cache.load_pages(keys, addresses, sizes, errors="return")
        pages = [self.pool.get_dummy_flat_data_page() for _ in keys]
        results = self.cache.load(keys, [flat_bytes(page) for page in pages], errors="return")
        for i, (result, page) in enumerate(zip(results, pages)):
            if result is True:
                self.pool.set_from_flat_data_page(int(host_indices[i * self.geometry.page_tokens]), page)
        return results

    def set(self, keys: list[str], host_indices: Any, parent: str | None) -> list:
        """Stores pages of the pool. A result for each: True, or an exception."""
        self._check(keys, host_indices)
        if not keys:
            return []
        if self.geometry.segments:
            addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
            return self.cache.store_pages(keys, addresses, sizes, parent=parent, errors="return")
        tokens = self.geometry.page_tokens
        pages = [self.pool.get_data_page(int(host_indices[i * tokens])).contiguous() for i in range(len(keys))]
        return self.cache.store(keys, [flat_bytes(page) for page in pages], parent=parent, errors="return")

    def get_flat(self, keys: list[str], pages: list[Any]) -> list:
        """Reads pages into tensors of a page each."""
        return self.cache.load(keys, [flat_bytes(page) for page in pages], errors="return")

    def set_flat(self, keys: list[str], pages: list[Any]) -> list:
        """Stores tensors of a page each, without a chain."""
        return self.cache.store(keys, [flat_bytes(page.contiguous()) for page in pages], errors="return")

    def _check(self, keys: list[str], host_indices: Any) -> None:
        expected = len(keys) * self.geometry.page_tokens
        found = 0 if host_indices is None else len(host_indices)
        if found != expected:
            raise ValueError(
                f"host_indices: found {found}, expected {expected}, {self.geometry.page_tokens} for each page"
            )

    # The end

    def clear(self) -> None:
        """Forgets every page, also on disk. Calls in progress fail as on a closed cache."""
        with self._open_lock:
            if self.cache.closed:
                raise ClosedError("the cache is closed")
            if isinstance(self.cache, Client):
                raise RefusedError("pages of a service are other ranks' and servers' too: remove its space instead")
            # Before the close: after it another process may have opened the store.
            for directory in self.directories:
                with suppress(FileNotFoundError):  # It is to be gone.
                    os.unlink(os.path.join(directory, "kvhoist.store"))
            try:
                self.cache.close()
            except UnavailableError:
                pass  # It says that the files are deleted.
            except Error as error:
                # It is closed all the same, and what it could not write was to be forgotten.
                logger.warning("kvhoist: clear: pool %s: the close of the deleted store failed: %s", self.name, error)
            self.cache = self._open()

    def close(self) -> None:
        """Writes what is dirty and releases the files."""
        with self._open_lock:
            self.cache.close()


def split_capacity(config: StoreSettings, page_bytes: dict[str, int]) -> dict[str, int]:
    """Bytes for each pool: its share, or a part of the rest in proportion to the size of its pages."""
    left = config.capacity
    split = {}
    for name in page_bytes:
        if name in config.pool_shares:
            split[name] = int(config.capacity * config.pool_shares[name])
            left -= split[name]
    others = {name: size for name, size in page_bytes.items() if name not in split}
    for name, size in others.items():
        split[name] = left * size // sum(others.values())
    return split


def prefix_parent(extra_info: Any) -> str | None:
    """The key before the first one of a call, if SGLang passes it."""
    keys: Sequence[str] | None = getattr(extra_info, "prefix_keys", None)
    return keys[-1] if keys else None
