"""The device pools of a model under SGLang, cut into the pieces of pages."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from .._values import config_error
from .linker_pages import Piece

logger = logging.getLogger(__name__)


def pools_of(kvcache: Any, params: Any, components: set) -> Any:
    """SGLang's `DevicePoolGroup` of a model.

    SGLang itself has none for pools of plain MHA and MLA, and for MHA with sliding windows: they are made of its own
    entries here. Raises ConfigError for pools that neither knows.
    """
    for pool in (kvcache, getattr(kvcache, "full_kv_pool", None), getattr(kvcache, "swa_kv_pool", None)):
        # Elsewhere a row of a buffer is a page of heads, and not a token.
        if (layout := getattr(pool, "kv_cache_layout", "nhd")) != "nhd":
            raise config_error("kv_cache_layout", layout, "'nhd' (without SGLANG_USE_HND_KVCACHE)")
    page, group = params.page_size, None
    drafts = getattr(params, "mtp_draft_device_pools", ()) or getattr(params, "sidecar_draft_device_pools", ())
    if components == {ComponentType.FULL} and type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool) and not drafts:
        group = _plain(kvcache, page)
    elif components == {ComponentType.FULL, ComponentType.SWA} and type(kvcache).__name__ == "SWAKVPool" and not drafts:
        group = _windowed(kvcache, page)
    if group is not None:
        return group
    try:
        return assembler.resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page, params=params, components=components
        )
    except (AssertionError, ValueError) as error:
        found = f"{type(kvcache).__name__} with {', '.join(sorted(component.name for component in components))}"
        raise config_error("model", found, f"device pools that SGLang has a linker for ({error})") from None


def _plain(kvcache: Any, page: int) -> Any:
    layers = {layer: layer for layer in range(kvcache.layer_num)}
    if isinstance(kvcache, MLATokenToKVPool):
        entry = assembler.DevicePoolEntry(
            name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=kvcache, components=[kvcache.kv_buffer],
            layer_mapping=layers, page_size=page, rows_are_pages=False,
        )  # fmt: skip
        return assembler.DevicePoolGroup([entry], kvcache.layer_num, page, rank_replicated=True)
    entry = assembler._mha_device_pool_entry(PoolName.KV, kvcache, layers, page)
    return assembler.DevicePoolGroup([entry], kvcache.layer_num, page)


def _windowed(kvcache: Any, page: int) -> Any:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _swa_layer_mappings

    full, windowed = _swa_layer_mappings(kvcache)
    if not all(isinstance(pool, MHATokenToKVPool) for pool in (kvcache.full_kv_pool, kvcache.swa_kv_pool)):
        return None
    entries = [
        assembler._mha_device_pool_entry(PoolName.KV, kvcache.full_kv_pool, full, page),
        assembler._mha_device_pool_entry(PoolName.SWA, kvcache.swa_kv_pool, windowed, page),
    ]
    return assembler.DevicePoolGroup(entries, max(full | windowed) + 1, page)


def by_component(group: Any) -> dict[str, list]:
    """The entries of each component: those whose pages are numbered by the same indices, and named by the same keys."""
    found: dict[str, list] = {}
    for entry in group.entries:
        found.setdefault(str(entry.indices_from_pool), []).append(entry)
    return found


def pieces_of(entries: list, layers: int) -> list[Piece]:
    """The pieces of a component's pages, in the order of layers.

    Raises ConfigError where a buffer belongs to no layer: its bytes would not come back.
    """
    pieces = []
    for pool, entry in enumerate(entries):
        before = len(pieces)
        for layer in range(layers):
            meta = entry.get_prepared_layer_range_meta([0, 1], layer)
            if meta is None:
                continue
            addresses, sizes = ([value for row in rows for value in row] for rows in meta[:2])
            # Those of row 0, then those of row 1: a row is what lies between the two.
            half = len(addresses) // 2
            for first, second, nbytes in zip(addresses[:half], addresses[half:], sizes):
                pieces.append(Piece(pool, first, second - first, nbytes, layer))
        found = {piece.address for piece in pieces[before:]}
        buffers = len(entry.get_hybrid_pool_buffer())
        if len(found) != buffers or len(pieces) - before != buffers:
            raise config_error(
                "model", f"{len(found)} of {buffers} buffers of pool {entry.name} in its layers",
                "each buffer in one layer: this version of SGLang lays out its pools in a way unknown to kvhoist",
            )  # fmt: skip
    return sorted(pieces, key=lambda piece: piece.layer)


def memory_of(entries: list) -> list[tuple[int, int]]:
    """(address, bytes) of all memory of some pools."""
    pieces: dict[int, int] = {}
    for entry in entries:
        for buffer in entry.get_hybrid_pool_buffer():
            storage = buffer.untyped_storage()
            pieces[storage.data_ptr()] = max(storage.nbytes(), pieces.get(storage.data_ptr(), 0))
    return [(address, nbytes) for address, nbytes in pieces.items() if nbytes > 0]


def rows_of(entries: list, indices: Any) -> list[list[int]]:
    """The rows of pages in each pool of a component. Waits for what the current stream has still to do."""
    return [entry.prepare_locations(entry.translate_indices(indices)) for entry in entries]
