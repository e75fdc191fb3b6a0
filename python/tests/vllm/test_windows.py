"""Chunks of sliding windows and blocks from before a reset, under vLLM's own Scheduler: no wrong block is stored."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

import torch  # noqa: E402
from vengine import NEW, Engine  # noqa: E402
from vgpu import TOKENS, Gpu, connectors, interface, settings, vllm_config  # noqa: E402

import kvhoist.vllm  # noqa: E402
from kvhoist import ConfigError  # noqa: E402
from kvhoist.vllm.device_chunks import ABSENT, chunk_keys  # noqa: E402
from kvhoist.vllm.spec import KvhoistManager  # noqa: E402
from kvhoist.vllm.windows import whole_groups  # noqa: E402
from kvhoist.vllm.worker import Keys  # noqa: E402

PROMPT = list(range(1000, 1000 + 7 * TOKENS + 5))


@pytest.mark.skipif(not NEW, reason="before 0.33 such a model is refused")
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


@pytest.mark.skipif(not NEW, reason="before 0.33 such a model is refused")
def test_a_chunk_with_missing_blocks_is_not_stored(store_dir):
    """Its own request would not load them. Another one may, whose prompt ends elsewhere."""
    gpu = Gpu(window=2 * TOKENS, blocks=11)
    with Engine(settings(store_dir, blocks_per_chunk=8), gpu, max_num_batched_tokens=6 * TOKENS) as engine:
        request = engine.add("first", list(range(11 * TOKENS)))
        engine.step()
        engine.step()
        # The window had left four blocks of the chunk, and two of these were others when its last was computed.
        (state,) = engine.scheduler.connector.connector_scheduler._req_status["first"].group_states
        assert [n for n, block in enumerate(state.block_ids[:8]) if not block] == [2, 3]
        engine.run()
        assert not engine.store.contains(bytes(request.block_hashes[7]) + bytes(4))
        engine.forget()
        assert engine.serve("later", list(range(8 * TOKENS + 3))) == 0


def spec_of(kind, block_tokens: int, heads: int, **more):
    return kind(block_size=block_tokens, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16, **more)


def hybrid_specs() -> list:
    """Full attention in blocks of four times as many tokens as those of a sliding window, and of as many bytes."""
    full = spec_of(interface.FullAttentionSpec, 4 * TOKENS, 1)
    return [full, spec_of(interface.SlidingWindowSpec, TOKENS, 4, sliding_window=2 * TOKENS)]


@pytest.mark.skipif(not NEW, reason="before 0.33 such a model is refused")
def test_answers_are_refused_whose_end_is_offered_too_late(store_dir):
    """vLLM offers it when its request has finished, whose blocks may be others by then."""
    role, gpu = connectors.KVConnectorRole.SCHEDULER, Gpu(specs=hybrid_specs())

    def make(retention, **more) -> None:
        config = vllm_config(settings(store_dir, **more), cache={"prefix_cache_retention_interval": retention})
        try:
            kvhoist.vllm.KvhoistConnector(config, role, gpu.config)
        except ConfigError as error:
            # No worker has opened the store.
            if error.field != "distributed_executor_backend":
                raise

    make(0, offload_prompt_only=False)
    make(None)
    with pytest.raises(ConfigError, match="^offload_prompt_only: found False, .* of KV cache groups .1. when"):
        make(None, offload_prompt_only=False)


def test_answers_are_refused_whose_blocks_are_freed_before_they_are_offered(store_dir):
    gpu = Gpu(specs=[spec_of(interface.RSWASpec, TOKENS, 2, rswa_window=TOKENS)])
    with Engine(settings(store_dir), gpu) as engine:
        assert engine.serve("first", PROMPT) == 0
        engine.forget()
        assert engine.serve("again", PROMPT) == 7 * TOKENS
    with pytest.raises(ConfigError, match="^offload_prompt_only: found False, .* of KV cache groups .0. before"):
        Engine(settings(store_dir, offload_prompt_only=False), gpu)
    made_with_a_tier(store_dir / "tier", gpu)
    with pytest.raises(ConfigError, match="^offload_prompt_only: found False, expected true"):
        made_with_a_tier(store_dir / "tier", gpu, offload_prompt_only=False)


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


def test_what_a_request_finds_on_the_gpu_from_before_a_reset_is_not_stored(store_dir):
    with Engine(settings(store_dir)) as engine:
        engine.add("running", PROMPT, new_tokens=40)
        engine.step()
        engine.step()
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert engine.serve("other", PROMPT) == 7 * TOKENS, "from the GPU"
        assert engine.serve("without", list(range(4 * TOKENS + 5))) == 0
        engine.forget()
        assert engine.serve("new weights", PROMPT) == 0
        assert engine.serve("without again", list(range(4 * TOKENS + 5))) == 4 * TOKENS
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert engine.serve("newer", PROMPT[: 3 * TOKENS + 5]) == 0
        assert engine.serve("longer", PROMPT) == 3 * TOKENS
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


def made_with_a_tier(store_dir, gpu: Gpu, retention=0, weights=None, **more) -> None:
    """vLLM's own connector with a tier, for a moment."""
    plain = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 20,
        "secondary_tiers": [vtier.tier_config(store_dir)], **more,
    }  # fmt: skip
    config = vllm_config(extra, weights=weights, cache={"prefix_cache_retention_interval": retention})
    plain.OffloadingConnector(config, connectors.KVConnectorRole.SCHEDULER, gpu.config).shutdown()


