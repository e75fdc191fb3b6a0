"""A prefix that arrives layer by layer, while the model computes with it: the answers are those of a whole one.

Blocks of all layers, and of some of them: of a model of full size a group of layers is divided.
"""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import tiny  # noqa: E402
import torch  # noqa: E402
from tiny_prefixes import BLOCK, answer, blocks, computed, generated, opened  # noqa: E402

from kvhoist import ArgumentError, CopyError  # noqa: E402
from kvhoist.transformers.layers import Arriving  # noqa: E402
from kvhoist.transformers.shapes import Group, LayerShape  # noqa: E402

DEVICES = pytest.mark.parametrize("device", [{}, {"device": "simulated", "device_blocks": 1}], ids=["host", "simulated"])


@pytest.fixture(params=[1, 4], ids=["whole", "divided"])
def parts(request, monkeypatch):
    """How many parts the groups of a tiny model have, at most."""
    if request.param > 1:
        monkeypatch.setattr("kvhoist.transformers.shapes.PART_BYTES", 1 << 12)
    return request.param


def arriving(past):
    """Whether layers are under way."""
    return past.record._buffers is not None


@DEVICES
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_answers_are_bitwise_those_of_a_whole_prefix(store_dir, kind, device):
    model, ids = tiny.model(kind), tiny.prompt(150)
    with opened(model, store_dir, **device) as prefixes:
        answer(model, prefixes, ids[:, :144])
        past = prefixes(ids, layerwise=True)
        assert arriving(past) and past.prefix_length == past.get_seq_length() == 144
        assert all(load._held is not None for load, *_ in past.record._buffers._arriving)
        assert torch.equal(model(ids[:, 144:], past_key_values=past).logits, computed(model, ids, 144))
        assert not arriving(past)
        # What it computed then is stored as ever.
        assert prefixes(ids[:, :145]).prefix_length == 144


@DEVICES
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_padded_batch_generates_the_same(store_dir, kind, device):
    model = tiny.model(kind)
    common = tiny.prompt(100)
    inputs = tiny.padded(*(torch.cat([common[:, :n], tiny.prompt(30, seed=n)], 1) for n in (100, 70, 90)))
    expected = generated(model, inputs)
    with opened(model, store_dir, **device) as prefixes:
        generated(model, inputs, prefixes(**inputs))
        past = prefixes(**inputs, layerwise=True)
        assert arriving(past) and past.prefix_length > 80
        assert torch.equal(generated(model, inputs, past), expected)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_layers_come_from_the_drives_after_a_restart(store_dir, kind, parts):
    model, ids = tiny.model(kind), tiny.prompt(150)
    device = {} if parts == 1 else {"device": "simulated", "device_blocks": 1}
    with opened(model, store_dir, **device) as prefixes:
        answer(model, prefixes, ids[:, :144])
        names = [group.name for group in prefixes.store.groups]
        assert parts == 1 or max(map(names.count, names)) > 1
        assert len(prefixes.store.caches) == len(set(names))
    for layerwise in (False, True):
        with opened(model, store_dir, **device) as prefixes:
            past = prefixes(ids, layerwise=layerwise)
            assert past.prefix_length == 144 and arriving(past) == layerwise
            assert torch.equal(model(ids[:, 144:], past_key_values=past).logits, computed(model, ids, 144))


def test_a_prefix_larger_than_host_memory_leaves_room_for_what_is_read(store_dir, parts):
    model, ids = tiny.model("llama"), tiny.prompt(390)
    # Of 24 blocks host memory has the last ones.
    with opened(model, store_dir, host_bytes="160KiB") as prefixes:
        answer(model, prefixes, ids[:, :384])
        for _ in range(3):
            past = prefixes(ids, layerwise=True)
            assert past.prefix_length == 384 and arriving(past)
            assert torch.equal(model(ids[:, 384:], past_key_values=past).logits, computed(model, ids, 384))


def damage_last_page(store_dir):
    """Of payload in the file: it belongs to a block of the prefix."""
    (path,) = blocks(store_dir)
    data = path.read_bytes()
    last = max(at for at in range(0, len(data) - 4096, 4096) if any(data[at : at + 4096]))
    path.write_bytes(data[: last + 5] + bytes([data[last + 5] ^ 1]) + data[last + 6 :])


