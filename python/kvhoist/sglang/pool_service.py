"""Pools of SGLang on a node's service: when one is needed, and how pools are lent to it."""

from __future__ import annotations

import logging
import sys
from typing import Any

from .._store_settings import StoreSettings
from .._values import config_error
from ..cache import slot_bytes
from ..client import Client, connect, mapped_from
from .pool_memory import pool_memory
from .refusals import replicas

logger = logging.getLogger(__name__)

#: The most bounce memory of a rank, for pools that the service cannot map. Allocated with the first such page.
_BOUNCE_BYTES_MAX = 256 << 20


def wants_service(config: StoreSettings, storage_config: Any, args: Any) -> bool:
    """Whether a service keeps a rank's pages: the setting `service`, or for `auto` whether ranks share pages.

    `args` are SGLang's arguments of the server, or `None`.
    """
    if config.service != "auto":
        return config.service != "off"
    shares = storage_config.is_mla_model and storage_config.tp_size > 1
    return shares or replicas(args) > 1 or _data_parallel_attention()


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
