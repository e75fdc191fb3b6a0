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
from kvhoist.vllm.engine_config import page_layout, weights_of  # noqa: E402


def layout(*specs, dcp=1, run=1, has_engine=True, **attention):
    """What an adapter finds that is made by an engine of these groups and ranks."""
    kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs])
    vllm_config = has_engine and SimpleNamespace(
        attention_config=SimpleNamespace(**{"backend": None, "backend_per_kind": {}, **attention}),
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


def test_what_chooses_a_backend_is_named_where_its_kernels_may_take_smaller_blocks():
    """A block of two heads is `[heads, 128]` of one backend, and twice `[heads, 64]` of another."""
    small, large = SimpleNamespace(block_size=16), SimpleNamespace(block_size=128)
    assert layout(small) == layout(small, backend="FLASHINFER") == {}
    found = [
        layout(large, **attention)
        for attention in (
            {}, {"backend": "FLASH_ATTN"}, {"backend": "FLASHINFER"}, {"flash_attn_version": 4},
            {"use_trtllm_attention": True}, {"use_trtllm_attention": False},
            {"backend_per_kind": {"sliding_window": "TRITON_ATTN"}},
        )
    ]  # fmt: skip
    assert len({repr(one) for one in found}) == len(found), found
    assert layout(small, large, backend="FLASHINFER") == found[2]


def test_recurrent_states_that_lie_otherwise_in_a_padded_page_are_named(monkeypatch):
    """What is kept for speculative tokens moves the states behind it."""

    def states(*shapes, dtype=torch.bfloat16):
        return interface.MambaSpec(block_size=544, shapes=shapes, dtypes=(dtype,) * len(shapes), page_size_padded=4096)

    def found(spec):
        assert spec.page_size_bytes == 4096
        return layout(SimpleNamespace(block_size=TOKENS), spec)

    plain = found(states((3, 64), (8, 64)))
    others = [
        found(states((4, 64), (8, 64))), found(states((3, 64), (8, 64), (2, 64))),
        found(states((3, 64), (8, 64), dtype=torch.float16)),
    ]  # fmt: skip
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    others.append(found(states((3, 64), (8, 64))))
    assert len({repr(one) for one in [plain, *others]}) == 1 + len(others), others
    assert layout(SimpleNamespace(block_size=TOKENS)) == {}, "without states"
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    assert found(states((3, 64), (8, 64))) == plain, "vLLM's default"


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
    assert "load_format" not in weights_of(config)
    for kind in ("dummy", SimpleNamespace(value="dummy")):
        config.load_config = SimpleNamespace(load_format=kind)
        assert weights_of(config)["load_format"] == "dummy"
    config.load_config = SimpleNamespace(load_format="safetensors")
    assert "load_format" not in weights_of(config)


def test_what_adapters_may_change_is_another_model():
    """The keys of a request have its adapter's name, and not which modules of it the engine takes."""

    def found(**lora):
        config = vllm_config({})
        config.lora_config = SimpleNamespace(**lora)
        return weights_of(config)

    assert found() == found(target_modules=None, enable_tower_connector_lora=False) == weights_of(vllm_config({})) == {}
    config = vllm_config({})
    config.lora_config = None
    assert weights_of(config) == {}
    modules = [["q_proj"], ["q_proj", "k_proj"], ["k_proj", "q_proj", "k_proj"]]
    one, two, same = (found(target_modules=some, enable_tower_connector_lora=False) for some in modules)
    assert two == same != one != found(target_modules=["q_proj"], enable_tower_connector_lora=True) != {}
    assert found(enable_tower_connector_lora=True) == {"enable_tower_connector_lora": True}


def test_settings_of_media_that_their_hashes_lack_are_another_model():
    """vLLM hashes an image with what its request says of the processor, and not with what the engine says."""

    def found(**media):
        return weights_of(vllm_config({}, weights={"multimodal_config": SimpleNamespace(**media)}))

    usual = {"mm_processor_kwargs": None, "video_pruning_rate": None, "video_pruning_method": "evs"}
    plain = weights_of(vllm_config({}))
    assert plain == found() == found(**usual) == found(**{**usual, "video_pruning_rate": 0.0}) == {}
    assert plain == weights_of(vllm_config({}, weights={"multimodal_config": None}))
    others = [
        found(**{**usual, **media})
        for media in (
            {"mm_processor_kwargs": {"num_crops": 4}}, {"mm_processor_kwargs": {"num_crops": 8}},
            {"video_pruning_rate": 0.5}, {"video_pruning_rate": 0.7},
            {"video_pruning_rate": 0.7, "video_pruning_method": "vidcom2"}, {"mm_encoder_attn_dtype": "fp8"},
            {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": "/models/scales.json"},
        )
    ]  # fmt: skip
    assert len({repr(one) for one in [plain, *others]}) == 1 + len(others), others
    assert found(video_pruning_rate=0.5) == {"video_pruning_rate": 0.5}, "a version without methods"


def tier(path, vllm_config, **more):
    """The identity of a tier that is made by an engine of this configuration."""
    with vtier.Engine([vtier.tier_config(path)], **more) as engine:
        assert vllm_config is None or vllm_config.model_config
        return engine.tier.place.identity


def test_a_tier_tells_apart_what_its_engine_is_set_to(store_dir):
    """vLLM shows it to no tier, and the connector that makes it has it."""
    plain = tier(store_dir, None)
    assert plain == tier(store_dir, vllm_config({})), "nothing is set: the name stays"
    others = [
        tier(store_dir, vllm_config({}, **more))
        for more in (
            {"weights": {"quantization": "fp8"}}, {"weights": {"quantization": "awq"}},
            {"weights": {"revision": "abc"}}, {"weights": {"hf_overrides": {"rope_parameters": {"factor": 2.0}}}},
            {"cache": {"mamba_cache_dtype": "float16"}},
        )
    ]  # fmt: skip
    assert len({repr(one) for one in [plain, *others]}) == 1 + len(others), others


def test_a_tier_names_the_longest_request_once(store_dir):
    """Where vLLM says it to the tier, the name stays."""
    (store_dir / "config.json").write_text('{"rope_scaling": {"type": "longrope"}}')
    model = {"model": str(store_dir), "longest": 8192}
    rope = SimpleNamespace(to_dict=lambda: {"rope_scaling": {"type": "longrope"}})
    seen = tier(store_dir, vllm_config({}, weights={"hf_config": rope, "max_model_len": 8192}), **model)
    told = "max_model_len" in vtier.boot().config.OffloadingModelConfig.__dataclass_fields__
    assert (seen == tier(store_dir, None, **model)) == told
    assert seen.get("max_model_len", 0) or seen["weights"] == {"max_model_len": 8192}


def test_formats_of_8_bits_have_one_name_under_lmcache():
    """Why an operator has to tell them apart by a `revision`: vLLM's caches of all of them have one dtype."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE as dtypes

    from kvhoist.lmcache.object_names import ObjectNames

    def name(kind):
        key = SimpleNamespace(model_name="m", kv_rank=0, object_group_id=0, cache_salt="", chunk_hash=b"chunk")
        obj = SimpleNamespace(
            get_physical_size=lambda: 4096, get_shapes=lambda: [(2, 2048)], get_dtypes=lambda: [dtypes[kind]]
        )  # fmt: skip
        return ObjectNames(4096).of_objects([key], [obj])

    assert name("fp8") == name("fp8_e4m3") == name("fp8_e5m2") != name("int8")
