"""SGLang's external linker: device pools straight to kvhoist's host memory and drives, and back layer by layer.

Use it as `kvhoist.sglang.KvhoistLinker`. `docs/sglang.md` has the launch line and the settings.
"""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from .._guard import Failures
from .._values import config_error, warn_of_keywords
from ..cache import Cache
from ..errors import UnavailableError
from .device_pools import by_component, pools_of, rows_of
from .hits import ends, policy, trailing
from .linker_pages import Batch, Figures, Held, Offloads, Part
from .linker_rank import identity_of, secret_of
from .linker_settings import LinkerSettings
from .linker_store import open_pages
from .refusals import (
    refuse_adapters_without_keys,
    refuse_memory_saver,
    refuse_replicas,
    refuse_stages,
    warn_of_long_rope,
)

logger = logging.getLogger(__name__)

KV = str(PoolName.KV)

#: Pages are held, and kept on drives, for so many seconds between a lookup and the load at most.
HELD_S = 60.0

#: Windows and states of shorter prefixes take such a part of the room for held pages: others' longest need it, too.
_SHORTER_PART = 2

#: Ends of prefixes that were loaded, of which it is known: at most so many.
_RESTORED_MAX = 65_536

#: Seconds between two lines of figures in the log, where there was anything to do.
_FIGURES_EVERY_S = 60.0


class LayerCounter:
    """What SGLang's pools call before a layer's pages are read: the consumer's stream waits, not its thread.

    `device`: the number of the streams' CUDA device; without one the thread waits. A replay of a whole prefill as one
    CUDA graph reads `num_layers`, and waits for the last layer.
    """

    def __init__(self, num_layers: int, device: int | None, figures: Figures) -> None:
        self.num_layers, self._device, self._figures = num_layers, device, figures
        self.consumer_index = -1
        self.batches: dict[int, Batch] = {}

    def set_consumer(self, index: int) -> None:
        """The batch whose layers the calls after this one wait for; -1 for none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Waits for all layers up to this one. Never raises into the forward."""
        batch = self.batches.get(self.consumer_index)
        if batch is None:
            return
        stream = None if self._device is None else torch.cuda.current_stream(self._device).cuda_stream
        self._figures["layers_waited_for"] += batch.wait(threshold, stream)


