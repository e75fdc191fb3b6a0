"""A rank of a server through the life of its requests, whatever components its model has: what is computed, what comes
back, and whether everything is free again."""

from __future__ import annotations

import sgl
import sgl_models
import torch
from sgl_linker import Rank
from sgl_pages import raw


class Serving(Rank):
    """A rank that computes prompts, keeps their bytes, and compares what comes back."""

    def __init__(self, geometry, extra: dict, pages: int = 24, **more) -> None:
        super().__init__(geometry, extra, pages, **more)
        self.free_at_first = self.free()

    def noise(self, seed: int) -> None:
        """Other bytes in all pools."""
        generator = torch.Generator(sgl.DEVICE).manual_seed(seed)
        for kept in self.pools.kept:
            raw(kept.buffer).random_(0, 256, generator=generator)

    def compute(self, tokens, head=None) -> list:
        """A request that computes a prompt, behind what it has matched: its bytes, in all buffers.

        They are on their way to the linker. They depend on the prompt and not on their places.
        """
        before = 0 if head is None else len(head)
        indices, state = self._new_places(len(tokens) - before), self._new_state()
        for kept, values in zip(self.pools.kept, self.content(tokens, before // self.page)):
            kept.buffer[self._rows(kept, indices, state)] = values
        want = self.bytes_of(indices, state)
        self.inserted(tokens, indices if head is None else torch.cat((head, indices)), before, state)
        return want

    def content(self, tokens, first: int) -> list:
        """What a prompt has in each buffer, from a page on: of windows all pages, and the state at its end."""
        keys = sgl.page_keys(list(tokens), self.page)
        found = []
        for at, kept in enumerate(self.pools.kept):
            rows = 1 if kept.by_page else self.page
            pages = []
            for key in keys[-1:] if kept.component == "mamba" else keys[first:]:
                values = torch.empty((rows, *kept.buffer.shape[1:]), dtype=kept.buffer.dtype)
                raw(values).random_(0, 256, generator=torch.Generator().manual_seed(int(key[:12], 16) + at))
                pages.append(values)
            found.append(torch.cat(pages).to(kept.buffer.device))
        return found

    def expected(self, tokens, first: int = 0) -> list:
        """As `bytes_of` what must come back of a prompt from a page on."""
        window = min(sgl_models.WINDOW, len(tokens) - first * self.page)
        return [
            raw((values[-window:] if kept.component == "swa" else values).contiguous())
            for kept, values in zip(self.pools.kept, self.content(tokens, first))
        ]

    def inserted(self, tokens, indices, before: int, state, req=None) -> None:
        """What a request has computed or loaded goes into the tree."""
        params = self.modules.base.InsertParams(
            key=self.key(tokens), value=indices, prev_prefix_len=before, mamba_value=state
        )
        if req is not None:
            params.component_evicted_seqlens = dict(req.kv.component_evicted_seqlens)
        if self.tree.insert(params).mamba_exist:
            self.pools.requests.mamba_allocator.free(state)

    def stored(self, tokens) -> list:
        """As `compute`, until the linker has it; nothing of it is left on the device."""
        want = self.compute(tokens)
        self.offloaded()
        self.evict()
        self.noise(1)
        return want

    def _new_places(self, tokens: int):
        if not self.has("swa"):
            return self.slots.alloc(tokens)
        indices, windowed = (of.alloc(tokens) for of in (self.slots.full_attn_allocator, self.slots.swa_attn_allocator))
        self.slots.set_full_to_swa_mapping(indices, windowed)
        return indices

    def _new_state(self):
        return self.pools.requests.mamba_allocator.alloc(1) if self.has("mamba") else None

    def has(self, component: str) -> bool:
        return any(kept.component == component for kept in self.pools.kept)

    def bytes_of(self, indices, state) -> list:
        """What a prompt at these places has in each buffer: of windows the last one, and its state."""
        found = []
        for kept in self.pools.kept:
            rows = self._rows(kept, indices[-sgl_models.WINDOW :] if kept.component == "swa" else indices, state)
            found.append(raw(kept.buffer[rows].contiguous()).clone())
        return found

    def _rows(self, kept, indices, state):
        if kept.component == "mamba":
            return state.to(torch.int64)
        if kept.component == "swa":
            return self.slots.translate_loc_from_full_to_swa(indices).to(torch.int64)
        return indices[:: self.page] // self.page if kept.by_page else indices

    def evict(self) -> None:
        """Evicts everything from the device."""
        more = {name: self.device.size for name, has in (("swa_num_tokens", "swa"),) if self.has(has)}
        if self.has("mamba"):
            more["mamba_num"] = sgl_models.STATES
        self.tree.evict(self.modules.base.EvictParams(num_tokens=self.device.size, **more))

    def free(self) -> dict:
        """Free places in each pool."""
        found = {"kv": self.slots.available_size()}
        if self.has("swa"):
            found = {"kv": self.slots.full_available_size(), "swa": self.slots.swa_available_size()}
        if self.has("mamba"):
            found["mamba"] = self.pools.requests.mamba_allocator.available_size()
        return found

    def cleared(self) -> None:
        """As the server forgets its cache: the tree, and what requests have."""
        self.tree.reset()
        self.pools.requests.clear()
        self.slots.clear()
        if self.has("mamba"):
            self.pools.requests.mamba_allocator.clear()

    # A request that finds its prompt

    def taken(self, req):
        """Places that a request has for its load: of tokens, and of its state."""
        state = req.kv.mamba_pool_idx
        return self.tree.linker.private_load_indices.get(req.rid), None if state is None else state.view(1)

    def given_back(self, indices, state) -> None:
        """The request ends without leaving anything in the tree."""
        if indices is not None:
            self.slots.free(indices)
        if state is not None:
            self.pools.requests.mamba_allocator.free(state)

    def layers(self):
        """Layers, in the order in which a forward reads them."""
        return sorted({kept.layer for kept in self.pools.kept})

    def restored(self, tokens, wait: bool = True):
        """A request that loads a prompt and keeps nothing: its bytes; None for a miss, False if it was aborted."""
        req, result = self.match(tokens)
        if self.admit(req, result) == 0:
            return None
        assert result.device_prefix_len == 0
        indices, state = self.taken(req)
        self.begin()
        for layer in self.layers() if wait else ():
            self.linker.layer_done_counter.wait_until(layer)
        aborted = bool(self.finish(req))
        found = False if aborted else self.bytes_of(indices, state)
        self.given_back(indices, state)
        return found

    def settled(self, what: str) -> None:
        """Nothing is held, queued or under way, and all places are free."""
        assert not self.pinned(), what
        self.offloaded()
        self.evict()
        assert self.free() == self.free_at_first, what
