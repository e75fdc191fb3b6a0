"""Pools of every kind of model that the linker takes, of SGLang's own classes, on the CPU: what each component keeps,
and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import sgl
import torch

#: Requests that have a state at once, and states in all.
REQUESTS, STATES = 8, 12

#: Layers of the models with several components, and those that attend to a window.
LAYERS, WINDOWED = 4, (1, 3)

#: Tokens that a layer with a window attends to.
WINDOW = 8


class Kept(NamedTuple):
    """One buffer of a component."""

    component: str
    buffer: torch.Tensor
    #: The first layer of the model that reads it.
    layer: int
    #: Its rows are pages or states, not tokens.
    by_page: bool = False


def _geometry(kind: str, page_tokens: int = 4) -> sgl.Geometry:
    return sgl.Geometry(
        kind=kind, layers=LAYERS, heads=2, head_dim=32, lora=96, rope=32, page_tokens=page_tokens, model=kind
    )


DSA = _geometry("dsa", 64)
SWA = _geometry("swa")
MAMBA = _geometry("mamba")
MAMBA_SWA = _geometry("mamba_swa")

#: Every kind, by its name.
MODELS = {"mha": sgl.MHA, "mla": sgl.MLA, "dsa": DSA, "swa": SWA, "mamba": MAMBA, "mamba_swa": MAMBA_SWA}


def prepare() -> None:
    """What models with states and windows need of the server: a request's own record, and the grid of states."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.utils.common import ceil_align

    sgl.only(
        "sglang.srt.managers.schedule_batch", "ReqKvInfo", Optional=None, torch=torch, ComponentType=ComponentType,
        ceil_align=ceil_align,
    )  # fmt: skip
    from sglang.srt.mem_cache.unified_cache.components import mamba

    mamba.mamba_cache_chunk_size = lambda: 1
    mamba.mamba_checkpoint_grid = lambda page: page


def request_record():
    """What a request holds of the pools, of SGLang's own class."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    return ReqKvInfo()


def pools(modules, geometry, pages: int, dtype=None) -> SimpleNamespace:
    """The pools of a model, their allocators, the components of its tree, and further parameters of it."""
    kind, page = geometry.kind, geometry.page_tokens
    components = modules.ComponentType
    requests = modules.memory_pool.ReqToTokenPool(REQUESTS, 512, sgl.DEVICE, False)
    found = SimpleNamespace(requests=requests, components=[components.FULL], more={})
    if "mamba" in kind:
        found.requests = _states(modules)
        found.components.append(components.MAMBA)
        found.more["enable_mamba_extra_buffer"] = True
    if kind in ("mha", "mla"):
        found.cache = sgl.device_pool(geometry, pages, dtype)
    elif kind == "dsa":
        found.cache = modules.memory_pool.DSATokenToKVPool(
            pages * page, page, 96, torch.bfloat16, 32, geometry.layers, sgl.DEVICE, 128, False, 128
        )
    elif kind == "mamba":
        found.cache = modules.memory_pool.HybridLinearKVPool(
            pages * page, torch.bfloat16, page, 1, 32, [0, 1, 3], sgl.DEVICE, found.requests.mamba_pool, use_mla=True,
            kv_lora_rank=96, qk_rope_head_dim=32,
        )  # fmt: skip
    else:
        found.cache = _windowed(geometry, pages)
        found.components.insert(1, components.SWA)
        found.more["sliding_window_size"] = WINDOW
    named = dict(page_size=page, dtype=torch.bfloat16, device=sgl.DEVICE, kvcache=found.cache, need_sort=False)
    if "swa" in kind:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

        found.slots = SWATokenToKVPoolAllocator(pages * page, pages * page, **named)
    else:
        named["dtype"] = found.cache.dtype
        found.slots = modules.allocator.PagedTokenToKVPoolAllocator(pages * page, **named)
    return found


def _states(modules):
    params = SimpleNamespace(
        shape=SimpleNamespace(conv=[(24, 3)], temporal=(2, 8, 16)),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32), is_kda=False,
    )  # fmt: skip
    return modules.memory_pool.HybridReqToTokenPool(
        size=REQUESTS, mamba_size=STATES, mamba_spec_state_size=0, max_context_len=512, device=sgl.DEVICE,
        enable_memory_saver=False, cache_params=params, mamba_layer_ids=[2], enable_mamba_extra_buffer=True,
    )  # fmt: skip


def _windowed(geometry, pages: int):
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    full = [layer for layer in range(LAYERS) if layer not in WINDOWED and not ("mamba" in geometry.kind and layer == 2)]
    tokens = pages * geometry.page_tokens
    return SWAKVPool(tokens, tokens, geometry.page_tokens, torch.bfloat16, 2, 32, list(WINDOWED), full, sgl.DEVICE)


def states_of(pools) -> list:
    """The tensors that have the states of all layers; none of a model without states."""
    pool = getattr(pools.requests, "mamba_pool", None)
    return [] if pool is None else [pool.mamba_cache.temporal, *pool.mamba_cache.conv]


def kept(kind: str, pools) -> list[Kept]:
    """Every buffer of every component, where it lies now."""
    cache, found = pools.cache, []
    if "swa" in kind:
        for component, pool in (("kv", cache.full_kv_pool), ("swa", cache.swa_kv_pool)):
            layers = sorted(
                layer for layer, (_, windowed) in cache.layers_mapping.items() if windowed == (component == "swa")
            )
            for buffers in (pool.k_buffer, pool.v_buffer):
                found += [Kept(component, buffer, layer) for layer, buffer in zip(layers, buffers)]
    elif kind == "mamba":
        found += [Kept("kv", buffer, layer) for layer, buffer in zip([0, 1, 3], cache.full_kv_pool.kv_buffer)]
    else:
        many = [cache.k_buffer, cache.v_buffer] if kind == "mha" else [cache.kv_buffer]
        found += [Kept("kv", buffer, layer) for buffers in many for layer, buffer in enumerate(buffers)]
    if kind == "dsa":
        found += [Kept("kv", buffer, layer, True) for layer, buffer in enumerate(cache.index_k_with_scale_buffer)]
    return found + [Kept("mamba", state[0], 2, True) for state in states_of(pools)]
