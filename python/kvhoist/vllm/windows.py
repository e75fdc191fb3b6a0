"""KV cache groups of which vLLM offloads chunks with blocks missing: it frees what a window has left while the request
runs. Its copies to host memory put the other blocks in the wrong place, or leave the missing ones as they were."""

from __future__ import annotations

import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

from .._values import config_error

#: Whether the chunks that vLLM stores have all blocks that a load may ask for. Before 0.33 they surely have their last.
HAS_WHAT_LOADS_ASK_FOR = hasattr(OffloadingConnectorScheduler, "_reachable_store_block_mask")


def check_windows(spec: Any) -> None:
    """Refuses what has vLLM store wrong chunks of windows: where it may leave blocks out, or offers them too late."""
    longest = max(group.tokens_per_block for group in spec.config.groups)
    late = [
        group.group_id
        for group in spec.config.groups
        if getattr(group, "sliding_window_size_in_chunks", None) and group.tokens_per_block < longest
    ]
    if late and not spec.offload_prompt_only:
        expected = f"true: vLLM offers the end of an answer of KV cache groups {late} when its blocks may be others"
        raise config_error("offload_prompt_only", False, expected)
    groups = _groups_with_holes(spec.blocks_per_chunk) if spec.blocks_per_chunk > 1 else []
    if groups:
        name = "block_size" if "block_size" in spec.extra_config else "blocks_per_chunk"
        expected = "not more than the window" if HAS_WHAT_LOADS_ASK_FOR else "chunks of one block, or vLLM 0.33"
        raise config_error(
            name, f"{spec.extra_config.get(name)} with a sliding window, or a state, in KV cache groups {groups}",
            f"{expected}: this version of vLLM offloads chunks of these groups with blocks missing",
        )  # fmt: skip


def _groups_with_holes(blocks_per_chunk: int) -> list[int]:
    """Those of the engine that is being made. vLLM shows a tier no windows, so they are taken from its caller."""
    frame: Any = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("kv_cache_config"), "kv_cache_groups"):
        frame = frame.f_back
    groups = [] if frame is None else frame.f_locals["kv_cache_config"].kv_cache_groups
    return [at for at, group in enumerate(groups) if _has_holes(group.kv_cache_spec, blocks_per_chunk)]


def _has_holes(spec: Any, blocks_per_chunk: int) -> bool:
    # A group of layers of several sizes has a specification for each.
    spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
    if isinstance(spec, FullAttentionSpec):
        return False
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return not HAS_WHAT_LOADS_ASK_FOR or 0 < window < blocks_per_chunk * spec.block_size
