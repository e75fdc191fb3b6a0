"""KV cache groups of which vLLM offloads chunks with blocks missing: it frees what a window has left while the request
runs. Its copies to host memory put the other blocks in the wrong place, or leave the missing ones as they were."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

from .._values import config_error
from .engine_config import kv_cache_groups, of_the_engine, specs_of

#: Whether vLLM offloads chunks of recurrent states whole.
_HAS_WHOLE_STATES = hasattr(OffloadingConnectorScheduler, "_reachable_store_block_mask")


def refuse_late_ends(spec: Any) -> None:
    """Refuses to have vLLM offload answers where it offers some of them when its blocks may be another request's."""
    if spec.offload_prompt_only:
        return
    # Answers of R-SWA have a window, but vLLM offloads them as those of full attention.
    gaps = [at for at, group in enumerate(kv_cache_groups()) if hasattr(_one_of(group.kv_cache_spec), "rswa_window")]
    if gaps:
        expected = f"true: vLLM frees blocks of an answer of KV cache groups {gaps} before it offers them"
        raise config_error("offload_prompt_only", False, expected)
    cache = getattr(of_the_engine("vllm_config", "cache_config"), "cache_config", None)
    if getattr(cache, "prefix_cache_retention_interval", 0) is not None:
        return
    longest = max(group.tokens_per_block for group in spec.config.groups)
    late = [
        group.group_id
        for group in spec.config.groups
        if getattr(group, "sliding_window_size_in_chunks", None) and group.tokens_per_block < longest
    ]
    if late:
        expected = (
            f"true, or a prefix_cache_retention_interval: vLLM offers the end of an answer of KV cache groups {late} "
            "when its blocks may be others"
        )
        raise config_error("offload_prompt_only", False, expected)


def refuse_holes(spec: Any) -> None:
    """Refuses chunks of several blocks beside groups of which blocks may be missing: a tier cannot know which."""
    groups = groups_with_holes(spec) if spec.blocks_per_chunk > 1 else []
    if groups:
        name = "block_size" if "block_size" in spec.extra_config else "blocks_per_chunk"
        raise config_error(
            name, f"{spec.extra_config.get(name)} with a sliding window, or a state, in KV cache groups {groups}",
            "chunks of one block: vLLM offloads chunks of these groups with blocks missing; or, with vLLM 0.33, "
            "KvhoistConnector, which leaves them out",
        )  # fmt: skip


def groups_with_holes(spec: Any) -> list[int]:
    """The KV cache groups of the engine that is being made of which vLLM offloads chunks with blocks missing."""
    # Before 0.33 every group was offloaded.
    offloaded = {getattr(group, "group_id", at) for at, group in enumerate(spec.config.groups)}
    has_holes = _is_window if _HAS_WHOLE_STATES else _is_freed
    return [at for at, group in enumerate(kv_cache_groups()) if at in offloaded and has_holes(group.kv_cache_spec)]


def whole_groups(kv_cache_config: Any) -> set[bytes]:
    """What the keys of those groups end with of which a load may ask for any block of a chunk: all but recurrent
    states, of which it asks for the last one."""
    groups = enumerate(getattr(kv_cache_config, "kv_cache_groups", ()))
    is_state = {at: _is_freed(group.kv_cache_spec) and not _is_window(group.kv_cache_spec) for at, group in groups}
    return {at.to_bytes(4, "big") for at, state in is_state.items() if not state}


def _is_freed(spec: Any) -> bool:
    return not isinstance(_one_of(spec), FullAttentionSpec)


def _is_window(spec: Any) -> bool:
    one = _one_of(spec)
    return _is_freed(one) and bool(getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None))


def _one_of(spec: Any) -> Any:
    return specs_of(spec)[0]
