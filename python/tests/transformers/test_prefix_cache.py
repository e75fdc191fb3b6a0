"""The prefix cache under transformers' own models: what they answer with it is what they answer without."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import tiny  # noqa: E402
import torch  # noqa: E402
from nodes import await_unlocked  # noqa: E402
from tiny_prefixes import BLOCK, answer, blocks, computed, generated, opened  # noqa: E402

import kvhoist  # noqa: E402
from kvhoist import ArgumentError, ConfigError, DeadlineError, StoreError  # noqa: E402


def close(one, other):
    """Equal but for the order of sums: another KV moves these logits by a hundred times as much."""
    return torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("max_length", [None, 256], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_logits_are_bitwise_those_of_the_same_computation(store_dir, kind, max_length):
    model, ids = tiny.model(kind), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        logits, loaded = answer(model, prefixes, ids[:, :144], max_length)
        assert loaded == 0 and torch.equal(logits, computed(model, ids[:, :144], 0, max_length))
    # Another process would have the model anew.
    model = tiny.model(kind)
    with opened(model, store_dir) as prefixes:
        logits, loaded = answer(model, prefixes, ids, max_length)
        assert loaded == 144 and torch.equal(logits, computed(model, ids, 144, max_length))
        assert close(logits, computed(model, ids)[:, 144:])
        # A prompt that leaves the stored one in its fourth block.
        other = torch.cat([ids[:, :60], tiny.prompt(40, seed=8)], 1)
        logits, loaded = answer(model, prefixes, other, max_length)
        assert loaded == 48 and close(logits, computed(model, other, 48, max_length))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_last_token_is_computed_where_all_are_stored(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(96)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 95 and close(logits, computed(model, ids, 95))


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("max_length", [None, 256], ids=["dynamic", "static"])
def test_a_padded_batch_generates_the_same(store_dir, kind, max_length):
    model = tiny.model(kind)
    common = tiny.prompt(100)
    inputs = tiny.padded(
        *(
            torch.cat([common[:, :keep], tiny.prompt(more, seed=more)], 1)
            for keep, more in ((100, 20), (70, 21), (90, 5))
        )
    )
    expected = generated(model, inputs)
    with opened(model, store_dir) as prefixes:
        assert torch.equal(generated(model, inputs, prefixes(**inputs, max_length=max_length)), expected)
    with opened(tiny.model(kind), store_dir) as prefixes:
        past = prefixes(**inputs, max_length=max_length)
        # The third row has 25 columns of padding and five whole blocks.
        assert past.prefix_length == 25 + 80
        assert torch.equal(generated(prefixes.model, inputs, past), expected)
        # Rows of other lengths than in the batch that stored them.
        inputs = {name: value[1:] for name, value in inputs.items()}
        past = prefixes(**inputs, max_length=max_length)
        assert past.prefix_length and torch.equal(generated(prefixes.model, inputs, past), generated(model, inputs))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_generated_tokens_are_part_of_the_next_prompt(store_dir, kind):
    model, inputs = tiny.model(kind), {"input_ids": tiny.prompt(40)}
    with opened(model, store_dir) as prefixes:
        first = generated(model, inputs, prefixes(**inputs), max_new_tokens=60)
        # The last token that was generated was never computed on.
        again = prefixes(first)
        assert again.prefix_length == 96
        rest = model(first[:, 96:], past_key_values=again).logits
        assert close(rest, computed(model, first)[:, 96:])


def test_a_gpu_s_memory_is_loaded_into_in_place(store_dir):
    # The cache's simulated device: host memory behind the same calls.
    model, ids = tiny.model("gemma"), tiny.prompt(150)
    with opened(model, store_dir, device="simulated", device_blocks=1) as prefixes:
        answer(model, prefixes, ids[:, :144])
    with opened(model, store_dir, device="simulated", device_blocks=1) as prefixes:
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 144 and torch.equal(logits, computed(model, ids, 144))


@pytest.mark.parametrize("blocks", [1, 5, 9])
def test_a_prefix_longer_than_the_staging_memory(store_dir, monkeypatch, blocks):
    # Blocks of the sliding layers, the larger ones: of one, five and nine, one, four and four loads are under way.
    monkeypatch.setattr("kvhoist.transformers.store.STAGING_BYTES", blocks * 5 * 2 * BLOCK * 2 * 16 * 4)
    model, ids = tiny.model("gemma"), tiny.prompt(390)
    with opened(model, store_dir) as prefixes:
        assert prefixes.store.staging.numel() == blocks * max(prefixes.store.block_bytes)
        for n in (150, 390):
            answer(model, prefixes, ids[:, :n])
            logits, loaded = answer(model, prefixes, ids[:, :n])
            assert loaded == (n - 1) // BLOCK * BLOCK and close(logits, computed(model, ids[:, :n], loaded))


def test_a_part_of_the_staging_memory_is_used_again_when_it_was_put(store_dir, monkeypatch):
    monkeypatch.setattr("kvhoist.transformers.store.STAGING_BYTES", 1 << 16)  # four blocks
    model, ids = tiny.model("llama"), tiny.prompt(400)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        store, keys = prefixes.store, keys_of(prefixes, ids)
        wanted = {}
        assert store.load(keys, 384, lambda group, piece, first: wanted.update({first: piece.clone()}))
        # A piece is put when all loads that have begun have ended: one into its part would have changed it.
        found, begun, submit = {}, [], store._calls.submit

        def submitted(*call, **more):
            begun.append(submit(*call, **more))
            return begun[-1]

        def put(group, piece, first):
            wait(begun)
            found[first] = piece.clone()

        monkeypatch.setattr(store._calls, "submit", submitted)
        assert store.load(keys, 384, put)
        assert sum(len(piece) for piece in wanted.values()) == 24 and len(wanted) >= 4
        assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)


def test_without_a_path_prompts_live_as_long_as_the_object():
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, None) as prefixes:
        assert [answer(model, prefixes, ids)[1] for _ in range(2)] == [0, 96]


# What goes wrong


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import tiny, tiny_prefixes as t
model = tiny.model("gemma")
prefixes = t.opened(model, sys.argv[2], write_policy="write_through")
t.answer(model, prefixes, tiny.prompt(150)[:, :144])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_the_prefix_is_there_and_right(store_dir):
    here = str(Path(tiny.__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, here, str(store_dir)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    await_unlocked(store_dir)
    model, ids = tiny.model("gemma"), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 144 and torch.equal(logits, computed(model, ids, 144))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_block_that_was_slow_once_is_loaded_again(store_dir, monkeypatch, kind):
    model, ids = tiny.model(kind), tiny.prompt(144)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        cache, load = prefixes.store.caches[0], prefixes.store.caches[0].load
        with monkeypatch.context() as patch:
            # The block stays where it is: the store does not copy it once more.
            patch.setattr(
                cache, "load", lambda keys, *given, **more: [DeadlineError("a slow moment"), *load(keys, *given, **more)[1:]]
            )
            logits, loaded = answer(model, prefixes, ids)
            assert loaded == 0 and close(logits, computed(model, ids))
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 143 and close(logits, computed(model, ids, loaded))


@pytest.mark.parametrize(
    "budget", [{"write_budget": "1GiB"}, {"drive_writes_per_day": 0.5, "drive_bytes": 2 << 30}], ids=["bytes", "drive"]
)
def test_the_stores_of_a_model_share_one_write_budget(store_dir, budget):
    with opened(tiny.model("gemma"), store_dir, write_policy="by_value", **budget) as prefixes:
        samples = kvhoist.metrics.samples(prefixes.store.caches)
        (of_stores,) = [found for metric, found in samples if metric.name == "kvhoist_write_budget_bytes"]
        budgets = [sample.value for sample in of_stores]
    # Two layers of six see all tokens.
    assert len(budgets) == 2 and sum(budgets) == pytest.approx(1 << 30) and max(budgets) < 1 << 30


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_damaged_blocks_are_computed_again(store_dir, kind, seed):
    model, ids = tiny.model(kind), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
    generator = torch.Generator().manual_seed(seed)
    for path in blocks(store_dir):
        data = bytearray(path.read_bytes())
        # Behind the records, which have the first MiB: a page of some block, and about every eighth of the others.
        written = [at for at in range(1 << 20, len(data), 4096) if any(data[at : at + 4096])]
        for at in written:
            if at == written[0] or torch.rand((), generator=generator) < 1 / 8:
                data[at + 99] ^= 0x40
        path.write_bytes(data)
    with opened(model, store_dir) as prefixes:
        logits, loaded = answer(model, prefixes, ids)
        assert loaded < 144 and close(logits, computed(model, ids, loaded))
        # What was damaged was computed and stored again.
        for _ in range(2):
            logits, loaded = answer(model, prefixes, ids)
        assert loaded == 144 and close(logits, computed(model, ids, loaded))


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral"])
def test_a_byte_flipped_in_each_block_in_turn(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(100)
    with opened(model, store_dir, write_policy="write_through") as prefixes:
        answer(model, prefixes, ids)
    clean = {path: path.read_bytes() for path in blocks(store_dir)}
    shorter = 0
    for path, data in clean.items():
        filled = [at for at in range(0, len(data) - 4096, 4096) if any(data[at : at + 4096])]
        for at in filled[1 :: max(1, len(filled) // 6)]:
            for other, whole in clean.items():
                other.write_bytes(whole)
            path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
            with opened(model, store_dir) as prefixes:
                logits, loaded = answer(model, prefixes, ids)
                assert close(logits, computed(model, ids, loaded))
                shorter += loaded < 96
    assert shorter


def keys_of(prefixes, ids):
    from kvhoist.transformers.store import chain

    return chain(ids[0].tolist(), BLOCK, [])


def test_an_evicted_block_in_the_middle_ends_the_prefix(store_dir):
    model, ids = tiny.model("llama"), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        assert prefixes.store.caches[0].remove(keys_of(prefixes, ids)[4])
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 64 and close(logits, computed(model, ids, 64))
        # The hole is filled, and the blocks behind it are used again.
        assert answer(model, prefixes, ids)[1] == 144


@pytest.mark.parametrize("ends", ["before", "behind"])
def test_after_a_forward_that_did_not_end_nothing_is_stored(store_dir, ends):
    model, ids = tiny.model("llama"), tiny.prompt(150)

    def interrupt(*_args):
        raise KeyboardInterrupt

    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids[:, :64])
        past = prefixes(ids)
        # Before its first layer, or behind the last.
        hook = (model.model.layers[0] if ends == "before" else model.lm_head).register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 64:], past_key_values=past)
        hook.remove()
        if ends == "behind":
            past.crop(-86)
        assert torch.equal(model(ids[:, 64:], past_key_values=past).logits, computed(model, ids, 64))
        assert prefixes(ids).prefix_length == 64


def test_a_block_is_known_by_all_tokens_before_it(store_dir):
    model, a, b, c, d = tiny.model("llama"), *(tiny.prompt(BLOCK, seed=seed) for seed in range(4))
    with opened(model, store_dir) as prefixes:
        for parts in ((a, b), (c, d)):
            answer(model, prefixes, torch.cat(parts, 1))
        mixed = torch.cat((a, d, b), 1)
        logits, loaded = answer(model, prefixes, mixed)
        assert loaded == BLOCK and close(logits, computed(model, mixed, BLOCK))


def test_a_sliding_layer_needs_its_last_window_only(store_dir):
    model, ids = tiny.model("gemma"), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        window = next(n for n, group in enumerate(prefixes.store.groups) if group.reach is not None)
        assert prefixes.store.groups[window].reach == 32
        keys = keys_of(prefixes, ids)
        # 144 tokens need the windows of blocks 7 and 8.
        for key in keys[:7]:
            prefixes.store.caches[window].remove(key)
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 144 and close(logits, computed(model, ids, 144))
        prefixes.store.caches[window].remove(keys[7])
        assert answer(model, prefixes, ids)[1] == 0


def test_a_block_that_is_lost_between_lookup_and_load(store_dir, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        key = keys_of(prefixes, ids)[6]
        store = prefixes.store
        real = store.load

        def load(keys, tokens, put):
            store.caches[0].remove(key)
            return real(keys, tokens, put)

        monkeypatch.setattr(store, "load", load)
        logits, loaded = answer(model, prefixes, ids)
        assert loaded == 96 and close(logits, computed(model, ids, 96))


# Whose KV it is


def test_blocks_that_cannot_be_read_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("kvhoist.transformers.store.BAD_MAX", 3)
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, None) as prefixes:
        answer(model, prefixes, ids)
        store, keys = prefixes.store, prefixes(ids).record.known.rows[0].keys
        others = [bytes([n]) * 32 for n in range(8)]
        for key in [*keys[2:4], *others, keys[4]]:
            store.mark_bad(0, {key: False})
        assert [list(bad) for bad in store._bad] == [[*others[-2:], keys[4]]]
        # The oldest are tried again.
        assert prefixes(ids).loaded_length == 4 * BLOCK
        answer(model, prefixes, ids)
        assert [list(bad) for bad in store._bad] == [others[-2:]], "it is stored again"


def test_other_weights_find_nothing(store_dir):
    ids = tiny.prompt(100)
    first, other = tiny.model("llama"), tiny.model("llama")
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    with opened(first, store_dir) as prefixes:
        answer(first, prefixes, ids)
    for model, expected in (
        (other, 0),
        (tiny.model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), 0),
        (first, 96),
    ):
        with opened(model, store_dir) as prefixes:
            assert answer(model, prefixes, ids)[1] == expected


def test_a_revision_vouches_for_the_weights(store_dir):
    ids, model = tiny.prompt(100), tiny.model("llama")
    for revision, expected in (("a", 0), ("b", 0), ("a", 96)):
        with opened(model, store_dir, revision=revision) as prefixes:
            assert answer(model, prefixes, ids)[1] == expected


def test_weights_that_change_are_noticed(store_dir):
    model = tiny.model("llama")
    with opened(model, store_dir) as prefixes:
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(ArgumentError, match="other weights"):
            prefixes(tiny.prompt(20))


def test_weights_whose_changes_go_unnoticed_are_refused(store_dir):
    with torch.inference_mode():
        model = tiny.model("llama")
    with pytest.raises(ConfigError, match="^model: found 'weights made under torch.inference_mode"):
        opened(model, store_dir)
    assert not list(store_dir.iterdir())


def test_buffers_that_change_are_noticed(store_dir):
    model = tiny.model("llama")
    with opened(model, store_dir) as prefixes:
        prefixes(tiny.prompt(20))
        model.model.rotary_emb.inv_freq.mul_(2)
        with pytest.raises(ArgumentError, match="other weights"):
            prefixes(tiny.prompt(20))


def test_what_an_adapter_counts_belongs_to_its_identity(store_dir):
    """`scaling` of a layer of peft's: alpha over rank, which no parameter has."""
    ids = tiny.prompt(100)
    found = []
    for alpha in (16.0, 32.0, 16.0):
        model = tiny.model("llama")
        layer = model.model.layers[1].self_attn.q_proj
        layer.active_adapters, layer.disable_adapters, layer.scaling = ["law"], False, {"law": alpha / 8}
        with opened(model, store_dir) as prefixes:
            found.append(answer(model, prefixes, ids)[1])
            layer.scaling["law"] *= 2
            with pytest.raises(ArgumentError, match="or adapters"):
                prefixes(ids)
    assert found == [0, 0, 96]


