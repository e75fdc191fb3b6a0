"""What changes of a model while its prompts are cached: adapters, weights, modules, and what they keep of images."""

from __future__ import annotations

import os
from functools import partial

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import tiny  # noqa: E402
import torch  # noqa: E402
from tiny_prefixes import answer, computed, generated, opened  # noqa: E402

from kvhoist import ArgumentError, ConfigError  # noqa: E402


class Adapted(torch.nn.Module):
    """A linear layer with two adapters, as peft's `LoraLayer` has them."""

    def __init__(self, base_layer, seed=0):
        super().__init__()
        self.base_layer, self.scaling = base_layer, {"a": 2.0, "b": 2.0}
        self.active_adapters, self.disable_adapters, self.merged_adapters = ["a"], False, []
        draw = torch.Generator().manual_seed(seed)
        sizes = {"lora_A": (4, base_layer.in_features), "lora_B": (base_layer.out_features, 4)}
        for name, size in sizes.items():
            weights = {adapter: torch.randn(size, generator=draw) for adapter in "ab"}
            setattr(self, name, torch.nn.ParameterDict(weights))

    def forward(self, x, adapter_names=None):
        found = self.base_layer(x)
        for name in adapter_names or self.active_adapters:
            found = found + x @ self.lora_A[name].T @ self.lora_B[name].T * self.scaling[name]
        return found


def adapted(seed=0):
    """A model with adapters, and their layers."""
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapted(layer.self_attn.k_proj, seed)
    return model.eval(), [layer.self_attn.k_proj for layer in model.model.layers]


class of_call:  # noqa: N801
    """What peft does for the time of a call with `adapter_names`."""

    def __init__(self, layers, *names):
        self._layers, self._names = layers, list(names)

    def __enter__(self):
        def hook(_layer, args, kwargs, adapter_names):
            return args, {**kwargs, "adapter_names": adapter_names}

        hook = partial(hook, adapter_names=self._names)
        self._hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in self._layers]

    def __exit__(self, *_exception):
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def test_adapters_of_one_call_are_neither_stored_nor_loaded_for():
    (model, layers), ids = adapted(), tiny.prompt(100)
    with opened(model, None) as prefixes:
        past = prefixes(ids)
        with of_call(layers, "b"):
            generated(model, {"input_ids": ids}, past)
        assert prefixes(ids).prefix_length == 0
        answer(model, prefixes, ids)
        past = prefixes(ids)
        with of_call(layers, "b"), pytest.raises(ArgumentError, match="96 loaded tokens.*adapter_names"):
            generated(model, {"input_ids": ids}, past)
        assert torch.equal(answer(model, prefixes, ids)[0], computed(model, ids, 96))


@torch.no_grad()
@pytest.mark.parametrize("what", ["adapter", "weight", "module"])
def test_what_is_changed_and_changed_back_within_a_block_is_noticed(what):
    (model, layers), ids = adapted(), tiny.prompt(100)
    layer = model.model.layers[1].mlp
    weight, module = layer.up_proj.weight, layer.up_proj

    def change(back):
        if what == "adapter":
            for one in layers:
                one.active_adapters = ["a"] if back else ["b"]
        elif what == "weight":
            layer.up_proj.weight = weight if back else torch.nn.Parameter(weight * 2)
        else:
            layer.up_proj = module if back else torch.nn.Linear(64, 64, bias=False).eval()

    with opened(model, None) as prefixes:
        past = prefixes(ids)
        model(ids[:, :20], past_key_values=past)
        for at in range(20, 100):
            if at in (24, 28):
                change(at == 28)
            model(ids[:, at : at + 1], past_key_values=past)
        assert answer(model, prefixes, ids)[1] == 16
        assert torch.equal(answer(model, prefixes, ids)[0], computed(model, ids, 96))


