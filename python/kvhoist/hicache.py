"""One host pool's pages on disk: what the SGLang backend is made of. Needs torch's tensors, not SGLang."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Sequence

from ._native import Region
from .cache import Cache, slot_bytes, slots_within, store_bytes
from .client import Client
from .config import HiCacheConfig, config_error, printable
from .errors import ClosedError, RefusedError, StoreError
from .hicache_service import connect_pool

logger = logging.getLogger(__name__)

#: Changes whenever stored pages would be read differently.
FORMAT = "hicache-v1"

#: Shorter segments of pages with several travel through the cache's own memory, in one operation instead of many.
STRAIGHT_SEGMENT_BYTES_MIN = 64 << 10

#: Share of a file system that a store leaves free.
FREE_SHARE_MIN = 0.01


@dataclass(frozen=True)
class Identity:
    """Everything that a page's bytes depend on and its key does not tell."""

    model_name: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dp_rank: int
    is_mla_model: bool
    dcp_size: int = 1
    dcp_rank: int = 0
    #: What tells weights from others that are served by the same name: pairs of a name and a value.
    weights: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, config: Any, server_args: Any = None, revision: str = "") -> "Identity":
        """Of SGLang's HiCacheStorageConfig; fields that an older version lacks are what they mean there.

        `server_args` are SGLang's, where there is a server; `revision` is the operator's.
        """
        return cls(
            model_name=config.model_name or "unnamed",
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=getattr(config, "pp_rank", 0),
            pp_size=getattr(config, "pp_size", 1),
            attn_cp_rank=getattr(config, "attn_cp_rank", 0),
            attn_cp_size=getattr(config, "attn_cp_size", 1),
            dp_rank=getattr(config, "dp_rank", 0),
            is_mla_model=bool(config.is_mla_model),
            dcp_size=getattr(config, "dcp_size", 1),
            dcp_rank=getattr(config, "dcp_rank", 0),
            weights=_weights(config.model_name, server_args, revision),
        )

    def digested(self) -> dict[str, Any]:
        """Its fields as they enter the digest. Without `weights` where they say nothing: as in earlier versions."""
        fields = asdict(self)
        if not self.weights:
            del fields["weights"]
        return fields

    def shared(self) -> "Identity":
        """What ranks have in common that hold the same bytes: all of an MLA model, and data-parallel replicas."""
        tensor = dict(tp_rank=0, tp_size=1) if self.is_mla_model else {}
        return replace(self, dp_rank=0, **tensor)

    def groups(self) -> int:
        """How many groups of ranks there are that share no page with each other."""
        return self.tp_size * self.pp_size * self.attn_cp_size

    def rank_name(self) -> str:
        """This rank, as a folder's name."""
        ranks = (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("cp", self.attn_cp_rank, self.attn_cp_size),
        )
        return "-".join(f"{name}{rank}of{size}" for name, rank, size in ranks) + f"-dp{self.dp_rank}"


#: Of SGLang's server arguments, those that change the values in a page and neither its key nor its geometry.
_WEIGHTS_ARGS = ("revision", "quantization", "json_model_override_args")


def _weights(model_name: str | None, server_args: Any, revision: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, Any] = {"kvhoist_revision": revision}
    path = getattr(server_args, "model_path", None)
    if path != model_name:
        found["model_path"] = path
    found.update((name, getattr(server_args, name, None)) for name in _WEIGHTS_ARGS)
    if found["json_model_override_args"] == "{}":  # SGLang's default.
        del found["json_model_override_args"]
    adapters = getattr(server_args, "lora_paths", None) or ()
    if isinstance(adapters, dict):
        adapters = adapters.items()
    found["lora"] = json.dumps(sorted(map(_adapter, adapters))) if adapters else None
    return tuple((name, str(value)) for name, value in sorted(found.items()) if value)


def _adapter(adapter: Any) -> str:
    """An adapter's name and path. Not its id, which SGLang draws anew at every start."""
    name, path = getattr(adapter, "lora_name", None), getattr(adapter, "lora_path", None)
    return str(adapter) if name is None and path is None else f"{name}={path}"


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
        return cls(page_bytes, page_tokens, len(sizes), layout, dtype)