@torch.no_grad()
def test_what_is_computed_under_another_adapter_is_not_stored(store_dir):
    ids, model = tiny.prompt(100), tiny.model("llama")
    longer = torch.cat([ids, tiny.prompt(13, seed=8)], 1)
    layer = model.model.layers[1].self_attn.q_proj
    layer.active_adapters, layer.disable_adapters, layer.scaling = ["law"], False, {"law": 2.0}
    with opened(model, store_dir) as prefixes:
        past = prefixes(ids)
        layer.scaling["law"] = 4.0
        model(ids[:, :70], past_key_values=past)
        layer.scaling["law"] = 2.0
        model(ids[:, 70:], past_key_values=past)
        assert answer(model, prefixes, ids)[1] == 0, "its first tokens have KV of the other"
        # Token by token, from one that was stored.
        past = prefixes(ids)
        assert past.prefix_length == 96
        layer.scaling["law"] = 4.0
        with pytest.raises(ArgumentError, match="96 loaded tokens.*or adapters"):
            model(ids[:, 96:], past_key_values=past)
        layer.scaling["law"] = 2.0
        past = prefixes(ids)
        for at in range(96, 112):
            layer.scaling["law"] = 2.0 if at < 111 else 4.0
            model(longer[:, at : at + 1], past_key_values=past)
        layer.scaling["law"] = 2.0
        assert answer(model, prefixes, longer)[1] == 96


