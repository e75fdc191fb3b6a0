"""Which stores an engine has whose blocks lie otherwise than another's, in as many bytes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

import torch  # noqa: E402
from vgpu import TOKENS, Gpu, Served, interface, names_of, settings, vllm_config  # noqa: E402

from kvhoist import ConfigError  # noqa: E402
from kvhoist.vllm.connector import _weights  # noqa: E402
from kvhoist.vllm.engine_config import page_layout  # noqa: E402


def layout(*specs, dcp=1, run=1, backend=None, has_engine=True):
    """What an adapter finds that is made by an engine of these groups and ranks."""
    kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs])
    vllm_config = has_engine and SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=run),
    )
    found = page_layout(SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(dcp_size=dcp, pcp_size=1))))
    assert kv_cache_config and (vllm_config or not has_engine)
    return found


def test_a_block_as_most_backends_have_it_needs_no_name():
    usual = SimpleNamespace(num_head_slots=None, state_content_bytes=None)
    assert layout() == layout(usual, usual) == layout(SimpleNamespace()) == layout(usual, run=16) == {}


def test_each_packing_and_each_order_of_tokens_has_a_name(monkeypatch):
    planes, states = (
        SimpleNamespace(num_head_slots=2, state_content_bytes=64),
        SimpleNamespace(num_head_slots=None, state_content_bytes=64),
    )
    mixed = SimpleNamespace(kv_cache_specs={"a": planes, "b": SimpleNamespace()})
    found = [
        layout(), layout(planes), layout(states), layout(planes, SimpleNamespace()), layout(mixed),
        layout(planes, backend="ROCM_ATTN"), layout(dcp=2, run=16), layout(dcp=2, run=64),
    ]  # fmt: skip
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    found.append(layout(planes))
    assert len({repr(one) for one in found}) == len(found), found
    assert layout(dcp=2) == {}, "each token in turn"


def test_ranks_whose_tokens_nobody_names_are_refused():
    with pytest.raises(ConfigError, match="decode_context_parallel_size"):
        layout(dcp=2, has_engine=False)


@pytest.mark.skipif(vtier.version() < (0, 33), reason="before 0.33 no backend packs blocks")
def test_an_engine_with_another_packing_finds_nothing_of_the_first(store_dir):
    usual = interface.FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    planes = replace(usual, num_head_slots=2, state_content_bytes=usual.page_size_bytes // TOKENS // 2)
    assert planes.page_size_bytes == usual.page_size_bytes
    for specs, stores in [(usual, 1), (planes, 2), (usual, 2)]:
        with Served(settings(store_dir), Gpu(specs=[specs])) as served:
            served.serve(names_of("a", 4))
        assert len(list(store_dir.rglob("kvhoist.store"))) == stores


def test_random_weights_are_another_model():
    config = vllm_config({})
    assert "load_format" not in _weights(config)
    for kind in ("dummy", SimpleNamespace(value="dummy")):
        config.load_config = SimpleNamespace(load_format=kind)
        assert _weights(config)["load_format"] == "dummy"
    config.load_config = SimpleNamespace(load_format="safetensors")
    assert "load_format" not in _weights(config)