def test_other_weights_in_memory_that_is_used_again_are_noticed():
    model, ids = tiny.model("llama"), tiny.prompt(100)
    layer = model.model.layers[1].mlp.up_proj
    memory = bytearray(layer.weight.numel() * 4)

    def put(value):
        memory[:] = torch.full((layer.weight.numel(),), value).numpy().tobytes()
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(64, 64))
        return layer.weight.data_ptr(), layer.weight._version

    first = put(0.5)
    with opened(model, None) as prefixes:
        answer(model, prefixes, ids)
        assert put(0.25) == first
        with pytest.raises(ArgumentError, match="other weights"):
            prefixes(ids)


def test_a_revision_does_not_vouch_for_adapters(store_dir):
    ids, found = tiny.prompt(100), []
    for seed in (1, 2, 1):
        model, _ = adapted(seed)
        with opened(model, store_dir, revision="base") as prefixes:
            found.append(answer(model, prefixes, ids)[1])
    assert found == [0, 0, 96]


def test_a_revision_spares_the_weights_that_adapters_adapt(store_dir, monkeypatch):
    digested = []
    monkeypatch.setattr(
        "kvhoist.transformers.model_identity._sums", lambda tensor: digested.append(tuple(tensor.shape)) or [0, 0]
    )
    opened(adapted()[0], store_dir, revision="base").close()
    assert sorted(set(digested)) == [(4, 64), (32, 4)] and len(digested) == 4 * 4


def test_while_a_layer_is_in_training_nothing_is_loaded_or_stored():
    model, ids = tiny.model("llama", attention_dropout=0.5), tiny.prompt(100)
    with opened(model, None) as prefixes:
        model.model.layers[0].train()
        answer(model, prefixes, ids)
        model.eval()
        assert [answer(model, prefixes, ids)[1] for _ in range(2)] == [0, 96]
        past = prefixes(ids)
        model.model.layers[0].train()
        assert prefixes(ids).prefix_length == 0
        with pytest.raises(ArgumentError, match="96 loaded tokens.*LlamaDecoderLayer is in training"):
            model(ids[:, 96:], past_key_values=past)


# Images


def test_positions_that_an_image_moved_are_noticed(store_dir):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    model.model.rope_deltas = torch.tensor([[-56]])
    with pytest.raises(ConfigError, match="LlamaModel.rope_deltas is that of an earlier prompt .*set it to None"):
        opened(model, store_dir)
    assert not list(store_dir.iterdir())
    model.model.rope_deltas = None
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids[:, :50])
        past = prefixes(ids)
        model.model.rope_deltas = torch.tensor([[-56]])
        with pytest.raises(ArgumentError, match="48 loaded tokens.*rope_deltas"):
            model(ids[:, 48:], past_key_values=past)
        assert answer(model, prefixes, ids)[1] == 0
        model.model.rope_deltas = torch.tensor([[0]])
        assert [answer(model, prefixes, ids)[1] for _ in range(2)] == [48, 96]


@torch.no_grad()
def test_a_text_behind_an_image_is_answered_as_without_it():
    model, ids = tiny.model("qwen2-vl"), tiny.prompt(100)
    seen = torch.cat([ids[:, :5], torch.tensor([[124, *[126] * 64, 127]]), ids[:, 5:20]], 1)
    image = {
        "pixel_values": torch.randn(256, 96, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 16, 16]]), "mm_token_type_ids": (seen == 126).int(),
    }  # fmt: skip
    expected = generated(model, {"input_ids": ids}, max_new_tokens=30)
    with opened(model, None) as prefixes:
        for n, loaded in enumerate([0, 96, 0, 96]):
            if n == 2:
                model(input_ids=seen, **image)
                assert model.model.rope_deltas.item() < 0
            past = prefixes(ids)
            assert past.prefix_length == loaded
            assert torch.equal(generated(model, {"input_ids": ids}, past, max_new_tokens=30), expected)
        assert prefixes(expected).prefix_length == 128
        # Its positions are of three kinds, which are one where there are no images.
        past = prefixes(ids)
        moved = torch.arange(96, 100).expand(3, 1, 4) + torch.tensor([0, 0, 1])[:, None, None]
        with pytest.raises(ArgumentError, match="position_ids"):
            model(ids[:, 96:], past_key_values=past, position_ids=moved)
