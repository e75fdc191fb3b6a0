"""The store of an engine: its settings, its folders and its namespace, and how it is opened and closed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any, Iterable, Mapping

from . import _figures
from ._folders import make_store_folder
from ._store_settings import DEFAULT_HOST_BYTES, StoreSettings, refuse_total_of_environment
from ._values import config_error
from .cache import Cache, slot_bytes, slots_on_each, store_bytes
from .errors import Error

#: Host memory of a store whose chunks go straight between drive and engine. Unaligned chunks and write_back need more.
STRAIGHT_HOST_BYTES = 64 << 20


def tier_settings(given: Mapping[str, Any]) -> StoreSettings:
    """Settings of a tier, checked: those of the HiCache backend without those of its pools."""
    given = dict(given)
    of_total = "one store for all ranks has capacity"
    for name, why in (("pool_shares", "the engine's memory is one pool"), ("capacity_total", of_total)):
        if name in given:
            raise config_error(name, given[name], f"nothing: {why}")
    refuse_total_of_environment(given, of_total)
    if "service" not in given and not os.environ.get("KVHOIST_SERVICE"):
        given["service"] = "off"
    said = "host_bytes" in given or os.environ.get("KVHOIST_HOST_BYTES")
    # A size, or `true` for a tier of host memory.
    kept = given.get("keep_in_host", os.environ.get("KVHOIST_KEEP_IN_HOST") or False)
    if not said and kept in (False, "false"):
        policy = given.get("write_policy") or os.environ.get("KVHOIST_WRITE_POLICY") or "write_through"
        given["host_bytes"] = STRAIGHT_HOST_BYTES if policy == "write_through" else DEFAULT_HOST_BYTES
    config = StoreSettings.load(given)
    if config.keep_in_host and config.service == "off":
        expected = "nothing, or a `service`: without one the engine's memory is the only tier of host memory"
        name = "keep_in_host" if "keep_in_host" in given else "KVHOIST_KEEP_IN_HOST"
        raise config_error(name, kept, expected)
    return config


@dataclass(frozen=True)
class Place:
    """Where chunks are kept, by everything that their bytes depend on and that is not in their keys."""

    #: For people: the model and the replica.
    model: str
    replica: str
    #: Digested as JSON.
    identity: Mapping[str, Any]
    #: The number of this process among those of the model: which port of `metrics_port` is its own.
    rank: int = 0

    def digest(self) -> str:
        """64 hex characters."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True, default=str).encode()).hexdigest()

    def namespace(self) -> str:
        """The cache's namespace."""
        return f"{slug(self.model)[:80]}/{slug(self.replica)}/{self.digest()[:32]}"

    def directories(self, paths: Iterable[str]) -> list[str]:
        """A folder under each path."""
        name = f"{slug(self.model)[:80]}-{self.digest()[:12]}"
        return [os.path.join(path, name, slug(self.replica)) for path in paths]


def open_store(
    config: StoreSettings, place: Place, block_bytes: int, *, bypass_host: bool = True, **more: Any
) -> Cache:
    """Opens the cache of an engine with memory of its own, and serves its figures. `more` are further settings of the
    cache.

    `bypass_host`: the engine's memory is the host tier, and blocks that direct I/O can reach need no copy here.
    """
    directories, slot = place.directories(config.path), slot_bytes(block_bytes)
    slots = slots_on_each(config.capacity, len(directories), block_bytes)
    for path, directory in zip(config.path, directories):
        make_store_folder(path, directory, store_bytes(slots, block_bytes))
    _figures.serve(config.metrics_port, place.rank)
    return Cache(
        directories,
        block_bytes=block_bytes,
        host_bytes=max(config.host_bytes, slot),
        capacity=config.capacity,
        namespace=place.namespace(),
        write_policy=config.write_policy,
        write_budget=config.write_budget,
        direct_io=config.direct_io,
        storage=config.storage,
        bypass_host=bypass_host,
        deadline_ms=config.deadline_ms,
        read_bytes_in_flight_max=config.read_bytes_in_flight_max,
        write_bytes_in_flight_max=config.write_bytes_in_flight_max,
        **more,
    )


def close_all(stores: Iterable[Any]) -> None:
    """Closes each of them. Raises the first error when all are closed."""
    first: Error | None = None
    for store in stores:
        try:
            store.close()
        except Error as error:
            first = first or error
    if first is not None:
        raise first


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "unnamed"
