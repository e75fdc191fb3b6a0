"""Models with recurrent layers: their states are kept where blocks end, and what follows is what it is without kvhoist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import tiny  # noqa: E402
import torch  # noqa: E402
from nodes import await_unlocked  # noqa: E402
from tiny_prefixes import answer, blocks, computed, generated, opened  # noqa: E402
from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402

from kvhoist import ArgumentError, ConfigError, UnavailableError  # noqa: E402

each = pytest.mark.parametrize("kind", tiny.HYBRIDS)


def close(one, other):
    """Equal but for the order of sums: without their states these models' logits move by one and more."""
    return torch.allclose(one, other, atol=1e-3)


def loaded(prefixes, ids, **more):
    """How many tokens are loaded, and how many are there."""
    past = prefixes(ids, **more)
    return past.loaded_length, past.prefix_length


@torch.no_grad()
def in_parts(model, ids, cuts, max_length):
    """The logits of the last part, without kvhoist: each part is a forward of its own."""
    past = (
        DynamicCache(config=model.config) if max_length is None else StaticCache(model.config, max_cache_len=max_length)
    )
    for start, end in zip((0, *cuts), (*cuts, ids.shape[1])):
        logits = model(ids[:, start:end], past_key_values=past).logits
    return logits


@each
@pytest.mark.parametrize("max_length", [None, 256], ids=["dynamic", "static"])
def test_logits_are_bitwise_those_of_the_same_computation(store_dir, kind, max_length):
    model, ids = tiny.model(kind), tiny.prompt(150)
    expected = computed(model, ids, 144, max_length)
    with opened(model, store_dir) as prefixes:
        logits, there = answer(model, prefixes, ids, max_length)
        assert there == 144 and torch.equal(logits, expected)
    # Another process would have the model anew.
    model = tiny.model(kind)
    with opened(model, store_dir) as prefixes:
        past = prefixes(ids, max_length=max_length)
        assert past.loaded_length == past.prefix_length == 144
        assert torch.equal(model(ids[:, 144:], past_key_values=past).logits, expected)
        assert close(expected, computed(model, ids)[:, 144:])
        # It leaves the stored prompt in its fourth block, before the only states.
        assert loaded(prefixes, torch.cat([ids[:, :60], tiny.prompt(40, seed=8)], 1)) == (0, 96)
        # The states after its last token have seen that token, which is to be computed.
        assert loaded(prefixes, ids[:, :144]) == (0, 128)
        # It goes on from there.
        longer = torch.cat([ids, tiny.prompt(40, seed=9)], 1)
        past = prefixes(longer, max_length=max_length)
        assert (past.loaded_length, past.prefix_length) == (144, 176)
        logits = model(longer[:, 176:], past_key_values=past).logits
        # The same forwards without kvhoist: sums in another order differ by more than a tolerance should allow.
        assert torch.equal(logits, in_parts(model, longer, (144, 176), max_length))


@each
def test_a_conversation_goes_on_from_its_last_turn(store_dir, kind):
    model = tiny.model(kind)
    with opened(model, store_dir) as prefixes:
        said = tiny.prompt(40)
        past = prefixes(said)
        said = generated(model, {"input_ids": said}, past, max_new_tokens=60)
    with opened(tiny.model(kind), store_dir) as prefixes:
        again = torch.cat([said, tiny.prompt(10, seed=5)], 1)
        past = prefixes(again)
        assert (past.loaded_length, past.prefix_length) == (96, 96)
        assert close(prefixes.model(again[:, 96:], past_key_values=past).logits, computed(model, again)[:, 96:])
        # The states of blocks between the prompt's last and the answer's last are gone: each step replaces those before.
        assert loaded(prefixes, said[:, :90])[0] == 32
        assert loaded(prefixes, said[:, :40])[0] == 32