def test_a_drive_that_is_not_mounted_is_named(store_dir):
    with pytest.raises(StoreError, match="found no folder .*mount the missing drive"):
        opened(tiny.model("llama"), store_dir / "mnt" / "kv")
    assert not (store_dir / "mnt").exists()
    opened(tiny.model("llama"), store_dir / "kv").close()
    assert (store_dir / "kv").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(store_dir, rope):
    model = tiny.model("llama")
    model.config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match="rope_type"):
        opened(model, store_dir)


# What the model is given


@pytest.fixture
def warm(store_dir):
    """A model, its prefixes, and a prompt that is stored."""
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        yield model, prefixes, ids


def stored(prefixes):
    return sum(len(cache) for cache in prefixes.store.caches)


def test_prompts_that_cannot_be_told_are_refused(warm):
    model, prefixes, ids = warm
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    for given, match in (
        ({"attention_mask": mask}, "padding on the left only"),
        ({"attention_mask": torch.ones(1, 1, 100, 100)}, "attention_mask"),
        ({"token_type_ids": torch.zeros_like(ids)}, "token_type_ids"),
    ):
        with pytest.raises(ArgumentError, match=match):
            prefixes(ids, **given)
    with pytest.raises(ArgumentError, match="input_ids"):
        prefixes(ids[0])
    with pytest.raises(ArgumentError, match="max_length: found 99, expected at least the prompt's 100 tokens"):
        prefixes(ids, max_length=99)


