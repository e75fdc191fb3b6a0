"""What vLLM shows to no tier and no spec, and its callers have: the configuration of the engine that is being made."""

from __future__ import annotations

import os
import sys
from typing import Any

from .._values import config_error
from .longest_request import depends_on_longest_request


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
    the same sizes order them differently. A backend whose kernels take smaller blocks has a block as several of theirs,
    each with all heads. Recurrent states lie one behind the other, and then padding. Under context parallelism tokens
    are dealt out to the ranks in runs. Empty for a block as most backends have it.
    """
    found: dict[str, Any] = {}
    groups = [specs_of(group.kv_cache_spec) for group in kv_cache_groups()]
    packings = [sorted({_packing(one) for one in specs}) for specs in groups]
    packed = any(packing != [(0, 0)] for packing in packings)
    if packed:
        found["packing"] = packings
        found["shuffled"] = os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "0").lower() in ("1", "true")
    if packed or any(_may_be_several(one) for specs in groups for one in specs):
        found["attention"] = _attention()
    states = [sorted({f"{one.shapes} {one.dtypes}" for one in specs if hasattr(one, "shapes")}) for specs in groups]
    if any(states):
        found["states"] = states
        found["conv_states"] = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
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


#: The tokens of a block that the kernels of every backend take whole.
_WHOLE_TOKENS = 16

#: Settings that choose a backend, and with it the size of its kernels' blocks.
_ATTENTION_ARGS = ("backend", "backend_per_kind", "flash_attn_version", "use_trtllm_attention")


def _may_be_several(one: Any) -> bool:
    return not hasattr(one, "shapes") and getattr(one, "block_size", 0) > _WHOLE_TOKENS


def _attention() -> dict[str, str]:
    """Those of the settings of attention that are set."""
    attention = getattr(of_the_engine("vllm_config", "attention_config"), "attention_config", None)
    found = {name: getattr(attention, name, None) for name in _ATTENTION_ARGS}
    return {name: str(value) for name, value in found.items() if value not in (None, {})}


#: vLLM's settings that change the values in a block, but neither its key nor its size.
_WEIGHTS_ARGS = ("revision", "quantization", "quantization_config", "hf_config_path", "hf_overrides")

#: Dtypes of recurrent states, with the same effect.
_STATES_ARGS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")

#: Those of media, with the same effect: their hashes have the settings of a request, and none of these.
_MEDIA_ARGS = ("mm_processor_kwargs", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "video_pruning_rate")


def weights_of(vllm_config: Any) -> dict[str, Any]:
    """Those of the settings that are set, and what else decides the values in a block."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    found = {name: getattr(model_config, name, None) for name in _WEIGHTS_ARGS}
    for name in _STATES_ARGS:
        value = getattr(cache_config, name, "auto")
        found[name] = None if value == "auto" else str(value)
    media = getattr(model_config, "multimodal_config", None)
    found |= {name: getattr(media, name, None) for name in _MEDIA_ARGS}
    if found["video_pruning_rate"]:
        # It has a default, which alone prunes nothing.
        found["video_pruning_method"] = getattr(media, "video_pruning_method", None)
    # What any adapter may change; the keys have adapters' names. In any order, some of them twice.
    lora = getattr(vllm_config, "lora_config", None)
    found["lora_target_modules"] = sorted(set(getattr(lora, "target_modules", None) or ()))
    found["enable_tower_connector_lora"] = bool(getattr(lora, "enable_tower_connector_lora", False))
    # Layers whose blocks have the model's dtype beside a cache of another: in any order, some of them twice.
    found["kv_cache_dtype_skip_layers"] = sorted(set(getattr(cache_config, "kv_cache_dtype_skip_layers", None) or ()))
    if cache_config.cache_dtype != "auto":
        # The cache's own dtype is in the identity, and not the model's, whose numbers are converted to it.
        found["dtype"] = str(model_config.dtype)
    load_format = getattr(getattr(vllm_config, "load_config", None), "load_format", "auto")
    if str(getattr(load_format, "value", load_format)) == "dummy":
        # Random weights.
        found["load_format"] = "dummy"
    hf_config = getattr(model_config, "hf_config", None)
    if hf_config is not None and depends_on_longest_request(hf_config.to_dict()):
        found["max_model_len"] = model_config.max_model_len
    # Llama 4's, which otherwise depends on the longest request.
    tuning = (getattr(model_config, "override_generation_config", None) or {}).get("attn_temperature_tuning")
    found["attn_temperature_tuning"] = None if tuning is None else str(tuning)
    overrides = found["hf_overrides"]
    if callable(overrides):
        # Its representation has an address, which another process does not have.
        found["hf_overrides"] = f"{overrides.__module__}.{getattr(overrides, '__qualname__', type(overrides).__name__)}"
    return {name: value for name, value in found.items() if value}


def seen_weights(spec: Any) -> dict[str, Any]:
    """The `weights_of` the engine that is being made, for a tier, which is shown none. Empty where nothing is set."""
    engine = of_the_engine("vllm_config", "model_config")
    found = {} if engine is None else weights_of(engine)
    if getattr(spec.config.model, "max_model_len", 0):
        # The specification has it, and so has its place.
        found.pop("max_model_len", None)
    return {"weights": found} if found else {}
