"""Pages by SGLang's unified keys: a store for each chunk of layers and heads, whatever topology its ranks belong to.

SGLang cuts the pages of a model by a grid of layers and heads that does not depend on ranks (`KVCacheNamespace`), and
names the bytes of a chunk alike in each host layout. A chunk belongs to one rank of a server, so its store does too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy

from .._store_settings import StoreSettings
from .._stores import close_all, slug
from .._values import config_error
from .identity import Identity, holds_draft, logical_dtype
from .pools import PoolStore, device_layout
from .settings import KeyScheme

#: Changed whenever stored chunks would be read differently.
FORMAT = "hicache-unified-v1"

#: Pieces of memory that a page may lie in for a service: the places of a request (docs/protocol.md).
PIECES_MAX = 65_536


def agreed(scheme: KeyScheme, storage_config: Any, server_args: Any) -> KeyScheme:
    """The scheme that holds: that of the settings, or of a version of SGLang that has decided itself."""
    if getattr(storage_config, "unified_suffixes", None) is None:
        return scheme
    return KeyScheme(
        True,
        scheme.head_group or getattr(server_args, "hicache_storage_head_group", None),
        scheme.layer_partition or getattr(server_args, "hicache_storage_layer_partition", None),
    )


def plan(scheme: KeyScheme, name: str, pool: Any, storage_config: Any, server_args: Any) -> Any:
    """SGLang's plan of a rank's chunks. Raises ConfigError for what SGLang cannot name, or what kvhoist would misread."""
    version = getattr(sys.modules.get("sglang"), "__version__", None) or "unknown"

    def refused(why: object) -> Exception:
        return config_error("key_scheme", "unified", f"'ranks' for pool {name!r} of sglang {version}: {why}")

    try:
        from sglang.srt.mem_cache.hicache_key_scheme import normalize_dtype, plan_unified_kv
    except ImportError as error:
        raise refused(f"it has no unified keys ({error}), as 0.5.23 has") from None
    if name != "kv" or holds_draft(name, pool):
        raise refused("its pages are not in the grid of the model's layers and heads")
    if (on_device := device_layout(pool)) != "nhd":
        raise refused(f"found kv_cache_layout {on_device!r}, expected 'nhd' (without SGLANG_USE_HND_KVCACHE)")
    layers = pool.end_layer - pool.start_layer
    if layers != pool.layer_num:
        raise refused(
            f"found {pool.layer_num} layers in it, expected the model's {pool.start_layer} to {pool.end_layer}"
        )
    replicated = bool(storage_config.is_mla_model)
    try:
        made = plan_unified_kv(
            model_id=storage_config.model_name or "",
            dtype=normalize_dtype(logical_dtype(pool.dtype, server_args)),
            page_size=pool.page_size,
            rank_replicated=replicated,
            local_kv_heads=1 if replicated else pool.head_num,
            attn_tp_rank=storage_config.tp_rank,
            attn_tp_size=storage_config.tp_size,
            attn_cp_size=storage_config.attn_cp_size,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            is_final_stage=storage_config.pp_rank == storage_config.pp_size - 1,
            head_group=scheme.head_group,
            layer_partition=scheme.layer_partition,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise refused(error) from None
    told = getattr(storage_config, "unified_suffixes", None)
    if told is not None and list(told) != list(made.suffixes):
        raise refused(f"found chunks {list(told)}, expected {list(made.suffixes)}")
    return made


class ChunkPool:
    """One chunk of each page of a host pool: what `PoolStore` asks of a pool.

    Its bytes are in the order of SGLang's `page_unified` layout, layer, K or V, token, head: the same in every layout.
    """

    def __init__(self, pool: Any, layers: tuple[int, int], heads: tuple[int, int], layout: str, dtype: str) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, pool.page_size
        self.kv_buffer = pool.kv_buffer
        self.allocator, self.fd = getattr(pool, "allocator", None), getattr(pool, "fd", None)
        chunk = _view(pool, heads)[:, layers[0] : layers[1]]
        self._base, itemsize = chunk.data_ptr(), chunk.element_size()
        self._page_stride = chunk.stride(0) * itemsize
        dims = list(zip(chunk.shape[1:], chunk.stride()[1:]))
        # The innermost dimensions that lie in one piece.
        run = 1
        while dims and (dims[-1][1] == run or dims[-1][0] == 1):
            run *= dims.pop()[0]
        offsets = numpy.zeros(1, dtype=numpy.int64)
        for count, stride in dims:
            offsets = (offsets[:, None] + numpy.arange(count, dtype=numpy.int64) * (stride * itemsize)).ravel()
        self._offsets, self._run = offsets, run * itemsize

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """The address and the bytes of each piece of the chunk, page after page, as SGLang's pools have it of pages."""
        pages = numpy.asarray(indices[:: self.page_size], dtype=numpy.int64) // self.page_size
        addresses = self._base + pages[:, None] * self._page_stride + self._offsets
        return addresses.ravel().tolist(), [self._run] * addresses.size