def test_tokens_are_those_of_the_call_where_the_callers_memory_has_others(warm):
    model, prefixes, ids = warm
    given, other = tiny.prompt(100, seed=9), tiny.prompt(100, seed=10)
    with torch.no_grad():
        past = prefixes(given)
        given.copy_(other)
        with pytest.raises(ArgumentError, match="other tokens at 0"):
            model(given, past_key_values=past)
        given = ids.clone()
        past = prefixes(given)
        given.copy_(other)
        with pytest.raises(ArgumentError, match="other tokens at 96"):
            model(given[:, 96:], past_key_values=past)


def test_a_forward_over_loaded_tokens_is_refused(warm):
    model, prefixes, ids = warm
    with pytest.raises(ArgumentError, match="past.get_seq_length"):
        model(ids, past_key_values=prefixes(ids))
    other = tiny.prompt(100, seed=9)
    with pytest.raises(ArgumentError, match="other tokens"):
        model(other[:, 96:], past_key_values=prefixes(ids))
    with pytest.raises(ArgumentError, match="inputs_embeds"):
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 96:]), past_key_values=prefixes(ids))
    with pytest.raises(ArgumentError, match="rows"):
        generated(model, {"input_ids": ids}, prefixes(ids), num_beams=2)
    with pytest.raises(ArgumentError, match="position_ids"):
        model(ids[:, 96:], past_key_values=prefixes(ids), position_ids=torch.arange(146, 150)[None])
    with pytest.raises(ArgumentError, match="attention_mask: found one of the caller's own over loaded tokens"):
        model(ids[:, 96:], past_key_values=prefixes(ids), attention_mask=torch.ones(1, 1, 4, 100, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="prompt_lookup_num_tokens"):
        generated(model, {"input_ids": ids}, prefixes(ids), prompt_lookup_num_tokens=3)


def test_what_needs_masks_that_cannot_be_compared_is_computed(warm, monkeypatch):
    _, prefixes, ids = warm
    config = copy.copy(prefixes._config)
    config._attn_implementation_internal = "flex_attention"
    monkeypatch.setattr(prefixes, "_config", config)
    assert [prefixes(ids, max_length=length).prefix_length for length in (None, 256)] == [96, 0]


def test_a_prefill_in_chunks_is_right_or_refused(warm):
    model, prefixes, ids = warm
    expected = generated(model, {"input_ids": ids})
    try:
        found = generated(model, {"input_ids": ids}, prefixes(ids), prefill_chunk_size=32)
    except ArgumentError as error:
        # transformers 5.17 begins its chunks with the first token, whatever the cache has.
        assert "chunk its prefill" in str(error)
    else:
        assert torch.equal(found, expected)


def test_padding_needs_its_mask_and_its_positions(warm):
    model, prefixes, ids = warm
    inputs = tiny.padded(ids, ids[:, :90])
    past = prefixes(**inputs)
    assert past.prefix_length == 90
    rest, mask = inputs["input_ids"][:, 90:], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, 90:]
    with pytest.raises(ArgumentError, match="position_ids"):
        model(rest, attention_mask=mask, past_key_values=past)
    with pytest.raises(ArgumentError, match="attention_mask"):
        model(rest, position_ids=positions, past_key_values=past)
    given = {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        logits = model(rest, past_key_values=past, **given).logits
        whole = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        assert close(logits, model(inputs["input_ids"], **whole).logits[:, 90:])


@pytest.mark.parametrize("how", ["mask", "positions", "training", "embeds", "autocast"])
def test_kv_that_is_not_of_the_tokens_alone_is_not_stored(warm, how):
    model, prefixes, _ = warm
    ids, before = tiny.prompt(64, seed=11), stored(prefixes)
    past, given = prefixes(ids), {"input_ids": ids}
    if how == "mask":
        given["attention_mask"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    elif how == "positions":
        given["position_ids"] = torch.arange(64)[None] * 2
    elif how == "embeds":
        given = {"inputs_embeds": model.get_input_embeddings()(ids)}
    if how == "training":
        model.train()
    with torch.no_grad(), torch.autocast("cpu", enabled=how == "autocast"):
        model(**given, past_key_values=past)
    assert stored(prefixes) == before


def test_beams_store_what_they_shared(warm):
    model, prefixes, _ = warm
    ids, before = tiny.prompt(64, seed=12), stored(prefixes)
    expected = generated(model, {"input_ids": ids}, num_beams=2, max_new_tokens=40)
    rows = ids.repeat_interleave(2, 0)
    for _ in range(2):
        assert torch.equal(
            generated(model, {"input_ids": ids}, prefixes(rows), num_beams=2, max_new_tokens=40), expected
        )
    assert stored(prefixes) == before + 4


def test_a_closed_one_leaves_the_model_as_it_was(warm):
    model, prefixes, ids = warm
    prefixes.close()
    prefixes.close()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_an_interrupted_store_is_over_before_its_memory_is_used_again(store_dir, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        store, begun, ended = prefixes.store, threading.Event(), threading.Event()
        submit = store._calls.submit

        def submitted(call, *given, **more):
            def slow():
                begun.set()
                time.sleep(0.2)
                result = call(*given, **more)
                ended.set()
                return result

            future = submit(slow)
            if call.__name__ == "store":
                monkeypatch.setattr(future, "result", interrupted)
            return future

        def interrupted():
            assert begun.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(store._calls, "submit", submitted)
        with pytest.raises(KeyboardInterrupt):
            answer(model, prefixes, ids)
        assert ended.is_set(), "it still reads the staging memory"