@each
def test_a_prompt_that_ends_with_a_block_has_its_states_under_their_own_keys(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(144)
    longer = torch.cat([ids, tiny.prompt(40, seed=9)], 1)
    with opened(model, store_dir) as prefixes:
        # The call computes 128 tokens, and the forward those to the prompt's end.
        assert answer(model, prefixes, ids)[1] == 128
        assert loaded(prefixes, ids) == (128, 128)
        past = prefixes(longer)
        assert (past.loaded_length, past.prefix_length) == (144, 176)
        logits = model(longer[:, 176:], past_key_values=past).logits
        assert torch.equal(logits, in_parts(model, longer, (128, 144, 176), None))


@each
def test_a_part_of_a_prompt_has_its_states_under_its_own_key(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(60)
    with opened(model, store_dir) as prefixes:
        model.train()
        past = prefixes(ids)
        assert past.prefix_length == 0, "nothing is computed in training"
        model.eval()
        model(ids[:, :32], past_key_values=past)
        row = past.record.known.rows[0]
        states = prefixes.store.caches[-1]
        assert list(states.contains_each(row.keys)) == [False, True, False]


@each
def test_generate_answers_the_same(store_dir, kind):
    model = tiny.model(kind)
    inputs = {"input_ids": tiny.prompt(100, rows=2), "attention_mask": torch.ones(2, 100, dtype=torch.long)}
    expected = generated(model, inputs)
    with opened(model, store_dir) as prefixes:
        for found in (0, 96):
            past = prefixes(**inputs)
            assert past.loaded_length == found and torch.equal(generated(model, inputs, past), expected)


@each
def test_rows_that_were_stored_apart_are_a_batch(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(100, rows=2)
    with opened(model, store_dir) as prefixes:
        for row in ids:
            prefixes(row[None])
        past = prefixes(ids)
        assert past.loaded_length == 96
        assert close(model(ids[:, 96:], past_key_values=past).logits, computed(model, ids)[:, 96:])


@each
def test_states_without_their_kv_and_kv_without_its_states_are_no_prefix(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        for cache in prefixes.store.caches:
            row = prefixes(ids).record.known.rows[0]
            assert loaded(prefixes, ids)[0] == 96
            cache.remove(row.keys[5])
            past = prefixes(ids)
            assert (past.loaded_length, past.prefix_length) == (0, 96)
            assert close(model(ids[:, 96:], past_key_values=past).logits, computed(model, ids)[:, 96:])


@each
@pytest.mark.parametrize("of", ["model", "decoder"])
def test_after_a_forward_that_failed_before_attention_its_cache_is_refused(store_dir, kind, of):
    model, ids = tiny.model(kind), tiny.prompt(100)
    forward = model if of == "model" else model.model

    def fail(*_args, **_more):
        raise torch.OutOfMemoryError("found no memory")

    with opened(model, store_dir) as prefixes:
        prefixes(ids)
        past = prefixes(ids)
        past.update = fail
        with pytest.raises(torch.OutOfMemoryError):
            forward(ids[:, 96:], past_key_values=past)
        del past.update
        # Its states may have seen these tokens.
        assert past.get_seq_length() == 96
        for again in (model, model.model):
            with pytest.raises(ArgumentError, match="found a cache whose last forward did not end, .*another cache"):
                again(ids[:, 96:], past_key_values=past)
        past = prefixes(ids)
        assert torch.equal(model(ids[:, 96:], past_key_values=past).logits, computed(model, ids, 96))


@each
def test_a_batch_with_padding_is_computed(store_dir, kind):
    model = tiny.model(kind)
    inputs = tiny.padded(tiny.prompt(100), tiny.prompt(70, seed=3))
    expected = generated(model, inputs)
    with opened(model, store_dir) as prefixes:
        for _ in range(2):
            past = prefixes(**inputs)
            assert past.prefix_length == 0 and torch.equal(generated(model, inputs, past), expected)
        assert not any(cache.stats()["tiers"]["host"]["resident"] for cache in prefixes.store.caches)


@pytest.mark.parametrize("kind", tiny.FORGETFUL)
def test_a_model_that_does_not_go_on_from_its_states_is_refused(store_dir, kind):
    model = tiny.model(kind)
    name = type(model).__name__
    with pytest.raises(ConfigError, match=f"model: found '{name}', expected one that answers the same when a prompt"):
        opened(model, store_dir)
    assert not list(store_dir.iterdir())


def test_the_store_has_room_for_states_beside_blocks(store_dir):
    with opened(tiny.model("granite"), store_dir) as prefixes:
        kv, states = (cache.stats()["tiers"]["disk"]["slots"] for cache in prefixes.store.caches)
        assert 16 <= kv / states <= 64


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import tiny, tiny_prefixes as t
prefixes = t.opened(tiny.model("qwen-next"), sys.argv[2], write_policy="write_through")
prefixes(tiny.prompt(150))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_the_states_are_there_and_right(store_dir):
    here = str(Path(tiny.__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, here, str(store_dir)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    await_unlocked(store_dir)
    model, ids = tiny.model("qwen-next"), tiny.prompt(150)
    with opened(model, store_dir) as prefixes:
        past = prefixes(ids)
        assert past.loaded_length == 144
        assert torch.equal(model(ids[:, 144:], past_key_values=past).logits, computed(model, ids, 144))


@each
def test_a_byte_flipped_in_each_block_in_turn(store_dir, kind):
    model, ids = tiny.model(kind), tiny.prompt(60)
    expected = computed(model, ids, 48)
    with opened(model, store_dir, write_policy="write_through") as prefixes:
        prefixes(ids)
    clean = {path: path.read_bytes() for path in blocks(store_dir)}
    assert len(clean) == 2, "one file of KV, one of states"
    for path, data in clean.items():
        # Behind the records, which have the first MiB.
        filled = [at for at in range(1 << 20, len(data) - 4096, 4096) if any(data[at : at + 4096])]
        for at in (filled[0], filled[-1]):
            for other, whole in clean.items():
                other.write_bytes(whole)
            path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
            with opened(model, store_dir) as prefixes:
                for found in (0, 48):
                    past = prefixes(ids)
                    assert (past.loaded_length, past.prefix_length) == (found, 48)
                    assert close(model(ids[:, 48:], past_key_values=past).logits, expected)


def test_a_store_that_fails_to_close_leaves_none_open(store_dir):
    model, ids = tiny.model(tiny.HYBRIDS[0]), tiny.prompt(60)
    prefixes = opened(model, store_dir)
    prefixes(ids)
    caches = prefixes.store.caches
    assert len(caches) == len(blocks(store_dir)) == 2
    for path in blocks(store_dir):
        path.unlink()
    with pytest.raises(UnavailableError, match="deleted") as raised:
        prefixes.close()
    assert [cache.closed for cache in caches] == [True, True]
    with pytest.raises(UnavailableError) as first:
        caches[0].close()
    assert str(raised.value) == str(first.value), "the first error"
