"""vLLM's load format `kvhoist`, under vLLM's own loader."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

vtier.boot()

import torch  # noqa: E402

from kvhoist import ArgumentError, ConfigError  # noqa: E402
from kvhoist.safetensors import save_file  # noqa: E402
from kvhoist.vllm import weights  # noqa: E402

WEIGHTS = {
    "model.embed.weight": torch.arange(600, dtype=torch.bfloat16).view(30, 20),
    "model.layers.0.mlp.experts.0.up.weight": torch.full((300,), 7, dtype=torch.uint8),
    "model.layers.0.mlp.experts.1.up.weight": torch.full((300,), 8, dtype=torch.uint8),
    "lm_head.weight": torch.arange(100.0),
}


@pytest.fixture(scope="module")
def loaders():
    found = importlib.import_module("vllm.model_executor.model_loader")
    for _ in range(2):  # vLLM calls plugins in each of its processes, and more than once in some.
        weights.register()
    return found


def loader(loaders, **extra):
    config = importlib.import_module("vllm.config.load").LoadConfig(
        load_format="kvhoist", model_loader_extra_config=extra
    )
    return loaders.get_model_loader(config)


@pytest.fixture
def folder(tmp_path):
    names = list(WEIGHTS)
    save_file({name: WEIGHTS[name] for name in names[:2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: WEIGHTS[name] for name in names[2:]}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def source(loaders, folder, **more):
    default = importlib.import_module("vllm.model_executor.model_loader.default_loader").DefaultModelLoader
    return default.Source(str(folder), None, **more)


@pytest.mark.parametrize("extra", [{}, {"threads": 2, "window_bytes": 100, "page_cache": False}])
def test_the_loader_gives_the_tensors_of_the_files(loaders, folder, extra):
    found = dict(loader(loaders, **extra)._get_weights_iterator(source(loaders, folder, prefix="other.")))
    assert found.keys() == {f"other.{name}" for name in WEIGHTS}
    assert all(torch.equal(found[f"other.{name}"], wanted) for name, wanted in WEIGHTS.items())


def test_all_weights_of_a_model_come_through_it(loaders, folder):
    config = SimpleNamespace(model=str(folder), model_weights="", revision=None, hf_config=None)
    model = SimpleNamespace(secondary_weights=(), fall_back_to_pt_during_load=True, allow_patterns_overrides=None)
    found = dict(loader(loaders).get_all_weights(config, model))
    assert found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_experts_of_other_ranks_are_not_read(loaders, folder):
    chosen = loader(loaders)
    chosen.local_expert_ids = {1}
    found = dict(chosen._get_weights_iterator(source(loaders, folder)))
    assert found.keys() == WEIGHTS.keys() - {"model.layers.0.mlp.experts.0.up.weight"}


def test_what_the_model_does_not_load_is_not_read(loaders, folder):
    chosen = loader(loaders)
    if not hasattr(source(loaders, folder), "is_unused_weight"):
        pytest.skip("this vLLM has no such filter")
    found = dict(chosen._get_weights_iterator(source(loaders, folder, is_unused_weight=lambda name: "lm_head" in name)))
    assert found.keys() == WEIGHTS.keys() - {"lm_head.weight"}
    chosen.local_expert_ids = {0}
    found = dict(chosen._get_weights_iterator(source(loaders, folder, is_unused_weight=lambda name: "embed" in name)))
    assert found.keys() == {"model.layers.0.mlp.experts.0.up.weight", "lm_head.weight"}


def test_files_of_a_language_model_are_not_read_for_an_encoder(loaders, folder):
    import json

    chosen = loader(loaders)
    if not hasattr(chosen, "_encoder_only_lm_prefixes"):
        pytest.skip("this vLLM has no such filter")
    names = list(WEIGHTS)
    files = {name: f"model-0000{1 + at // 2}-of-00002.safetensors" for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    chosen._encoder_only_lm_prefixes = ("model.embed", "model.layers.0.mlp.experts.0")
    assert dict(chosen._get_weights_iterator(source(loaders, folder))).keys() == set(names[2:])
    chosen._encoder_only_lm_prefixes = ("model.", "lm_head")
    with pytest.raises(ConfigError, match="mm_encoder_only: found"):
        dict(chosen._get_weights_iterator(source(loaders, folder)))


def test_the_duration_begins_with_the_first_tensor(loaders, folder):
    chosen = loader(loaders)
    assert chosen.counter_before_loading_weights == 0.0
    dict(chosen._get_weights_iterator(source(loaders, folder)))
    assert chosen.counter_before_loading_weights > 0.0


def test_a_checkpoint_of_torchao_is_refused(loaders, folder):
    chosen = loader(loaders)
    # As `load_weights` does for one.
    chosen.load_config.safetensors_load_strategy = "torchao"
    with pytest.raises(ConfigError, match="load_format.*torchao.*'auto'"):
        dict(chosen._get_weights_iterator(source(loaders, folder)))


def test_unknown_keys_and_damaged_files_are_errors(loaders, folder):
    with pytest.raises(ValueError, match="trheads"):
        loader(loaders, trheads=2)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"cut")
    with pytest.raises(ArgumentError, match="00002-of-00002.safetensors: found 3 bytes"):
        dict(loader(loaders)._get_weights_iterator(source(loaders, folder)))
