"""What vLLM shows to no tier and no spec, and its callers have: the configuration of the engine that is being made."""

from __future__ import annotations

import os
import sys
from typing import Any

from .._values import config_error


def of_the_engine(name: str, has: str) -> Any:
    """A configuration of the engine that is being made; `None` where no caller has it."""
    frame: Any = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get(name), has):
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def kv_cache_groups() -> Any:
    """The KV cache groups of the engine that is being made."""
    config = of_the_engine("kv_cache_config", "kv_cache_groups")
    return () if config is None else config.kv_cache_groups


def specs_of(group_spec: Any) -> list[Any]:
    """The specifications of a group's layers: a group of layers of several sizes has one for each."""
    return list(getattr(group_spec, "kv_cache_specs", {"": group_spec}).values())


def page_layout(spec: Any) -> dict[str, Any]:
    """Where K, V and tokens lie in a block, as far as neither its size nor vLLM's `kv_cache_layout` says it.

    Attention backends of vLLM 0.33 may pack a block as other backends do not, in as many bytes. Some of them that have
    the same sizes order them differently. Under context parallelism tokens are dealt out to the ranks in runs. Empty for
    a block as most backends have it.
    """
    found: dict[str, Any] = {}
    packings = [sorted({_packing(one) for one in specs_of(group.kv_cache_spec)}) for group in kv_cache_groups()]
    if any(packing != [(0, 0)] for packing in packings):
        attention = getattr(of_the_engine("vllm_config", "attention_config"), "attention_config", None)
        found["packing"] = packings
        found["attention_backend"] = str(getattr(attention, "backend", None))
        found["shuffled"] = os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "0").lower() in ("1", "true")
    parallel = spec.config.parallel
    if getattr(parallel, "dcp_size", 1) * getattr(parallel, "pcp_size", 1) > 1:
        engine = of_the_engine("vllm_config", "parallel_config")
        if engine is None:
            found_ranks = f"{parallel.dcp_size * parallel.pcp_size} ranks"
            raise config_error("decode_context_parallel_size", found_ranks, "1: vLLM does not say who has which tokens")
        run = getattr(engine.parallel_config, "cp_kv_cache_interleave_size", 1)
        if run != 1:
            found["cp_kv_cache_interleave_size"] = run
    return found


def _packing(one: Any) -> tuple[int, int]:
    return getattr(one, "num_head_slots", None) or 0, getattr(one, "state_content_bytes", None) or 0