def test_a_block_that_is_damaged_on_the_drive_raises_once_and_is_computed_again(store_dir, parts):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
    damage_last_page(store_dir)
    with opened(model, store_dir) as prefixes:
        past = prefixes(ids, layerwise=True)
        assert past.prefix_length == 96
        with pytest.raises(CopyError, match="blocks of a prefix that could not be loaded: .*; make another cache"):
            model(ids[:, 96:], past_key_values=past)
        past = prefixes(ids, layerwise=True)
        assert past.prefix_length < 96
        logits = model(ids[:, past.prefix_length :], past_key_values=past).logits
        assert torch.allclose(logits[:, -4:], computed(model, ids, 96), atol=1e-5)
        assert prefixes(ids).prefix_length == 96


@pytest.mark.parametrize("how", ["decoder", "positional", "stream", "update"])
def test_a_block_that_did_not_arrive_is_reported_however_the_layers_are_called(store_dir, how, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
    damage_last_page(store_dir)
    if how == "stream":
        # Nobody knows before the end.
        monkeypatch.setattr(Arriving, "_wait", lambda self, at: None)
    with opened(model, store_dir) as prefixes:
        past = prefixes(ids, layerwise=True)
        assert past.prefix_length == 96 and arriving(past)
        with pytest.raises(CopyError, match="could not be loaded"):
            if how == "positional":
                model(ids[:, 96:], None, None, past)
            elif how == "update":
                for layer in range(4):
                    past.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), layer)
            else:
                model.model(ids[:, 96:], past_key_values=past)
        assert prefixes(ids).prefix_length < 96, "it is a miss"


def test_a_row_whose_padding_reaches_beyond_what_is_loaded(store_dir):
    model = tiny.model("llama")
    inputs = tiny.padded(tiny.prompt(130), tiny.prompt(60, seed=1), tiny.prompt(20, seed=2))
    expected = generated(model, inputs)
    with opened(model, store_dir) as prefixes:
        # The second row has nothing, so the third one needs nothing.
        answer(model, prefixes, inputs["input_ids"][:1])
        answer(model, prefixes, inputs["input_ids"][2:, -20:])
        past = prefixes(**inputs, layerwise=True)
        assert past.prefix_length == 70 and arriving(past)
        assert torch.equal(generated(model, inputs, past), expected)


@pytest.mark.parametrize("kind, more", [("qwen-next", {}), ("llama", {"max_length": 128})], ids=["hybrid", "static"])
def test_states_and_static_caches_are_loaded_whole(store_dir, kind, more):
    model, ids = tiny.model(kind), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        past = prefixes(ids, layerwise=True, **more)
        assert past.loaded_length == 96 and not arriving(past)


def test_a_cache_that_no_model_takes_gives_everything_back(store_dir):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    # Its blocks take nearly all of host memory: held ones would leave no room.
    with opened(model, store_dir, host_bytes="112KiB") as prefixes:
        for _ in range(10):
            answer(model, prefixes, ids)
            past = prefixes(ids, layerwise=True)
            assert arriving(past)
            del past
            gc.collect()
        other = tiny.prompt(100, seed=3)
        answer(model, prefixes, other)
        assert prefixes(other).prefix_length == 96


@pytest.mark.parametrize("change", [lambda past: past.crop(-46), lambda past: past.batch_repeat_interleave(2)])
def test_layers_that_are_changed_arrive_before(store_dir, change):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        whole, layered = prefixes(ids), prefixes(ids, layerwise=True)
        assert arriving(layered)
        for past in (whole, layered):
            change(past)
        for one, other in zip(whole.layers, layered.layers):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_a_forward_over_blocks_that_did_not_arrive_raises_and_stores_nothing(store_dir, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids[:, :64])
        end = Arriving.end
        monkeypatch.setattr(Arriving, "end", lambda self: {**end(self), 3: CopyError("device: it fell off the bus")})
        past = prefixes(ids, layerwise=True)
        with pytest.raises(CopyError, match="found 1 blocks of a prefix that could not be loaded: device: it fell off"):
            model(ids[:, past.prefix_length :], past_key_values=past)
        monkeypatch.undo()
        # Its layers have not what was to arrive.
        for again in (
            lambda: model(ids[:, past.prefix_length :], past_key_values=past),
            lambda: model.model(ids[:, past.prefix_length :], past_key_values=past),
            lambda: past.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0),
            lambda: past.crop(-1),
        ):
            with pytest.raises(CopyError, match="found 1 blocks of a prefix .*; make another cache"):
                again()
        # The fourth block is a miss now.
        assert prefixes(ids).prefix_length == 3 * BLOCK


def interrupted(monkeypatch, name, at):
    """The call of a method of `Arriving` that a KeyboardInterrupt ends."""
    method, calls = getattr(Arriving, name), iter(range(at + 1))

    def call(self, *args):
        if next(calls, None) == at:
            raise KeyboardInterrupt
        return method(self, *args)

    monkeypatch.setattr(Arriving, name, call)


