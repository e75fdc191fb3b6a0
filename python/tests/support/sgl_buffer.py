"""SGLang's unified radix cache with `--hicache-host-memory-mode buffer_only`, on the CPU. 0.5.23 and later.

Real are the radix tree, its buffer pipeline, the controller and its threads, the pools and the allocators. A stand-in
plays the device's streams and events: copies between the pools are made at once.
"""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import sgl
from engines.stand_ins import add_blank
from nodes import await_

#: What the tree imports of the server, and does not call here.
BLANK = (
    "sglang.srt.configs.model_config",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.observability.metrics_collector",
)


class _Event:
    def __init__(self, **_named) -> None:
        pass

    def record(self, *_stream) -> None:
        pass

    def wait(self, *_stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _other) -> float:
        return 0.0


class _Stream:
    def __enter__(self):
        return self

    def __exit__(self, *_exception) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, _event) -> None:
        pass


class _Bag(SimpleNamespace):
    """A namespace of SGLang's configuration; what nobody has set is `None`."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


_booted: SimpleNamespace | None = None


def boot() -> SimpleNamespace:
    """Imports the tree, once."""
    global _booted
    if _booted is not None:
        return _booted
    for name in BLANK:
        add_blank(name)
    modules = sgl.boot()
    sgl._one_rank()
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import (
        allocator,
        base_prefix_cache,
        cache_init_params,
        l2_transfer,
        memory_pool,
        radix_cache,
        unified_radix_cache,
    )  # fmt: skip
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    device = SimpleNamespace(
        __name__="none", Event=_Event, Stream=_Stream, current_stream=_Stream, stream=lambda stream: stream
    )
    modules.controller.device_module = l2_transfer.device_module = device
    common._cuda_host_register = lambda *_args, **_named: None
    # Undone where nobody holds it.
    parallel = runtime_context.get_parallel().override(dcp_enabled=False)
    parallel.__enter__()
    _booted = SimpleNamespace(
        context=runtime_context, parallel=parallel, allocator=allocator, base=base_prefix_cache, params=cache_init_params,
        memory_pool=memory_pool, radix=radix_cache, tree=unified_radix_cache, ComponentType=ComponentType,
    )  # fmt: skip
    return _booted


class BufferOnly:
    """A rank whose host pool is a staging buffer: a tree over a device pool, with the storage attached."""

    def __init__(self, geometry, extra: dict, pages: int = 24) -> None:
        modules = self.modules = boot()
        bags = {
            "memory": _Bag(
                hicache_host_memory_mode="buffer_only", hicache_storage_backend="dynamic",
                hicache_storage_backend_extra_config=json.dumps(extra), hicache_write_policy="write_through",
                hicache_io_backend="direct", hicache_mem_layout="page_first_direct", hicache_ratio=1.0, hicache_size=0,
                hicache_storage_prefetch_policy="wait_complete", enable_hierarchical_cache=True,
            ),
            "model": _Bag(context_length=64),
        }  # fmt: skip
        context = type(modules.context._CONTEXT)
        context.config_bag = lambda _self, name: bags.setdefault(name, _Bag())
        self.device = sgl.device_pool(geometry, pages)
        self.slots = modules.allocator.PagedTokenToKVPoolAllocator(
            self.device.size, page_size=geometry.page_tokens, dtype=self.device.dtype, device="cpu",
            kvcache=self.device, need_sort=False,
        )  # fmt: skip
        group = sgl.process_group()
        params = modules.params.CacheInitParams(
            disable=False, req_to_token_pool=modules.memory_pool.ReqToTokenPool(8, 512, "cpu", False),
            token_to_kv_pool_allocator=self.slots, page_size=geometry.page_tokens, tp_cache_group=group,
            attn_tp_cache_group=group, tree_components=(modules.ComponentType.FULL,), tree_core_backend="python",
        )  # fmt: skip
        self.tree = modules.tree.UnifiedRadixCache(params)
        self.tree.init_hicache(_Bag(), params)
        self.pipeline = self.tree.buffer_pipeline
        self.backend = self.tree.cache_controller.storage_backend
        self._attempts = 0

    def _key(self, tokens):
        return self.modules.radix.RadixKey(array("q", tokens))

    def _settle(self, ended, what) -> None:
        """The scheduler's steps, until something has ended."""

        def step():
            self.tree.check_hicache_events()
            return ended()

        await_(step, what)

    def matched(self, tokens):
        return self.tree.match_prefix(self.modules.base.MatchPrefixParams(key=self._key(tokens)))

    def insert(self, tokens, indices) -> None:
        """A request has computed these tokens: their pages are backed up through the staging buffer."""
        self.tree.insert(self.modules.base.InsertParams(key=self._key(tokens), value=indices))
        self._settle(self.pipeline.is_idle, "a backup")

    def evict_all(self) -> None:
        self.tree.evict(self.modules.base.EvictParams(num_tokens=self.device.size))

    def fetch(self, tokens) -> int:
        """A request wants these tokens: prefetched, staged and loaded to the device. How many are there then."""
        self._attempts += 1
        handle = self.modules.base.CacheRequestHandle("request", self._attempts)
        found = self.matched(tokens)
        assert found.device_prefix_len == 0
        self.tree.prefetch_from_storage(handle, found.last_host_node, array("q", tokens), None, None, [])

        def ended():
            self.tree.check_prefetch_progress(handle)
            return self.pipeline.has_staged(handle) or not self.tree.has_ongoing_prefetch(handle)

        self._settle(ended, "a prefetch")
        if not self.pipeline.has_staged(handle):
            return 0
        request = SimpleNamespace(
            rid=handle.rid, cache_request_handle=handle, prefix_len=0, last_node=found.last_device_node,
            kv=SimpleNamespace(cache_protected_len=0), extra_key=None, cache_salt=None, host_hit_is_storage=False,
            host_loaded_length=0, host_hit_length=0, swa_host_hit_length=0, mamba_host_hit_length=0,
        )  # fmt: skip
        assert self.pipeline.prepare_staged_prefetch(request)
        self.tree.init_load_back(
            self.modules.base.InitLoadBackParams(request.last_node, request.host_hit_length, req=request)
        )
        self.tree.ready_to_load_host_cache()
        self._settle(self.pipeline.is_idle, "the load to the device")
        return self.matched(tokens).device_prefix_len

    def places(self, tokens):
        """Where the tokens lie on the device."""
        return self.tree.path_device_indices(self.matched(tokens).last_device_node)

    def close(self) -> None:
        self.tree.shutdown()
