"""SGLang's unified radix cache over the external linker, on the CPU or a GPU. 0.5.23 and later.

Real are the radix tree, the linker's wrapper, the pools and the allocators. A stand-in plays the device's events.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from array import array
from types import SimpleNamespace

import kvhoist
import sgl
import sgl_buffer
import sgl_models
import torch
from nodes import await_
from sgl_buffer import _Bag, _Event
from sgl_controller import device_noise, rows

_numbers = itertools.count()


class Forward:
    """The forward's stream, whose batch runs until it is told to end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._ended.set()
        #: Set while somebody waits for the batch.
        self.waited_for = threading.Event()

    def run(self) -> None:
        """A batch begins."""
        self._ended.clear()
        self.waited_for.clear()

    def end(self) -> None:
        self._ended.set()

    def query(self) -> bool:
        return self._ended.is_set()

    def record_event(self):
        return SimpleNamespace(synchronize=self.synchronize)

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self._ended.wait(60), "nobody has ended the batch"


class _StreamEvent(_Event):
    """An event of the streams' stand-ins: of those that can be waited for."""

    def record(self, *streams) -> None:
        self._streams = [stream for stream in streams if isinstance(stream, Forward)]

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def boot() -> SimpleNamespace:
    """Imports the tree, once."""
    modules = sgl_buffer.boot()
    from sglang.srt.mem_cache.unified_cache import linker_factory, unified_cache_linker

    stand_in = SimpleNamespace(__name__="none", Event=_StreamEvent)
    unified_cache_linker.device_module = torch.cuda if sgl.DEVICE == "cuda" else stand_in
    sgl_models.prepare()
    modules.factory, modules.linker = linker_factory, unified_cache_linker
    return modules


def extra_config(path, **more) -> dict:
    """What an operator writes on the command line."""
    sizes = {"capacity": "64MiB", "host_bytes": "8MiB"}
    device = "auto" if sgl.DEVICE == "cuda" else "simulated"
    return {"path": str(path), **sizes, "direct_io": "prefer", "device": device, **more}


def tokens_of(geometry, pages: int, first: int = 1000) -> list[int]:
    """A prompt of so many pages; prompts that begin with other numbers share no page."""
    return list(range(first, first + pages * geometry.page_tokens))


def broadcast(values: list, group=None, group_src=None) -> None:
    """As `torch.distributed.broadcast_object_list` among ranks of one process."""
    values[0] = b"what the first rank has drawn"


def share_pools(pools, params, components: set) -> list:
    """Moves the pools' buffers into memory that a service can map, which plays the device's; returns what keeps it."""
    from kvhoist.sglang.device_pools import pools_of

    lent = []

    def move(tensor) -> None:
        lent.append(kvhoist.SharedMemory(tensor.untyped_storage().nbytes()))
        shared = torch.frombuffer(lent[-1].view, dtype=torch.uint8).untyped_storage()
        tensor.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())

    # Of states the entries have one view for each layer, which they make anew.
    whole = sgl_models.states_of(pools)
    for entry in pools_of(pools.cache, params, components).entries:
        if entry.device_pool is not getattr(pools.requests, "mamba_pool", pools):
            whole += entry.get_hybrid_pool_buffer()
    for tensor in whole:
        move(tensor)
    return lent


