"""Chunks of sliding windows and blocks from before a reset, under vLLM's own Scheduler: no wrong block is stored."""

from __future__ import annotations

import importlib

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

from vengine import NEW, Engine  # noqa: E402
from vgpu import TOKENS, Gpu, connectors, settings, vllm_config  # noqa: E402

from kvhoist import ConfigError  # noqa: E402
from kvhoist.vllm.device_chunks import chunk_keys  # noqa: E402

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
    plain = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 20,
        "secondary_tiers": [vtier.tier_config(store_dir)], **cut,
    }  # fmt: skip

    def made():
        config = vllm_config(extra)
        plain.OffloadingConnector(
            config, connectors.KVConnectorRole.SCHEDULER, Gpu(window=window * TOKENS).config
        ).shutdown()

    if field is None:
        return made()
    with pytest.raises(ConfigError, match=f"^{field}: found .* in KV cache groups .0.*, expected") as raised:
        made()
    assert raised.value.field == field
