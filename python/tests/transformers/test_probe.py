"""Models that are tried at the start, and refused where a prompt does not go on from what its cache keeps."""

from __future__ import annotations

import os

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import tiny  # noqa: E402
import torch  # noqa: E402
from tiny_prefixes import answer, computed, opened  # noqa: E402

from kvhoist import ConfigError  # noqa: E402


def test_a_model_that_keeps_states_in_its_modules_is_refused(store_dir):
    model = tiny.model("recurrent-gemma")
    with pytest.raises(ConfigError, match="'RecurrentGemmaForCausalLM', expected one that answers the same"):
        opened(model, store_dir)
    assert not list(store_dir.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_that_change_with_later_tokens_are_refused(store_dir, dtype):
    model = tiny.model("gemma", use_bidirectional_attention=True).to(dtype)
    with pytest.raises(ConfigError, match="'Gemma3ForCausalLM, whose keys and values change with the tokens behind"):
        opened(model, store_dir)
    assert not list(store_dir.iterdir())


def test_attention_that_chooses_among_later_tokens_of_long_prompts_is_refused(store_dir):
    with pytest.raises(ConfigError, match="keep_window_size: found 2048, expected attention that depends on"):
        opened(tiny.model("doge"), store_dir)
    assert not list(store_dir.iterdir())


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.HYBRIDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_short_types_is_no_reason(store_dir, kind, dtype):
    opened(tiny.model(kind).to(dtype), None).close()


def test_a_model_in_training_is_tried_without_its_dropout_and_left_in_training():
    model, ids = tiny.model("llama", attention_dropout=0.5).train(), tiny.prompt(100)
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    with opened(model, None) as prefixes:
        assert [module.training for module in model.modules()] == before
        model.eval()
        assert [answer(model, prefixes, ids)[1] for _ in range(2)] == [0, 96]
        assert torch.equal(answer(model, prefixes, ids)[0], computed(model, ids, 96))