def _page_indices(page_tokens: int) -> Any:
    import torch

    return torch.arange(page_tokens, dtype=torch.int64)


def pool_memory(pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of every piece of host memory that a pool's pages lie in."""
    tensors: list[Any] = []
    hybrid = getattr(pool, "get_hybrid_pool_buffer", None)
    if callable(hybrid):
        tensors += _tensors(hybrid())
    tensors += _tensors(getattr(pool, "kv_buffer", None))
    pieces = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        pieces[storage.data_ptr()] = max(storage.nbytes(), pieces.get(storage.data_ptr(), 0))
    return [(address, nbytes) for address, nbytes in pieces.items() if nbytes > 0]


def huge_page_share(pieces: list[tuple[int, int]]) -> float | None:
    """What part of some memory lies in huge pages, as far as the system says; `None` where it does not.

    Mappings are counted whole: a little more than the pieces, where those do not begin or end with one.
    """
    total = sum(nbytes for _, nbytes in pieces)
    inside, huge = False, 0
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                first, _, rest = line.partition(" ")
                if first == "AnonHugePages:" and inside:
                    huge += int(rest.split()[0]) << 10
                elif not first.endswith(":"):
                    start, end = (int(number, 16) for number in first.split("-"))
                    inside = any(start < address + nbytes and address < end for address, nbytes in pieces)
    except (OSError, ValueError, IndexError):
        return None
    return min(1.0, huge / total) if total else None


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if hasattr(value, "untyped_storage") else []


def flat_bytes(tensor: Any) -> Any:
    """A contiguous tensor's memory as a buffer object, whatever its dtype."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"found a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}; expected host memory, contiguous"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


class PoolStore:
    """One pool of one rank: its store on disk, and the ways in and out.

    Methods raise; the backend answers for that. Safe for a reader, a writer and whoever asks what exists, at once.
    """

    def __init__(
        self, config: HiCacheConfig, identity: Identity, name: str, pool: Any, page_tokens: int, capacity: int,
        socket: str | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.pool = pool
        self.config = config
        self.identity = identity
        self.geometry = Geometry.of(pool, page_tokens)
        self.capacity = capacity
        #: Of the service that has the pages, or `None` where this process has them.
        self.socket = socket
        #: Of the pool's memory, in a service.
        self.regions: list[Region] = []
        self._open_lock = threading.Lock()
        self.directories = self._directories()
        self.cache: Cache | Client = self._open() if socket is None else connect_pool(self, socket)

    # Opening

    def namespace(self) -> str:
        """The engine's namespace: a digest of all that the bytes depend on, behind words for people."""
        what = {"format": FORMAT, "pool": self.name, **self.identity.digested(), **asdict(self.geometry)}
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{_slug(self.identity.model_name)[:80]}/{self.identity.rank_name()}/{_slug(self.name)}/{digest[:32]}"

    def _directories(self) -> list[str]:
        model, rank, pool, digest = self.namespace().split("/")
        return [os.path.join(path, f"{model}-{digest[:12]}", rank, pool) for path in self.config.path]

    def _open(self) -> Cache:
        page, paths = self.geometry.page_bytes, len(self.directories)
        slot, slots = slot_bytes(page), slots_within(self.capacity // paths, page)
        if slots < 1:
            expected = f"room for one page of {page} bytes of pool {self.name!r} on each of {paths} paths"
            raise config_error("capacity", self.capacity, expected)
        if self.config.host_bytes < slot:
            expected = f"room for one page of {slot} bytes of pool {self.name!r}"
            raise config_error("host_bytes", self.config.host_bytes, expected)
        for directory in self.directories:
            _make_directory(directory, store_bytes(slots, page))
        cache = Cache(
            self.directories,
            block_bytes=self.geometry.page_bytes,
            host_bytes=self.config.host_bytes,
            capacity=self.capacity,
            namespace=self.namespace(),
            write_policy=self.config.write_policy,
            direct_io=self.config.direct_io,
            storage=self.config.storage,
            # The pool is SGLang's host tier: pages that direct I/O can reach need no second one here.
            bypass_host=not self.config.keep_in_host,
            deadline_ms=self.config.deadline_ms,
            read_bytes_in_flight_max=max(slot, self.config.read_bytes_in_flight_max),
            write_bytes_in_flight_max=max(slot, self.config.write_bytes_in_flight_max),
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

    def goes_straight(self) -> bool:
        """Whether pages go straight between drive and pool, with no copy here: what the engine will do with them."""
        return self._goes_straight(self.cache)

    def huge_page_share(self) -> float | None:
        """What part of the pool lies in huge pages."""
        return huge_page_share(pool_memory(self.pool))

    def _goes_straight(self, cache: Cache | Client) -> bool:
        if not self.geometry.segments or self.config.keep_in_host:
            return False
        try:
            # Two pages, for the distance between them.
            addresses, sizes = self.pool.get_page_buffer_meta(_page_indices(2 * self.geometry.page_tokens))
        except IndexError:
            addresses, sizes = self.pool.get_page_buffer_meta(_page_indices(self.geometry.page_tokens))
        # A service maps pools where pages of memory begin; what less its drives would take, it does not say.
        align = 4096 if isinstance(cache, Client) else cache.stats()["memory_align_bytes"]
        long = self.geometry.segments == 1 or all(size >= STRAIGHT_SEGMENT_BYTES_MIN for size in sizes)
        return long and all(a % align == 0 and size % 4096 == 0 for a, size in zip(addresses, sizes))

    # Pages

    def match(self, keys: list[str]) -> int:
        """How many leading keys are there."""
        return self.cache.match_prefix(keys)

    def contains(self, keys: list[str]) -> list[bool]:
        """Which keys are there."""
        return self.cache.contains_each(keys)

    def get(self, keys: list[str], host_indices: Any) -> list:
        """Reads pages into the pool: for each True, False for a miss, or what went wrong."""
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
        """Stores pages of the pool: for each True, or what went wrong."""
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
        """Stores tensors of a page each; each on its own, no chain."""
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
        """Forgets every page, on disk as well. Calls under way fail as on a closed cache."""
        with self._open_lock:
            if self.cache.closed:
                raise ClosedError("the cache is closed")
            if isinstance(self.cache, Client):
                raise RefusedError("pages of a service are other ranks' and servers' too: remove its space instead")
            # While the lock is held: after the close it may be another process's store.
            for directory in self.directories:
                os.unlink(os.path.join(directory, "kvhoist.store"))
            self.cache.close()
            self.cache = self._open()

    def close(self) -> None:
        """Writes what is dirty and releases the files."""
        with self._open_lock:
            self.cache.close()


def split_capacity(config: HiCacheConfig, page_bytes: dict[str, int]) -> dict[str, int]:
    """Bytes for each pool: those with a share get it, the others what is left in proportion to their pages."""
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


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "unnamed"


def _make_private_folders(directory: str) -> None:
    """Creates the folders of a path that are missing, each of mode 0700 whatever the umask."""
    path = Path(directory)
    # os.makedirs gives its mode to the last folder only, and the umask takes from it.
    for folder in [*reversed(path.parents), path]:
        if folder.is_dir():
            continue
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            # Made by another process meanwhile, or no folder at all, which opening it says.
            continue
        if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
            folder.chmod(0o700)


def _make_directory(directory: str, file_bytes: int) -> None:
    """Creates the directory; StoreError where the file system has no room for the store that is to be created."""
    _make_private_folders(directory)
    if os.path.exists(os.path.join(directory, "kvhoist.store")):
        return
    system = os.statvfs(directory)
    free = system.f_bavail * system.f_frsize
    reserve = int(system.f_blocks * system.f_frsize * FREE_SHARE_MIN)
    if file_bytes + reserve > free:
        raise StoreError(
            f"{printable(directory)}: found {free} bytes free, expected {file_bytes} for the store and {reserve} to be "
            "left; lower `capacity`, or free space"
        )


def prefix_parent(extra_info: Any) -> str | None:
    """The key before the first of a call, where SGLang passes it on."""
    keys: Sequence[str] | None = getattr(extra_info, "prefix_keys", None)
    return keys[-1] if keys else None