def _view(pool: Any, heads: tuple[int, int]) -> Any:
    """The pool's memory as page, layer, K or V, token, head, of some heads."""
    layout, buffer, tokens = pool.layout, pool.kv_buffer, pool.page_size
    mla = not hasattr(pool, "head_num")
    of_v = getattr(pool, "v_head_dim", None)
    if not hasattr(buffer, "untyped_storage") or of_v not in (None, getattr(pool, "head_dim", None)):
        raise config_error("key_scheme", "unified", "'ranks': K and V of this model's pool differ in size")
    if mla and layout != "page_unified":
        # Of one token: a head of its own, and no V.
        buffer = buffer.unsqueeze(0)
    if layout == "layer_first":
        view = buffer.unflatten(2, (-1, tokens)).permute(2, 1, 0, 3, 4, 5)
    elif layout == "page_first":
        view = buffer.unflatten(1, (-1, tokens)).permute(1, 3, 0, 2, 4, 5)
    elif layout == "page_first_direct":
        view = buffer.permute(1, 2, 0, 3, 4, 5)
    elif layout == "page_unified" and mla:
        view = buffer.unsqueeze(2).unsqueeze(4)
    elif layout == "page_unified":
        group, first = divmod(heads[0], buffer.shape[5])
        heads = (first, first + heads[1] - heads[0])
        if heads[1] > buffer.shape[5]:
            expected = f"at most the pool's own groups of {buffer.shape[5]} heads"
            raise config_error("head_group", heads[1] - heads[0], expected)
        view = buffer[:, group]
    else:
        known = "layer_first, page_first, page_first_direct or page_unified"
        raise config_error("hicache_mem_layout", layout, known + " beside key_scheme 'unified'")
    return view[:, :, :, :, heads[0] : heads[1]]


class ChunkStore(PoolStore):
    """The store of one chunk of a pool's pages: without ranks in its name."""

    def __init__(self, agreement: dict, chunk: str, *given: Any) -> None:
        self._agreement, self._chunk = agreement, chunk
        super().__init__(*given)

    def check(self, capacity: int, has_size: bool) -> None:
        pieces = self.geometry.segments
        if self.socket is not None and pieces > PIECES_MAX:
            expected = (
                f"a smaller one, or hicache_mem_layout 'page_unified', beside a service: a page of pool {self.name!r} "
                f"lies in {pieces} pieces, of which a service takes {PIECES_MAX} at most"
            )
            raise config_error("page_size", self.geometry.page_tokens, expected)
        super().check(capacity, has_size)

    def namespace(self) -> str:
        what = {
            "format": FORMAT, "chunk": self._chunk, "agreement": self._agreement, "weights": self.identity.weights,
            "bytes": self.geometry.page_bytes,
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{slug(self.identity.model_name)[:80]}/unified/{slug(self._chunk)}/{digest[:32]}"


class UnifiedStore:
    """The pages of one pool of a rank, in a store for each of their chunks. A page is there if all its chunks are.

    Methods raise, and take threads, as those of `PoolStore`.
    """

    def __init__(
        self, config: StoreSettings, identity: Identity, name: str, pool: Any, page_tokens: int,
        socket: str | None, planned: Any,
    ) -> None:  # fmt: skip
        from msgspec.structs import asdict

        agreement = asdict(planned.namespace)
        pools = [
            ChunkPool(pool, layers, heads, planned.namespace.object_layout, planned.namespace.dtype)
            for layers, heads in itertools.product(planned.layer_ranges, planned.head_ranges)
        ]
        sizes = [sum(chunk.get_page_buffer_meta(numpy.arange(page_tokens))[1]) for chunk in pools]
        self.page_bytes = sum(sizes)
        config = replace(config, host_bytes=config.host_bytes // len(pools))
        self._chunks = [
            ChunkStore(agreement, chunk, config, identity, f"{name}-{chunk}", chunk_pool, page_tokens, socket)
            for chunk, chunk_pool in zip(planned.suffixes, pools)
        ]

    def check(self, capacity: int, has_size: bool) -> None:
        for chunk in self._chunks:
            chunk.check(capacity * chunk.page_bytes // self.page_bytes, has_size)

    def open(self, capacity: int) -> None:
        with ExitStack() as opened:
            for chunk in self._chunks:
                chunk.open(capacity * chunk.page_bytes // self.page_bytes)
                opened.callback(chunk.close)
            opened.pop_all()

    def parts(self) -> list[PoolStore]:
        """The stores of the chunks."""
        return list(self._chunks)

    def match(self, keys: list[str]) -> int:
        return min(chunk.match(keys) for chunk in self._chunks)

    def contains(self, keys: list[str]) -> list[bool]:
        return [all(there) for there in zip(*(chunk.contains(keys) for chunk in self._chunks))]

    def get(self, keys: list[str], host_indices: Any) -> list:
        return _of_pages([chunk.get(keys, host_indices) for chunk in self._chunks])

    def set(self, keys: list[str], host_indices: Any, parent: str | None) -> list:
        return _of_pages([chunk.set(keys, host_indices, parent) for chunk in self._chunks])

    def get_flat(self, keys: list[str], pages: list[Any]) -> list:
        raise ValueError("found pages in tensors, expected places in the pool: set interface_v1 to 1")

    set_flat = get_flat

    def clear(self) -> None:
        for chunk in self._chunks:
            chunk.clear()

    def close(self) -> None:
        close_all(self._chunks)


def _of_pages(of_chunks: list[list]) -> list:
    """Of each page: True if all its chunks are, else the first other result."""
    return [next((result for result in results if result is not True), True) for results in zip(*of_chunks)]
