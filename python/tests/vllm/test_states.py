"""Recurrent states under vLLM's own Scheduler, in chunks of several blocks: the one that vLLM names is stored."""

from __future__ import annotations

import functools

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

import torch  # noqa: E402
from vengine import NEW, Engine, Unset  # noqa: E402
from vgpu import TOKENS, Gpu, interface, settings  # noqa: E402

if not NEW:
    pytest.skip("before 0.33 such a model is refused", allow_module_level=True)

#: Of a draft model.
SPECULATIVE = Unset(
    use_eagle=lambda: True, use_eagle_block_drop=lambda: True, needs_eagle_block_drop=lambda: True,
    max_num_new_slots_for_drafting=0,
)  # fmt: skip


def gpu_of(drafts: int) -> Gpu:
    """Full attention beside states that are kept at the ends of blocks, and so many blocks for drafts."""
    full = interface.FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    state = interface.MambaSpec(
        block_size=TOKENS, shapes=((full.page_size_bytes // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1, num_speculative_blocks=drafts,
    )  # fmt: skip
    gpu = Gpu(specs=[full, state])
    gpu.config.kv_cache_groups[0].is_eagle_group = drafts > 0
    return gpu


class WithStates(Engine):
    """An engine whose second group has states."""

    def __init__(self, extra: dict, drafts: int) -> None:
        more = {"speculative_config": SPECULATIVE, "num_speculative_tokens": drafts} if drafts else {}
        super().__init__(extra, gpu_of(drafts), cache={"mamba_cache_mode": "align"}, **more)
        #: What vLLM says of the states of a step: (group, block, tokens) by request.
        self.offered: dict[str, list[tuple[int, int, int]]] = {}
        manager = self.scheduler.kv_cache_manager
        manager.take_boundary_state_offloads = functools.partial(self._take, manager.take_boundary_state_offloads)

    def _take(self, take) -> dict:
        self.offered = take()
        return self.offered

    def name(self, request, tokens: int, group: int) -> bytes:
        return bytes(request.block_hashes[tokens // TOKENS - 1]) + group.to_bytes(4, "big")

    def _compute(self, request, count: int) -> None:
        full, states = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        end = request.num_computed_tokens
        start = end - count
        for tokens in range(TOKENS, start + 1, TOKENS):
            block = full[tokens // TOKENS - 1]
            assert self.gpu.holds(block, self.name(request, tokens, 0)), "the model would read other bytes"
        if request.request_id not in self.found and start:
            state = states[start // TOKENS - 1]
            assert self.gpu.holds(state, self.name(request, start, 1)), "the model would go on from another state"
        self.found.setdefault(request.request_id, start)
        for at in range(start // TOKENS, min(end // TOKENS, len(request.block_hashes))):
            self.gpu.fill(full[at], self.name(request, (at + 1) * TOKENS, 0))
        for group, block, boundary in self.offered.get(request.request_id, ()):
            self.gpu.fill(block, self.name(request, boundary, group))


@pytest.mark.parametrize("drafts", [0, 1])
def test_the_state_that_vllm_names_is_stored(store_dir, drafts):
    """With a draft model it lies behind its place in the request's table."""
    prompt = list(range(1000, 1000 + 4 * TOKENS + 6))
    with WithStates(settings(store_dir, blocks_per_chunk=2), drafts) as engine:
        # The state after two blocks; then the chunk behind it.
        request = engine.add("short", prompt[: (2 + drafts) * TOKENS + 2])
        engine.run()
        assert engine.store.contains(engine.name(request, 2 * TOKENS, 1))
        engine.forget()
        assert engine.serve("long", prompt) == (0 if drafts else 2 * TOKENS)
        engine.forget()
        assert engine.serve("again", prompt) == (2 if drafts else 4) * TOKENS