@pytest.mark.parametrize("of", ["model", "decoder"])
@pytest.mark.parametrize("layer", [0, 2])
def test_after_a_forward_that_was_interrupted_in_a_wait_for_a_layer_its_cache_is_refused(
    store_dir, layer, of, monkeypatch
):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    forward = model if of == "model" else model.model
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids[:, :64])
        past = prefixes(ids, layerwise=True)
        assert arriving(past) and past.prefix_length == 64
        interrupted(monkeypatch, "layer", layer)
        with pytest.raises(KeyboardInterrupt):
            forward(ids[:, 64:], past_key_values=past)
        # No layer has more tokens where it was the first.
        assert (past.get_seq_length() == 64) == (layer == 0)
        for again in (model, model.model):
            with pytest.raises(ArgumentError, match="found a cache whose last forward did not end, .*another cache"):
                again(ids[:, 64:], past_key_values=past)
        assert prefixes(ids).prefix_length == 64, "it stored nothing"
        past = prefixes(ids, layerwise=True)
        assert torch.equal(model(ids[:, 64:], past_key_values=past).logits, computed(model, ids, 64))


def test_a_layer_whose_wait_was_interrupted_arrives_later(store_dir, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        whole, layered = prefixes(ids), prefixes(ids, layerwise=True)
        interrupted(monkeypatch, "layer", 0)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 96:], past_key_values=layered)
        for past in (whole, layered):
            past.crop(-46)
        for one, other in zip(whole.layers, layered.layers):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_after_an_interrupt_in_the_wait_for_all_layers_its_cache_is_refused(store_dir, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        past = prefixes(ids, layerwise=True)
        interrupted(monkeypatch, "end", 0)
        with pytest.raises(KeyboardInterrupt):
            past.crop(-1)
        for again in (lambda: past.crop(-1), lambda: model(ids[:, 96:], past_key_values=past)):
            with pytest.raises(CopyError, match="found a prefix whose load did not end; make another cache"):
                again()


def test_a_compiled_model_is_refused(store_dir, monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(100)
    with opened(model, store_dir) as prefixes:
        answer(model, prefixes, ids)
        past = prefixes(ids, layerwise=True)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(Exception, match="layerwise: found a compiled model"):
            past.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)


def begun(device, tokens: int = 64) -> Arriving:
    """A load of two layers by a cache that has copied all when it is asked."""
    load = SimpleNamespace(wait=lambda *_given: None, layer=lambda at: (2, None), blocks=lambda: [True] * 2)
    cache = SimpleNamespace(load_layers=lambda *_given: load)
    region = SimpleNamespace(unregister=lambda: None)
    group = Group(tuple(LayerShape(n, 2, 128, 128, torch.uint8) for n in range(2)), None)
    held = SimpleNamespace(release=lambda: None)
    return Arriving(cache, lambda *_given: region, group, [bytes(32)] * 2, tokens, device, held)


def test_memory_of_layers_is_told_which_stream_reads_it(monkeypatch):
    """A double of the memory on a device, which nothing else tells."""
    arriving, told, streams = begun(torch.device("cpu")), [], iter("AABB")

    class Memory:
        record_stream = told.append

        def __init__(self, memory) -> None:
            self._memory = memory

        def __getitem__(self, at):
            return self._memory[at]

    arriving._device, arriving._memory = torch.device("cuda", 3), Memory(arriving._memory)
    stream = {name: SimpleNamespace(name=name, cuda_stream=n) for n, name in enumerate("AB")}
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or stream[next(streams)])
    for layer in range(2):
        arriving.layer(layer)
    assert [one.name for one in told] == ["A", "B"]
    assert set(asked) == {arriving._device}
    arriving.end()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_that_another_stream_still_reads_is_not_given_to_the_next_load():
    device, reader, cache = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream(), torch.cuda.Stream()

    def arrived(value: int) -> Arriving:
        arriving = begun(device, 1 << 16)
        with torch.cuda.stream(cache):
            arriving._memory.fill_(value)
        cache.synchronize()
        return arriving

    first = arrived(1)
    with torch.cuda.stream(reader):
        # The first copy loads its kernel, which waits for the device.
        for cycles in (1, 1_000_000_000):
            reader.synchronize()
            torch.cuda._sleep(cycles)
            got = first.layer(0)[0].clone()
    first.end()
    del first
    assert not reader.query(), "the device was not busy for long enough"
    second = arrived(2)
    torch.cuda.synchronize()
    assert (got == 1).all()
    assert second.end() == {}
