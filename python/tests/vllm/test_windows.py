"""Chunks of sliding windows and blocks from before a reset, under vLLM's own Scheduler: no wrong block is stored."""

from __future__ import annotations

import importlib

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

import torch  # noqa: E402
from vengine import NEW, Engine  # noqa: E402
from vgpu import TOKENS, Gpu, connectors, interface, settings, vllm_config  # noqa: E402

from kvhoist import ConfigError  # noqa: E402
from kvhoist.vllm.device_chunks import Part, chunk_keys  # noqa: E402

PROMPT = list(range(1000, 1000 + 7 * TOKENS + 5))


def test_a_chunk_that_a_window_has_left_in_part_is_not_served(store_dir):
    # The window has two chunks of two blocks.
    with Engine(settings(store_dir, blocks_per_chunk=2), Gpu(window=4 * TOKENS)) as engine:
        request = engine.add("first", PROMPT)
        engine.run()
        second = bytes(request.block_hashes[3]) + bytes(4)
        assert engine.store.contains(second)
        # Evicted, the second chunk is offered again by a request that has the end of it only, from the GPU's own cache.
        engine.store.cache.remove(chunk_keys([second])[0])
        assert engine.serve("again", PROMPT) == 7 * TOKENS
        engine.forget()
        # `_compute` looks at every byte that the model would read.
        engine.serve("beginning", PROMPT[: 4 * TOKENS + 3])
        engine.forget()
        assert engine.serve("later", PROMPT) == 6 * TOKENS


def test_a_chunk_is_stored_whose_missing_blocks_no_load_asks_for(store_dir):
    """0.33 offloads it. 0.28 does not know which blocks a load asks for, so there nothing of it is stored."""
    gpu = Gpu(window=2 * TOKENS, blocks=11)
    with Engine(settings(store_dir, blocks_per_chunk=8), gpu, max_num_batched_tokens=6 * TOKENS) as engine:
        request = engine.add("first", list(range(11 * TOKENS)))
        engine.step()
        engine.step()
        # The window had left four blocks of the chunk, and two of these were others when its last was computed.
        (state,) = engine.scheduler.connector.connector_scheduler._req_status["first"].group_states
        assert [n for n, block in enumerate(state.block_ids[:8]) if not block] == [2, 3]
        engine.run()
        assert engine.store.contains(bytes(request.block_hashes[7]) + bytes(4)) == NEW
        engine.forget()
        assert engine.serve("later", list(range(8 * TOKENS + 3))) == (8 * TOKENS if NEW else 0)


def spec_of(kind, block_tokens: int, heads: int, **more):
    return kind(block_size=block_tokens, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16, **more)


def hybrid_specs() -> list:
    """Full attention in blocks of four times as many tokens as those of a sliding window, and of as many bytes."""
    full = spec_of(interface.FullAttentionSpec, 4 * TOKENS, 1)
    return [full, spec_of(interface.SlidingWindowSpec, TOKENS, 4, sliding_window=2 * TOKENS)]


class Hybrid(Engine):
    """An engine with these groups."""

    def names_of(self, request, group: int) -> list[bytes]:
        each = (4, 1)[group]
        return [bytes(name) + group.to_bytes(4, "big") for name in request.block_hashes[each - 1 :: each]]

    def _compute(self, request, count: int) -> None:
        end = request.num_computed_tokens
        for group, blocks in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
            names, size = self.names_of(request, group), (4, 1)[group] * TOKENS
            for at in range((end - count) // size, -(-end // size)):
                if blocks[at]:
                    self.gpu.fill(blocks[at], names[at] if at < len(names) else b"not whole yet")


@pytest.mark.skipif(not NEW, reason="before 0.33 such a model is refused")
def test_the_end_of_an_answer_is_stored_before_its_blocks_are_others(store_dir):
    """vLLM offers it when its request has finished, whose blocks another request gets in the same step."""
    extra = settings(store_dir, offload_prompt_only=False, store_bytes_queued_max="16MiB")
    with Hybrid(extra, Gpu(specs=hybrid_specs(), blocks=24)) as engine:
        request = engine.add("first", list(range(8 * TOKENS + 3)), new_tokens=3 * TOKENS - 2)
        while not request.is_finished():
            engine.step()
        engine.add("second", list(range(5000, 5000 + 14 * TOKENS)))
        engine.run()
        stored = 0
        block = engine.gpu.config.num_blocks - 1
        for group in range(2):
            for name in filter(engine.store.contains, engine.names_of(request, group)):
                stored += 1
                engine.store.submit_load(10_000 + stored, [Part(group, [name], [block])])
                engine.store.wait()
                assert engine.gpu.holds(block, name), "another request's bytes"
        assert engine.store.contains(engine.names_of(request, 1)[9]) and stored == 8


def test_nothing_from_before_a_reset_is_stored_after_it(store_dir):
    """vLLM offers all blocks of a running request again."""
    with Engine(settings(store_dir)) as engine:
        engine.add("running", PROMPT, new_tokens=40)
        engine.step()
        engine.step()
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "the GPU's own blocks are in use"
        engine.run()
        engine.forget()
        assert engine.serve("new weights", PROMPT) == 0
        engine.forget()
        assert engine.serve("later", PROMPT) == 7 * TOKENS


def test_requests_that_a_reset_preempts_are_stored(store_dir):
    with Engine(settings(store_dir)) as engine:
        engine.add("running", PROMPT, new_tokens=40)
        engine.step()
        engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.run()
        engine.forget()
        assert engine.serve("later", PROMPT) == 7 * TOKENS


def made_with_a_tier(store_dir, gpu: Gpu, **more) -> None:
    """vLLM's own connector with a tier, for a moment."""
    plain = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 20,
        "secondary_tiers": [vtier.tier_config(store_dir)], **more,
    }  # fmt: skip
    plain.OffloadingConnector(vllm_config(extra), connectors.KVConnectorRole.SCHEDULER, gpu.config).shutdown()


@pytest.mark.parametrize(
    ("window", "cut", "field"),
    [
        (0, {"blocks_per_chunk": 4}, None),
        (2, {"blocks_per_chunk": 1}, None),
        (4, {"blocks_per_chunk": 4}, None if NEW else "blocks_per_chunk"),
        (3, {"blocks_per_chunk": 4}, "blocks_per_chunk"),
        (3, {"block_size": 4 * TOKENS}, "block_size"),
    ],
)
def test_a_tier_is_refused_whose_chunks_would_have_holes(store_dir, window, cut, field):
    """vLLM copies them to its host memory in the wrong order."""
    gpu = Gpu(window=window * TOKENS)
    if field is None:
        return made_with_a_tier(store_dir, gpu, **cut)
    with pytest.raises(ConfigError, match=f"^{field}: found .* in KV cache groups .0.*, expected") as raised:
        made_with_a_tier(store_dir, gpu, **cut)
    assert raised.value.field == field


@pytest.mark.skipif(not NEW, reason="before 0.33 a tier is refused with offload_prompt_only false")
def test_a_tier_is_refused_that_would_get_the_end_of_an_answer_too_late(store_dir):
    made_with_a_tier(store_dir, Gpu(specs=hybrid_specs()))
    made_with_a_tier(store_dir, Gpu(window=2 * TOKENS), offload_prompt_only=False)
    with pytest.raises(ConfigError, match="^offload_prompt_only: found False, .* of KV cache groups .1. when"):
        made_with_a_tier(store_dir, Gpu(specs=hybrid_specs()), offload_prompt_only=False)
