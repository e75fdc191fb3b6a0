"""What separates two stores of the HiCache backend, and setups that it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_pages import filled, keys_for  # noqa: E402

from kvhoist import ConfigError, StoreError, _figures  # noqa: E402
from kvhoist.sglang.identity import holds_draft  # noqa: E402


def test_each_rank_serves_its_figures_at_a_port_of_its_own(store_dir, monkeypatch):
    served = []
    monkeypatch.setattr(_figures, "serve", lambda port, rank=0: served.append((port, rank)))
    size, pool = dict(tp_size=2, pp_size=2, attn_cp_size=2), filled(sgl.MHA)
    ranks = [dict(pp_rank=pp, attn_cp_rank=cp, tp_rank=tp) for pp in (0, 1) for cp in (0, 1) for tp in (0, 1)]
    if sgl.version() >= (0, 5, 23):
        ranks += [dict(dp_rank=1, **rank) for rank in ranks]
    extra = sgl.extra_config(store_dir, metrics_port=9400)
    for rank in ranks:
        sgl.backend(sgl.MHA, pool, extra, **size, **rank).close()
    assert set(served) == {(9400, number) for number in range(len(ranks))}


@pytest.mark.parametrize(
    "change",
    [
        dict(model_name="other"),
        dict(tp_rank=1),
        dict(tp_size=4),
        dict(pp_rank=1),
        dict(pp_size=4),
        dict(attn_cp_rank=1),
        dict(attn_cp_size=4),
        dict(dp_rank=1),
    ],
    ids=lambda change: "-".join(change),
)
def test_nothing_is_shared_between_models_or_ranks(change, store_dir):
    if "dp_rank" in change and sgl.version() < (0, 5, 23):
        pytest.skip("sglang 0.5.17 has no dp_rank")
    pool, other = filled(sgl.MHA), filled(sgl.MHA, seed=9)
    size = dict(tp_size=2, pp_size=2, attn_cp_size=2)
    keys = keys_for(sgl.MHA, 2)
    extra = sgl.extra_config(store_dir)
    first = sgl.backend(sgl.MHA, pool, extra, **size)
    # Both open at once, as two ranks of one node are.
    second = sgl.backend(sgl.MHA, other, extra, **{**size, **change})
    assert all(first.batch_set_v1(keys, pool.alloc(2 * pool.page_size)))
    assert second.batch_exists(keys) == 0
    first.close()
    second.close()


@pytest.mark.parametrize("change", ["layout", "dtype", "page_tokens", "layers"])
def test_nothing_is_shared_between_formats(change, store_dir):
    shape = vars(sgl.MHA).copy()
    layout, dtype = "page_first", torch.bfloat16
    if change == "layout":
        layout = "page_first_direct"
    elif change == "dtype":
        dtype = torch.float16
    else:
        shape[change] //= 2
    geometry = sgl.Geometry(**shape)
    pool = filled(sgl.MHA)
    first = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    keys = keys_for(sgl.MHA, 2)
    assert all(first.batch_set_v1(keys, pool.alloc(2 * pool.page_size)))
    other = sgl.host_pool(geometry, sgl.device_pool(geometry, 4, dtype), layout)
    second = sgl.backend(geometry, other, sgl.extra_config(store_dir))
    assert second.batch_exists(keys) == 0
    first.close()
    second.close()


def test_states_of_another_type_are_another_format():
    from kvhoist.sglang.pools import Geometry

    def geometry(**more):
        page = torch.zeros(4096, dtype=torch.uint8)
        return Geometry.of(SimpleNamespace(dtype=torch.bfloat16, get_dummy_flat_data_page=lambda: page, **more), 16)

    assert geometry(temporal_dtype=torch.bfloat16) == geometry()
    assert geometry(temporal_dtype=torch.float16) != geometry(temporal_dtype=torch.float32) != geometry()


def test_states_of_a_draft_model_are_seen_where_sglang_has_them():
    sgl.boot()
    mamba = pytest.importorskip("sglang.srt.mem_cache.pool_host.mamba", reason="sglang 0.5.23 has states of drafts")
    pool = mamba.MambaPoolHost.__new__(mamba.MambaPoolHost)
    assert pool.mtp_draft_buffer_infos == () and not holds_draft("mamba", pool)
    pool.mtp_draft_buffer_infos = ("of a layer",)
    assert holds_draft("mamba", pool)


def test_one_store_has_one_server(store_dir):
    pool = filled(sgl.MHA)
    first = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    with pytest.raises(StoreError, match="lock"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
    first.close()


def test_mla_with_tensor_parallelism_is_refused_without_a_service(store_dir):
    pool = filled(sgl.MLA)
    with pytest.raises(ConfigError, match="service.*'off'.*2 ranks.*shared by processes"):
        sgl.backend(sgl.MLA, pool, sgl.extra_config(store_dir, service="off"), tp_size=2)
    assert list(store_dir.iterdir()) == []


def _serve_with(monkeypatch, **server_args):
    """As in a server that was started with these arguments."""
    sgl.boot()
    import sglang.srt.runtime_context as context

    monkeypatch.setattr(context, "get_server_args", lambda: SimpleNamespace(**server_args), raising=False)


def test_servers_with_other_weights_share_nothing(store_dir, monkeypatch):
    pool = filled(sgl.MHA)
    servers = [
        (dict(model_path="meta/tiny"), {}),
        (dict(model_path="/models/other"), {}),
        (dict(model_path="meta/tiny", revision="abc"), {}),
        (dict(model_path="meta/tiny", quantization="fp8"), {}),
        (dict(model_path="meta/tiny"), dict(revision="2026-11-22")),
        (dict(model_path="meta/tiny", quantization_param_path="/models/scales.json"), {}),
    ]
    keys, indices = keys_for(sgl.MHA, 2), pool.alloc(2 * pool.page_size)
    for round_, found in enumerate((0, 2)):
        for server, settings in servers:
            _serve_with(monkeypatch, **server)
            backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir, **settings))
            assert backend.batch_exists(keys) == found, (round_, server, settings)
            assert all(backend.batch_set_v1(keys, indices))
            backend.close()


def test_other_scales_of_an_8_bit_cache_share_nothing(store_dir, monkeypatch):
    """Also those that were written over the former ones."""
    pool, keys, scales = filled(sgl.MHA), keys_for(sgl.MHA, 2), store_dir / "scales.json"
    _serve_with(monkeypatch, model_path="meta/tiny", quantization_param_path=str(scales))
    for text, found in (("{}", 0), ('{"0": 1.5}', 0), ("{}", 2)):
        scales.write_text(text)
        backend = sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))
        assert backend.batch_exists(keys) == found
        assert all(backend.batch_set_v1(keys, pool.alloc(2 * pool.page_size)))
        backend.close()


def test_attention_groups_divide_the_total_as_all_ranks_of_the_server_do(store_dir, monkeypatch):
    """Under data-parallel attention SGLang's storage configuration has the size of an attention group."""
    server = dict(model_path="meta/tiny", tp_size=8, pp_size=1, dp_size=8, enable_dp_attention=True)
    _serve_with(monkeypatch, **server)
    extra = sgl.extra_config(store_dir, service="off", capacity_total="64MiB")
    del extra["capacity"]
    backend = sgl.backend(sgl.MHA, filled(sgl.MHA), extra)
    assert backend.config.capacity == 8 << 20
    backend.close()


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_a_model_whose_pages_depend_on_their_batch_is_warned_of(store_dir, monkeypatch, caplog, where):
    """SGLang takes the long factors of LongRoPE for a whole batch where one of its requests is long."""
    pool = filled(sgl.MHA)

    def said(rope, way, **model):
        config = SimpleNamespace(to_dict=lambda: {"text_config": {where: rope}, **model}, context_len=131_072)
        config.hf_config = config
        if "longest" in model:
            config.context_len = model["longest"]
        if way == "arguments":
            _serve_with(monkeypatch, model_path="meta/tiny", get_model_config=lambda: config)
        else:
            _serve_with(monkeypatch, model_path="meta/tiny")
            module = SimpleNamespace(model_config_of=lambda _args: config)
            monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.model_override_base", module)
        caplog.clear()
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()
        return "long factors" in caplog.text

    for way in ("arguments", "module"):
        assert said({"type": "longrope"}, way) and said({"rope_type": "longrope"}, way) and said({"type": "su"}, way)
        assert said({"type": "longrope"}, way, original_max_position_embeddings=4096)
        # No request is longer than the short factors are for.
        assert not said({"type": "longrope"}, way, original_max_position_embeddings=4096, longest=4096)
        assert not said({"type": "yarn"}, way) and not said(None, way)
    caplog.clear()
    _serve_with(monkeypatch, model_path="meta/tiny")
    monkeypatch.delitem(sys.modules, "sglang.srt.arg_groups.model_override_base", raising=False)
    sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()
    assert "long factors" not in caplog.text, "a server that does not say it"


