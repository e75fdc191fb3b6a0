"""SGLang's load format `instanttensor` with `{"loader": "kvhoist"}`, under SGLang's own plugins and weight utilities."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import sgl
from engines import stand_ins

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

sgl.boot()

import torch  # noqa: E402

from kvhoist import ArgumentError  # noqa: E402
from kvhoist.safetensors import save_file  # noqa: E402
from kvhoist.sglang import weights  # noqa: E402

if sgl.version() < (0, 5, 23):
    pytest.skip("SGLang 0.5.23 is the first with a loader of this call", allow_module_level=True)

WEIGHTS = {f"layers.{n}.weight": torch.arange(100.0 * (n + 1)) for n in range(4)}


@pytest.fixture(scope="module")
def utils():
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    for name in ("configs.model_config", "layers.quantization.fp8", "layers.quantization.modelopt_quant",
                 "model_loader.checkpoint_quantization", "model_loader.ci_weight_validation"):  # fmt: skip
        stand_ins.add_blank(f"sglang.srt.{name}")
    stand_ins.add_shells(sgl.ROOT, ("sglang.srt.model_loader",))  # Whose `__init__` imports the models.
    found = importlib.import_module("sglang.srt.model_loader.weight_utils")
    # Bound by name, as SGLang's loader binds it.
    importer = sys.modules["importer"] = types.ModuleType("importer")
    importer.instanttensor_weights_iterator = found.instanttensor_weights_iterator
    weights.register()
    registry.apply_hooks()
    return importer


@pytest.fixture
def paths(tmp_path):
    names = list(WEIGHTS)
    for n in range(2):
        save_file({name: WEIGHTS[name] for name in names[2 * n : 2 * n + 2]}, tmp_path / f"{n}.safetensors")
    return [str(path) for path in sorted(tmp_path.iterdir())]


@pytest.mark.parametrize("extra", [{}, {"threads": 2, "window_bytes": 100, "page_cache": False, "piece_bytes": 4096}])
def test_the_iterator_gives_the_tensors_of_the_files(utils, paths, extra):
    found = utils.instanttensor_weights_iterator(
        paths, extra_config={"loader": "kvhoist", **extra}, load_group=None
    )
    found = dict(found)
    assert found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_wrong_keys_and_damaged_files_are_errors(utils, paths):
    for wrong in ({"loader": "other"}, {"loader": "kvhoist", "trheads": 2}):
        with pytest.raises(ArgumentError, match="other|trheads"):
            utils.instanttensor_weights_iterator(paths, extra_config=wrong)
    with open(paths[1], "wb") as file:
        file.write(b"cut")
    with pytest.raises(ArgumentError, match="1.safetensors: found 3 bytes"):
        dict(utils.instanttensor_weights_iterator(paths, extra_config={"loader": "kvhoist"}))


@pytest.mark.parametrize("extra", [None, {}, {"io_depth": 4}])
def test_without_the_key_sglangs_own_loader_is_called(utils, paths, extra):
    with pytest.raises(Exception) as raised:  # It needs a device, which is not here.
        list(utils.instanttensor_weights_iterator(paths, extra_config=extra))
    assert "InstantTensor" in str(raised.value)