def test_a_tier_has_a_store_for_each_setting_of_its_engine(store_dir):
    for weights, stores in (({}, 1), ({"quantization": "fp8"}, 2), ({"quantization": "awq"}, 3), ({}, 3)):
        made_with_a_tier(store_dir, Gpu(), weights=weights)
        assert len(list(store_dir.rglob("kvhoist.store"))) == stores


@pytest.mark.parametrize(
    ("window", "cut", "field"),
    [
        (0, {"blocks_per_chunk": 4}, None),
        (2, {"blocks_per_chunk": 1}, None),
        (4, {"blocks_per_chunk": 4}, "blocks_per_chunk"),
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
    made_with_a_tier(store_dir, Gpu(specs=hybrid_specs()), offload_prompt_only=False)
    with pytest.raises(ConfigError, match="^offload_prompt_only: found False, .* of KV cache groups .1. when"):
        made_with_a_tier(store_dir, Gpu(specs=hybrid_specs()), retention=None, offload_prompt_only=False)


def test_the_blocks_of_a_store_are_told_by_group():
    """Of a window a chunk needs all of them, of a state the last one."""
    specs = [*hybrid_specs(), spec_of(interface.SlidingWindowSpec, TOKENS, 4, sliding_window=0)]
    assert whole_groups(Gpu(specs=specs).config) == {bytes([0, 0, 0, at]) for at in range(2)}
    window, state = bytes([0, 0, 0, 1]), bytes([0, 0, 0, 2])
    groups = [
        SimpleNamespace(
            offload_keys=[bytes([at]) + end for at in range(4)],
            block_ids=[9, 9, 0, 7, 0, 6, 5, 4],
            next_stored_chunk_idx=2,
        )
        for end in (window, state)
    ]
    names = [b"salt" + bytes([at]) + end for end in (window, state) for at in (1, 3)]
    manager, told = SimpleNamespace(_name=lambda key: b"salt" + key), {"request": SimpleNamespace(group_states=groups)}

    def blocks_of(names, blocks) -> list:
        job = SimpleNamespace(req_id="request", src_spec=SimpleNamespace(block_ids=blocks), dst_spec=Keys(names, 0))
        job.dst_spec.blocks = {}
        KvhoistManager._add_blocks(manager, job, told, 2, {window})
        return [job.dst_spec.blocks[name] for name in names]

    assert blocks_of(names, [7, 5, 4, 7, 5, 4]) == [[0, 7], [5, 4], [ABSENT, 7], [5, 4]]
    assert blocks_of(names[:1], [7]) == [[0, 7]]
    assert blocks_of(names[2:3], [8]) == [[ABSENT, 8]], "vLLM's word goes before the table"


@pytest.mark.skipif(not NEW, reason="before 0.33 such a model is refused")
def test_a_store_whose_blocks_are_not_known_fails_alone(store_dir, monkeypatch):
    with Engine(settings(store_dir, blocks_per_chunk=2), Gpu(window=4 * TOKENS)) as engine:
        manager = engine.scheduler.connector.connector_scheduler.manager
        known = manager._add_blocks
        monkeypatch.setattr(manager, "_add_blocks", lambda job, *more: known(job, {}, *more[1:]))
        # The window has left the first chunks when the last ones are computed.
        request = engine.add("first", PROMPT)
        engine.run()
        counters = manager._opened.failures.counters
        assert counters["add_blocks"] and not counters["store chunks"]
        assert engine.store.contains(bytes(request.block_hashes[3]) + bytes(4)), "a chunk without a hole"
        engine.forget()
        assert engine.serve("later", PROMPT) == 6 * TOKENS


def test_a_chunk_is_not_stored_whose_blocks_are_not_those_that_vllm_names(store_dir):
    with Engine(settings(store_dir, blocks_per_chunk=2)) as engine:
        worker, names = engine.worker.connector_worker.worker, [b"one" + bytes(4), b"two" + bytes(4)]
        keys = Keys(names, 0)
        keys.blocks = {names[0]: [ABSENT, 3], names[1]: [4, 5]}
        blocks = SimpleNamespace(block_ids=[3, 4, 5], group_sizes=[3], block_indices=[1])
        (part,) = worker._parts(blocks, keys)
        assert (part.skip, part.blocks) == (0, [ABSENT, 3, 4, 5])
        for other in (None, [ABSENT, 6]):
            keys.blocks.pop(names[0]) if other is None else keys.blocks.update({names[0]: other})
            with pytest.raises(ValueError, match="^found blocks .* of 2 chunks, expected vLLM's, .3, 4, 5.$"):
                worker._parts(blocks, keys)