class Rank:
    """One rank of a server: a tree over a device pool, and the linker under it."""

    def __init__(self, geometry, extra: dict, pages: int = 24, dtype=None, **arguments) -> None:
        modules = self.modules = boot()
        bags: dict = {"exec": _Bag(mamba=_Bag(mamba_max_states_per_path=-1))}
        type(modules.context._CONTEXT).config_bag = lambda _self, name: bags.setdefault(name, _Bag())
        self.page, self.geometry = geometry.page_tokens, geometry
        found = self.pools = sgl_models.pools(modules, geometry, pages, dtype)
        self.device, self.slots = found.cache, found.slots
        group = sgl.process_group()
        self.params = modules.params.CacheInitParams(
            disable=False, req_to_token_pool=found.requests, token_to_kv_pool_allocator=self.slots,
            page_size=self.page, tp_cache_group=group, attn_tp_cache_group=group,
            tree_components=tuple(found.components), tree_core_backend="python", **found.more,
        )  # fmt: skip
        self.tree = modules.tree.UnifiedRadixCache(self.params)
        args = SimpleNamespace(model_path="meta/tiny", **arguments)
        if extra.get("service", "off") != "off" and sgl.DEVICE == "cpu":
            self.lent = share_pools(found, self.params, set(self.tree.components))
        found.kept = sgl_models.kept(geometry.kind, found)
        #: A double that plays the forward's stream in host memory.
        self.forward = Forward() if sgl.DEVICE == "cpu" else None
        self.linker = modules.factory.create_unified_cache_linker(
            args, self.params, backend="dynamic", components=set(self.tree.components), forward_stream=self.forward,
            config={"linker": "KvhoistLinker", "linker_module_path": "kvhoist.sglang", "linker_extra_config": extra},
        )  # fmt: skip
        self.tree.init_cache_linker(self.linker)
        self.device.register_layer_transfer_counter(self.linker.layer_done_counter)

    def key(self, tokens):
        return self.modules.radix.RadixKey(array("q", tokens))

    def insert(self, tokens, indices, matched: int = 0) -> None:
        """As a request that has computed these tokens, but for those that it has matched on the device."""
        params = self.modules.base.InsertParams(key=self.key(tokens), value=indices, prev_prefix_len=matched)
        self.tree.insert(params)

    def offloaded(self) -> None:
        """Waits until all offloads have ended, as the scheduler's steps do."""

        def step():
            self.tree.check_hicache_events()
            return not self.tree.linker.pending_offloads

        await_(step, "the offloads")

    def evict(self) -> None:
        """Evicts everything from the device."""
        self.tree.evict(self.modules.base.EvictParams(num_tokens=self.device.size))

    def match(self, tokens, rid: str | None = None):
        """A request, matched: (the request, the result)."""
        req = SimpleNamespace(
            rid=rid or f"request {next(_numbers)}", session=None, extra_key=None, kv=sgl_models.request_record(),
            swa_branching_seqlen=None, swa_host_hit_length=0, mamba_host_hit_length=0, skip_radix_cache_insert=False,
        )  # fmt: skip
        result = self.tree.match_prefix(self.modules.base.MatchPrefixParams(key=self.key(tokens), req=req))
        req.last_node = result.last_device_node
        return req, result

    def lock(self, result):
        """Keeps what the match has found on the device; returns what takes the lock back."""
        node = result.last_device_node
        params = self.tree.inc_lock_ref(node).to_dec_params()
        return lambda: self.tree.dec_lock_ref(node, params)

    def admit(self, req, result) -> int:
        """Loads back what the match has found: how many tokens of it."""
        loaded, _ = self.tree.init_load_back(
            self.modules.base.InitLoadBackParams(
                best_match_node=result.best_match_node, host_hit_length=result.host_hit_length, req=req
            )
        )
        return loaded

    def begin(self) -> int:
        """Begins the queued loads for the batch that follows."""
        index = self.tree.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        return index

    def finish(self, *reqs) -> list:
        """Behind the forward: the requests that are aborted."""
        failed = set(self.tree.linker.finish_loads())
        return [req for req in reqs if req.rid in failed]

    def restore(self, tokens) -> tuple:
        """Matches, loads and finishes: the indices that the request got, and whether it was aborted."""
        req, result = self.match(tokens)
        if self.admit(req, result) == 0:
            return None, False
        indices = self.tree.linker.private_load_indices[req.rid]
        self.begin()
        return indices, bool(self.finish(req))

    def release(self, req, free: bool = False) -> None:
        """The request is aborted before its batch begins."""
        indices = self.tree.linker.private_load_indices.get(req.rid)
        self.tree.release_aborted_request(self.modules.base.CacheRequestHandle(req.rid, 0))
        if free:
            self.slots.free(indices)

    def held(self) -> int:
        """Pages that requests hold."""
        return sum(pages.held for pages in self.linker._pages.values())

    def let_go(self) -> None:
        """Lets go of what lookups hold, as time does."""
        for rid in list(self.linker._held):
            self.linker.cancel_queued_load(rid)

    def pinned(self) -> bool:
        """Whether anything is still held, queued or under way."""
        linker = self.linker
        return bool(self.held() or linker._held or linker._queued or linker._begun or linker.layer_done_counter.batches)

    def close(self) -> None:
        """Ends the server. Again: does nothing."""
        self.tree.release_host_resources()


@contextlib.contextmanager
def ranks_at(store_dir):
    """Makes ranks that are closed at the end, whatever happens."""
    made: list[Rank] = []

    def make(geometry=sgl.MHA, **settings) -> Rank:
        made.append(Rank(geometry, extra_config(store_dir, **settings)))
        return made[-1]

    try:
        yield make
    finally:
        for rank in made:
            rank.close()


def computed(rank: Rank, tokens, seed=1) -> list:
    """Computes and offloads a prompt, and evicts it from the device: the bytes of its rows."""
    buffers = device_noise(rank.device, seed)
    indices = rank.slots.alloc(len(tokens))
    want = rows(buffers, indices)
    rank.insert(tokens, indices)
    rank.offloaded()
    rank.evict()
    device_noise(rank.device, seed + 1)
    return want
