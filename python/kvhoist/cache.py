"""`Cache`: the native cache with sizes in bytes, registered memory, and asyncio."""

from __future__ import annotations

import itertools
import os
import weakref
from typing import TYPE_CHECKING, Any, Sequence

from . import _native
from ._calls import Calls
from ._settings import EngineSettings
from ._values import config_error, nearest, parse_block_bytes, parse_bytes
from .errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack

SLOT_ALIGN = 4096

DEFAULT_HOST_BYTES = 64 << 20

#: Keywords of the engine, and those that `Cache` makes of its own.
_SETTINGS = frozenset(EngineSettings.__annotations__)
_OWN = frozenset({"block_bytes", "capacity", "disk_blocks", "host_blocks", "host_bytes", "namespace"})

#: The caches of this process that somebody still has, in the order of their opening: for `kvhoist.metrics`.
_opened: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def slot_bytes(block_bytes: int) -> int:
    """Bytes that a block takes in a tier: padded for direct I/O."""
    return -(-block_bytes // SLOT_ALIGN) * SLOT_ALIGN


def store_bytes(slots: int, block_bytes: int) -> int:
    """Bytes of the file of a store with so many slots: superblocks and records, rounded up to 1 MiB, and the slots."""
    return _native.path_bytes(slots, block_bytes)


def slots_on_each(capacity: int, paths: int, block_bytes: int) -> int:
    """The most slots of each path of a store whose files have at most `capacity` bytes in all. ConfigError if a path has
    no room for one, or all paths have room for more than a store can have."""
    return _native.slots_on_each(max(capacity, 0), paths, block_bytes)


def _paths(path: Any) -> list[str]:
    expected = "a path, or a list of at least one"
    try:
        paths = [os.fsdecode(p) for p in ([path] if isinstance(path, (str, bytes, os.PathLike)) else path)]
        nul = any(b"\0" in os.fsencode(p) for p in paths)
    except (TypeError, ValueError):
        raise config_error("path", path, expected) from None
    if not paths or nul:
        raise config_error("path", path, expected + (", without NUL" if nul else ""))
    return paths


def _disks(paths: list[str], capacity: Any, blocks: Any, block_bytes: int) -> list[tuple[str, int | None, int]]:
    """Bytes of each path, if they are given, and slots: they are striped over all."""
    if blocks is not None:
        if not isinstance(blocks, int) or isinstance(blocks, bool) or not len(paths) <= blocks < 1 << 31:
            raise config_error("disk_blocks", blocks, f"{len(paths)} to {(1 << 31) - 1}, one for each path at least")
        return [(p, None, blocks // len(paths) + (at < blocks % len(paths))) for at, p in enumerate(paths)]
    if capacity is None:
        raise config_error("capacity", capacity, "bytes on disk, such as '200GiB', or disk_blocks")
    count = slots_on_each(parse_bytes(capacity, "capacity"), len(paths), block_bytes)
    return [(p, store_bytes(count, block_bytes), count) for p in paths]


class Cache(Calls, _native.Cache):
    """A tiered cache of fixed-size blocks.

    ``path`` is a directory, a file or a block device, or a list of them, over which slots are striped; ``None`` is a
    cache in memory only. ``capacity`` is the number of bytes on disk, of all paths together, records included. They are
    allocated when a store is made, which fails if there is less space. ``host_bytes`` is the number of bytes in host
    memory (64 MiB by default). ``disk_blocks`` and ``host_blocks`` give the same sizes in blocks. Sizes are numbers, or
    strings such as ``"200GiB"``. ``settings`` are those of the engine: ``write_policy``, ``storage``, ``direct_io``,
    ``deadline_ms``, ``read_bytes_in_flight_max``, ... (`EngineSettings` has all).

    ``key in cache``, ``len(cache)``, ``for key in cache`` and ``cache.clear()`` work as in a dict. Calls may come from
    any number of threads. As a context manager it closes itself at the end; so does dropping the last reference, which
    waits for the close.

    Raises ConfigError with the wrong field, StoreError if the paths hold another store or none that can be opened, and
    IoError.
    """

    def __new__(
        cls,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        block_bytes: int | str,
        host_bytes: int | str | None = None,
        capacity: int | str | None = None,
        host_blocks: int | None = None,
        disk_blocks: int | None = None,
        namespace: str = "default",
        **engine_settings: Unpack[EngineSettings],
    ) -> "Cache":
        settings: dict[str, Any] = dict(engine_settings)
        block_bytes = parse_block_bytes(block_bytes)
        if unknown := sorted(set(settings) - _SETTINGS):
            raise ArgumentError(f"{unknown[0]}: found an unknown keyword, expected {nearest(unknown[0], _SETTINGS | _OWN)}")
        settings.update(block_bytes=block_bytes, namespace=namespace)
        for name, bytes_, blocks in (("host_bytes", host_bytes, host_blocks), ("capacity", capacity, disk_blocks)):
            if bytes_ is not None and blocks is not None:
                raise config_error(name, bytes_, "either it or a number of blocks")
        if host_blocks is not None:
            settings["host_blocks"] = host_blocks
        elif host_bytes is not None:
            settings["host_bytes"] = parse_bytes(host_bytes, "host_bytes")
        else:
            settings["host_bytes"] = max(DEFAULT_HOST_BYTES, slot_bytes(block_bytes))
        if path is None:
            for name, value in (("capacity", capacity), ("disk_blocks", disk_blocks)):
                if value is not None:
                    raise config_error(name, value, "none without a path")
        else:
            settings["disks"] = _disks(_paths(path), capacity, disk_blocks, block_bytes)
        self = super().__new__(cls, settings)
        _opened[next(_numbers)] = self
        return self

    def __reduce__(self):
        raise TypeError(
            "found a Cache to pickle or copy, expected one left where it is: open another from the same settings"
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<kvhoist.Cache {self.namespace!r} of {self.block_bytes}-byte blocks, {state}>"

    # Memory

    def register_host(self, memory: Any, nbytes: int | None = None, *, pin: bool = False) -> _native.Region:
        """Registers memory to be loaded into and stored from in place.

        ``memory`` is a writable buffer object, or an address with ``nbytes``. An address must stay mapped until
        ``Region.unregister`` has returned or the cache is closed; a buffer object is kept.

        ``pin`` has the kernel keep it pinned, as a buffer of the ring, which makes transfers cheaper; ``Region.pinned``
        says whether it does (there may be no ring, or too little memory that may be locked). That takes some 30 ms a
        GiB for this region and all that are pinned already, in which the cache moves nothing: for large pools, at the
        start.

        It stays registered until `Region.unregister` or the close, whether or not the region is kept.

        Raises ArgumentError for a range that is empty or registered already, BusyError past 4,096 regions.
        """
        if isinstance(memory, int):
            if nbytes is None:
                raise ArgumentError(f"nbytes: found None, expected the bytes at address {memory:#x}")
            return self.register_address(memory, nbytes, pin)
        return self.register_buffer(memory, pin)

    def register_device(self, address: int, nbytes: int) -> _native.Region:
        """Registers device memory, such as an engine's KV cache, to be loaded into and stored from in place.

        ``address`` is one of the CUDA device that the cache was opened with (``device``, ``device_ordinal``, and
        ``device_blocks`` of 1 at least), or of host memory where that plays the device. It must stay allocated until
        ``Region.unregister`` has returned or the cache is closed. The cache has streams of its own: what others have
        begun to write there must have ended before a block is stored from it or loaded into it.

        Raises ArgumentError for a range that is empty or registered already, BusyError past 4,096 regions,
        UnavailableError without a device tier.
        """
        return super().register_device(address, nbytes)

    # Blocks

    def load_layers(
        self, keys: Sequence[str | bytes], addresses: Any, sizes: Sequence[int], layer_of: Sequence[int]
    ) -> _native.LayerLoad:
        """Begins to load blocks layer by layer, and returns at once: a model can begin with its first layer while the
        last one is on its way.

        ``addresses`` and ``sizes`` are the segments in registered memory, as for ``Queue.submit_load_pages``;
        ``layer_of`` says for each segment of a block which layer it belongs to, counted from 0. Blocks in host memory
        are copied in the order of layers. Blocks on disk arrive whole: a layer of a load with such blocks is complete
        when the last of them is.

        ``LayerLoad.wait`` waits for one layer, ``LayerLoad.blocks`` for all. Memory must stay as it is until
        ``LayerLoad.blocks`` or ``Region.unregister`` has returned.

        Raises ArgumentError before anything moved: as ``load``, and for layers without segments.
        """
        return super().load_layers(keys, addresses, sizes, layer_of)

    def queue(self, depth: int = 1024) -> _native.Queue:
        """A queue of at most ``depth`` submissions that are not drained yet: submit, ``event_fd``, drain."""
        return super().queue(depth)

    def close(self) -> None:
        """Finishes what is under way, writes what is dirty, flushes, and releases the files and all memory.

        Again: waits for the same end, with the same result. Interrupted by a signal, the close goes on; call again to
        wait for it.

        Raises RefusedError, IoError, UnavailableError or DeadlineError for what is not on disk, and ClosedError where a
        defect has ended the cache before: blocks that were not on disk by then are lost. It is closed all the same.
        """
        super().close()
