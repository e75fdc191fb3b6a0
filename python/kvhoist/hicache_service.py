"""Pools of SGLang on a node's service: when one is needed, how pools are lent to it, and how it is started again."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

from . import _native
from .cache import slot_bytes
from .client import Client, connect, mapped_from
from .config import SERVICE_WRITE_POLICIES, HiCacheConfig, config_error
from .folders import make_folder
from .service import ServiceSettings, find_or_start

logger = logging.getLogger(__name__)

#: The most bounce memory of a rank, for pools that the service cannot map. Allocated with the first such page.
_BOUNCE_BYTES_MAX = 256 << 20

#: Seconds from an attempt to start a service again to the next; they double with each that fails.
_RESTART_EVERY_S = 1.0
_RESTART_EVERY_S_MAX = 60.0


def wants_service(config: HiCacheConfig, storage_config: Any) -> bool:
    """Whether a service keeps a rank's pages: the setting `service`, or for `auto` whether ranks share pages."""
    if config.service != "auto":
        return config.service != "off"
    return (storage_config.is_mla_model and storage_config.tp_size > 1) or _data_parallel_attention()


def _data_parallel_attention() -> bool:
    ask = getattr(sys.modules.get("sglang.srt.layers.dp_attention"), "is_dp_attention_enabled", None)
    try:
        return bool(ask and ask())
    except Exception as error:
        logger.debug("kvhoist: is_dp_attention_enabled: %s", error)
        return False


def is_writer(storage_config: Any) -> bool:
    """Whether this rank stores pages: the first of the ranks with the same pages."""
    told = getattr(storage_config, "is_storage_writer", None)
    return bool(told) if told is not None else not storage_config.is_mla_model or storage_config.tp_rank == 0


def service_settings(config: HiCacheConfig) -> ServiceSettings:
    """The settings of the service of these paths, the same for every model: all disk and memory of the machine, of
    which each space takes what it asks for, and no more."""
    for path in config.path:
        make_folder(path, config.capacity // len(config.path))
    disk, memory = _native.machine_sizes(config.path)
    disk = disk or config.capacity
    memory = memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A space has the share of the service's budget that its disk is of all.
    budget = None if config.write_budget is None else max(1, config.write_budget * disk // config.capacity)
    policy = config.write_policy if config.write_policy in SERVICE_WRITE_POLICIES else "write_through"
    return ServiceSettings(
        tuple(config.path), disk, memory, config.linger_s, config.direct_io, config.storage, config.keep_in_host, policy,
        budget, config.metrics_port or 0,
    )  # fmt: skip


class Keeper:
    """Finds or starts the service of some settings, and starts it again when it has gone."""

    def __init__(self, config: HiCacheConfig) -> None:
        self._settings = service_settings(config) if config.service == "auto" else None
        self._lock = threading.Lock()
        self._starting = False
        self._pause_s = _RESTART_EVERY_S
        self._next = 0.0
        self.socket = config.service if self._settings is None else find_or_start(self._settings)

    def missed(self) -> None:
        """Starts the service again, in the background, after a call found it away. Clients reconnect by themselves.

        Never raises: an attempt that fails is logged, and followed by another.
        """
        settings = self._settings
        with self._lock:
            if settings is None or self._starting or time.monotonic() < self._next:
                return
            self._starting = True
        try:
            thread = threading.Thread(target=self._start, args=(settings,), name="kvhoist-service-start", daemon=True)
            thread.start()
        except Exception as error:  # No thread is to be had.
            self._tried(error)

    def _start(self, settings: ServiceSettings) -> None:
        try:
            find_or_start(settings)
        except Exception as error:
            self._tried(error)
        else:
            self._tried(None)

    def _tried(self, error: Exception | None) -> None:
        with self._lock:
            self._starting = False
            self._next = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _RESTART_EVERY_S_MAX) if error else _RESTART_EVERY_S
        if error:
            logger.warning("kvhoist: the service cannot be started again: %s; trying later", error)


def connect_pool(store: Any, socket: str) -> Client:
    """Attaches a pool to its space, and lends its memory to the service."""
    config, page = store.config, store.geometry.page_bytes
    slot = slot_bytes(page)
    if config.host_bytes < slot:
        raise config_error("host_bytes", config.host_bytes, f"room for one page of {slot} bytes of pool {store.name!r}")
    client = connect(
        socket,
        space=store.namespace(),
        block_bytes=page,
        capacity=store.capacity,
        host_bytes=config.host_bytes,
        bounce_bytes=max(slot, min(config.host_bytes, _BOUNCE_BYTES_MAX)),
        deadline_ms=config.deadline_ms,
        # The engine computes into the memory of a load that has failed.
        give_up_ms=None,
        ask_ms=config.lookup_ms,
    )
    try:
        if store.geometry.segments:
            _lend(store, client)
    except BaseException:
        client.close()
        raise
    return client


def _lend(store: Any, client: Client) -> None:
    from .hicache import pool_memory

    fds, copied = _fds(store.pool), 0
    for address, nbytes in pool_memory(store.pool):
        fd = next((fd for fd in fds if mapped_from(address, nbytes, fd) is not None), None)
        region = client.register_host(address, nbytes, pin=True, fd=fd)
        store.regions.append(region)
        copied += nbytes if region.copied else 0
    if copied:
        logger.warning(
            "kvhoist: %d bytes of pool %s are no memfd that the service can map: each page is copied once more, "
            "through memory of this rank; add \"allocator\": \"shm\" to the extra config (as JSON, not @file)",
            copied, store.name,
        )  # fmt: skip


def _fds(pool: Any) -> list[int]:
    """The memfds of SGLang's allocator for a pool and for the pools that it consists of."""
    found: list[Any] = []
    pools = [pool, *(getattr(entry, "host_pool", None) for entry in getattr(pool, "entries", None) or ())]
    for one in pools:
        found += getattr(getattr(one, "allocator", None), "fds", None) or ()
        found.append(getattr(one, "fd", None))
    return list(dict.fromkeys(fd for fd in found if isinstance(fd, int) and fd >= 0))