class KvhoistLinker(UnifiedCacheLinker):
    """kvhoist as second and third tier of SGLang in one, without a host pool of SGLang's.

    The constructor raises what is wrong with the settings. Later calls never raise into SGLang's scheduler: a failure
    is a miss, a `False`, or one aborted batch, with a line in the log and a count.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: dict | None = None,
        forward_stream: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        warn_of_keywords("KvhoistLinker", more)
        self.settings = LinkerSettings.load(extra_config)
        refuse_adapters_without_keys(server_args)
        refuse_replicas(server_args, self.settings.in_service)
        refuse_memory_saver(server_args)
        refuse_stages(params.pp_size)
        warn_of_long_rope(server_args)
        self.forward_stream = forward_stream
        self._figures, self._failures = Figures(), Failures(logger, "pages")
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        group = pools_of(kvcache, params, set(components))
        self.pools = group.entry_map
        self._device = _device(group, self.settings)
        waits = self._device if self.settings.wait == "stream" else None
        self.layer_done_counter = LayerCounter(group.num_layers, waits, self._figures)
        if str(PoolName.MAMBA) in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        window = getattr(params, "sliding_window_size", None)
        #: Pages at the end of a node that are stored, by component: what a window can reach, the last state.
        self._kept = {str(PoolName.MAMBA): 1}
        if window is not None:
            self._kept[str(PoolName.SWA)] = -(-window // params.page_size)
        self._held: dict[str, Held] = {}
        #: The last keys of prefixes that requests have loaded, the latest last: the same on all ranks.
        self._restored: dict[str, None] = {}
        #: Loads that the next batch begins, with what is held for them.
        self._queued: dict[str, tuple[list[Part], Held | None]] = {}
        self._begun: dict[int, list[Held]] = {}
        self._index, self._closed, self._said = -1, False, time.monotonic()
        self._entries = by_component(group)
        identity = identity_of(server_args, params, group, self.settings)
        shares = self.settings.in_service and group.rank_replicated and identity.tp_size > 1
        self._secret, self._resets = secret_of(params, shares), 0
        #: Prefix of every key since the last `reset`: what was stored before is not found by this process.
        self._salt = ""
        self._pages = open_pages(self.settings, identity, server_args, group, self._entries, self._device)
        #: Whether this rank stores pages: the first of the ranks that share them.
        self._writes = not (self.settings.in_service and group.rank_replicated) or identity.tp_rank == 0
        self._offloads = Offloads("kvhoist-offload", self._failures)
        #: Begins loads behind the work of the forward.
        self._begins = ThreadPoolExecutor(1, "kvhoist-begin")

    def _named(self, keys: Any) -> list[str]:
        """The keys in the store of SGLang's keys."""
        return [self._salt + key for key in keys or ()]

    # Lookup

    def lookup(self, rid: str, transfers: list) -> list[int]:
        """Every prefix length, in pages, that can be restored, held for the request.

        SGLang loads the longest one that all ranks have found. Which one that is, only the load knows.
        """
        return self._failures.guarded("lookup", [], lambda: self._lookup(rid, transfers))

    def _lookup(self, rid: str, transfers: list) -> list[int]:
        self._age()
        self._let_go(self._held.pop(rid, None))
        by_name = {str(transfer.name): transfer for transfer in transfers}
        if self._closed or not set(self._pages) <= set(by_name):
            return []
        keys = self._named(by_name[KV].keys)
        tiers = self._pages[KV].tiers(keys)
        lengths = set(range(1, len(tiers) + 1))
        # Of each component but KV: how many pages of a prefix's end it needs.
        windows: dict[str, int] = {}
        for name, transfer in by_name.items():
            if name == KV or name not in self._pages or not lengths:
                continue
            if policy(transfer) != "trailing_pages":
                raise config_error("hit_policy", policy(transfer), f"trailing_pages of component {name}")
            windows[name] = max(1, len(transfer.keys or ()))
            lengths &= trailing(self._pages[name].there(keys[: len(tiers)]), windows[name])
        if not lengths:
            return []
        longest = max(lengths)
        self._held[rid] = held = Held(time.monotonic() + HELD_S, tiers[:longest], [], [])
        for name, pages in self._pages.items():
            window = min(windows.get(name, longest), longest)
            wanted = keys[longest - window : longest]
            pages.cache.keep(wanted, HELD_S)
            held.parts.append((pages, pages.hold(wanted)))
            # The other ranks may lack the longest.
            if shorter := ends(lengths, window)[window:]:
                held.shorter.append((pages, pages.hold([keys[at] for at in shorter], _SHORTER_PART)))
        return sorted(lengths)

    def _let_go(self, held: Held | None) -> None:
        if held is not None:
            held.release()

    def _age(self) -> None:
        """Lets go of what requests hold that were never admitted. They are in the order of their lookups."""
        now = time.monotonic()
        while self._held and (rid := next(iter(self._held))) and self._held[rid].until <= now:
            self._let_go(self._held.pop(rid))
        if now - self._said >= _FIGURES_EVERY_S:
            self._say(now)

    def _say(self, now: float) -> None:
        if any(self._figures.values()):
            logger.info("kvhoist: linker: %s", self._figures.described())
        self._said = now

    # Loads

    def load(self, rid: str, transfers: list) -> bool:
        """Queues a load for the next batch. The answer depends on the transfers alone: it is the same on all ranks."""
        queued = self._failures.guarded("load", False, lambda: self._load(rid, transfers))
        if not queued:
            self.cancel_queued_load(rid)
        return queued

    def _load(self, rid: str, transfers: list) -> bool:
        parts = self._parts(transfers)
        if not parts:
            return False
        self._let_go(self._queued.pop(rid, (None, None))[1])
        held = self._held.pop(rid, None)
        self._queued[rid] = (parts, held)
        # A rank where this fails loads as the others do.
        self._failures.guarded("keep", None, lambda: self._keep(parts, held))
        return True

    def _keep(self, parts: list[Part], held: Held | None) -> None:
        """Keeps what is about to be loaded, and nothing that only other prefixes need."""
        by_name = {part.pages.name: part for part in parts}
        keys = by_name.pop(KV).keys
        if held is not None and len(held.found) == len(keys):
            held.release_shorter()
        for part in parts:
            part.pages.cache.keep(part.keys, HELD_S)
        self._let_older_go(keys, list(by_name.values()))

    def _let_older_go(self, keys: list[str], ends: list[Part]) -> None:
        """Evicts first what only shorter prefixes of this chain need, where no request has come for them.

        A conversation leaves a state and a window at the end of each turn, and returns for the last. Ends that a
        request has come for, such as a common system prompt's, stay in the order of their use. All ranks let the same
        go: one that did so for a longer prefix would release what the others are about to load.
        """
        if not ends:
            return
        self._restored.pop(keys[-1], None)
        self._restored[keys[-1]] = None
        if len(self._restored) > _RESTORED_MAX:
            del self._restored[next(iter(self._restored))]
        needed = [at for at, key in enumerate(keys) if key in self._restored]
        for part in ends:
            window, cache = len(part.keys), part.pages.cache
            wanted = {before for at in needed for before in range(max(0, at + 1 - window), at + 1)}
            for at, there in enumerate(cache.contains_each(keys)):
                if there and at not in wanted:
                    cache.release([keys[at]])

    def _parts(self, transfers: list) -> list[Part]:
        """Pages and rows of transfers. Waits until the current stream has made their indices."""
        parts = []
        for transfer in transfers:
            name = str(transfer.name)
            if name in self._pages and transfer.keys and transfer.device_indices is not None:
                rows = rows_of(self._entries[name], transfer.device_indices)
                parts.append(Part(self._pages[name], self._named(transfer.keys), rows))
        return parts

    def start_layer_wise_loading(self) -> int:
        """Begins the loads of all queued requests together, in the order of layers; -1 if there are none."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        self._index += 1
        parts = [part for parts, _ in queued.values() for part in parts]
        batch = Batch(list(queued), parts, self._still_writing, self._begins)
        self.layer_done_counter.batches[self._index] = batch
        self._begun[self._index] = [held for _, held in queued.values() if held is not None]
        self._figures["loads"] += len(queued)
        # Here: SGLang looks a prefix up as often as it is scheduled, and loads it once.
        for of_request, held in queued.values():
            pages = next((len(part.keys) for part in of_request if part.pages.name == KV), 0)
            tiers = [] if held is None else held.found[:pages]
            for tier in set(tiers):
                self._figures[f"hits_{tier}"] += tiers.count(tier)
        return self._index

    def _still_writing(self) -> list:
        """Events behind the work that the streams hold now, which loads wait for.

        With overlap scheduling the running batch may still write to the places of a request that has finished, after
        the allocator has given them to a request that loads.
        """
        streams = [] if self._device is None else [torch.cuda.current_stream(self._device)]
        if self.forward_stream is not None:
            streams.append(self.forward_stream)
        return [stream.record_event() for stream in streams if not stream.query()]

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing of the batch is written to device memory. False: its requests are to be aborted."""
        batch = self.layer_done_counter.batches.pop(counter_index, None)
        if batch is None:
            return True
        failed = batch.finish()
        for held in self._begun.pop(counter_index, ()):
            held.release()
        for pages, missing in failed:
            why = missing[0][1] or "evicted between lookup and load"
            self._failures.failed("load", f"pages of component {pages.name}: {why}", len(missing))
            # Of a page that was evicted there is nothing.
            unread = [key for key, why in missing if why is not False and not isinstance(why, UnavailableError)]
            if unread:
                # Offered again at once, they could abort the next request, too.
                self._failures.guarded("unread", None, lambda pages=pages, keys=unread: pages.not_read(keys))
        if batch.error is not None:
            self._failures.failed("load", batch.error)
        if failed or batch.error is not None:
            self._figures["requests_aborted"] += len(batch.rids)
            self._failures.guarded("retire", None, self._retire)
        return not failed and batch.error is None

    def _retire(self) -> None:
        """Offers no page any more of caches whose device is out of service: copies say only that they failed. A service
        may be restarted."""
        for pages in self._pages.values():
            if pages.cache.stats()["device_retired"]:
                (pages.retire if isinstance(pages.cache, Cache) else pages.refused)()

    def cancel_queued_load(self, rid: str) -> bool:
        """Takes a load back that has not begun."""
        self._let_go(self._held.pop(rid, None))
        parts, held = self._queued.pop(rid, (None, None))
        self._let_go(held)
        return parts is not None

    # Offloads

    def offload(self, transfers: list, session_id: str | None = None) -> bool:
        """Queues a node's pages to be stored when the streams have written them. True on ranks whose pages another has."""
        named = [t for t in transfers if str(t.name) in self._pages and t.keys and t.device_indices is not None]
        if self._closed or not named:
            return False
        if not self._writes:
            self._offloads.offload(lambda: True)
            return True
        events = self.record_offload_ready()
        self._offloads.offload(lambda: self._store(named, events))
        return True

    def _store(self, transfers: list, events: list) -> bool:
        for event in events:
            event.synchronize()
        stored = True
        for pages, keys, rows in self._parts(transfers):
            if (kept := self._kept.get(pages.name)) is not None:
                keys, rows = keys[-kept:], [of_pool[-kept:] for of_pool in rows]
            results = pages.store(keys, rows)
            bad = [result for result in results if result is not True]
            self._figures["pages_stored"] += len(keys) - len(bad)
            if bad:
                stored = False
                why = bad[0] or "refused"
                self._failures.failed("offload", f"pages of component {pages.name}: {why}", len(bad))
        return stored

    def num_completed_offloads(self) -> int:
        """Offloads that have ended and are not popped yet."""
        self._age()
        return self._offloads.results.qsize()

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them is stored."""
        return self._offloads.results.get_nowait()

    # The rest

    def reset(self) -> None:
        """Ends all that is under way, and hides what was stored for as long as this process runs.

        SGLang resets its cache when it has loaded other weights, and does not say why it does. A restart loads the
        first weights again, and finds what was stored under them.
        """
        for rid in [*self._queued, *self._held]:
            self.cancel_queued_load(rid)
        for index in list(self.layer_done_counter.batches):
            self._failures.guarded("reset", None, lambda index=index: self.finish_layer_wise_loading(index))
        self._offloads.join()
        while self._offloads.results.qsize():
            self.pop_completed_offload()
        self.layer_done_counter.set_consumer(-1)
        self._restored.clear()
        self._resets += 1
        self._salt = hashlib.sha256(self._secret + self._resets.to_bytes(8, "big")).hexdigest()

    def stats(self) -> dict:
        """Figures since the start: the caches' of each component, the linker's own, and the counts of failures."""
        return {
            "components": {name: pages.cache.stats() for name, pages in self._pages.items()},
            "linker": dict(self._figures),
            "failed": dict(self._failures.counters),
        }

    def close(self) -> None:
        """Ends all that is under way, and closes the caches. Again: does nothing."""
        if self._closed:
            return
        self.reset()
        self._closed = True
        self._say(time.monotonic())
        self._offloads.close()
        self._begins.shutdown()
        for pages in self._pages.values():
            self._failures.guarded("close", None, pages.cache.close)


def _device(group: Any, settings: LinkerSettings) -> int | None:
    """The CUDA device of the pools; `None` for host memory in its place."""
    devices = {buffer.device for entry in group.entries for buffer in entry.get_hybrid_pool_buffer()}
    (device,) = devices if len(devices) == 1 else (None,)
    if device is not None and device.type == "cuda" and settings.device == "auto":
        return device.index if device.index is not None else torch.cuda.current_device()
    if device is None or device.type != "cpu" or settings.device != "simulated":
        found = f"{settings.device} with pools on {', '.join(map(str, devices))}"
        raise config_error("device", found, "'auto' with pools on one CUDA device, or 'simulated' with them on the CPU")
    return None