def test_adapters_whose_pages_have_the_same_keys_are_refused(store_dir, monkeypatch):
    pool = filled(sgl.MHA)
    _serve_with(monkeypatch, model_path="meta/tiny", enable_lora=True)
    from sglang.srt.mem_cache import utils

    if hasattr(utils, "storage_namespace_seed"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()
        monkeypatch.delattr(utils, "storage_namespace_seed")
    with pytest.raises(ConfigError, match="^enable_lora: found True"):
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir))


def test_a_version_whose_keys_have_no_salt_says_so_at_the_start(store_dir, caplog):
    """Where tenants are told apart by `cache_salt`, an operator must know that their pages are not."""
    from sglang.srt.mem_cache import utils

    pool = filled(sgl.MHA)
    sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()
    assert ("cache_salt" in caplog.text) != hasattr(utils, "storage_namespace_seed")
    assert ("cache_salt" in caplog.text) == (sgl.version() < (0, 5, 23))


def test_a_version_whose_keys_have_few_bits_of_an_image_says_so_at_the_start(store_dir, monkeypatch, caplog):
    """Two images that collide share pages: an operator of a multimodal model must know."""
    module, name = "sglang.srt.managers.schedule_batch", "_compute_pad_value"
    # The whole module imports the server.
    has_few = f"def {name}(" in Path(sgl.ROOT, *module.split(".")).with_suffix(".py").read_text()
    assert has_few == (sgl.version() < (0, 5, 23))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: None} if has_few else {}))
    pool = filled(sgl.MHA)
    for model, is_multimodal in (({"is_multimodal": True}, True), ({"is_multimodal": False}, False), ({}, False)):
        caplog.clear()
        _serve_with(monkeypatch, model_path="meta/tiny", get_model_config=lambda model=model: SimpleNamespace(**model))
        sgl.backend(sgl.MHA, pool, sgl.extra_config(store_dir)).close()
        assert ("30 bits of an image" in caplog.text) == (has_few and is_multimodal), model
