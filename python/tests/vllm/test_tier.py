"""The vLLM tier under vLLM's own manager, memory and factory: bytes, restarts, limits, failures."""

from __future__ import annotations

import importlib
import json
import logging
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

vtier.boot()

from vtier import Engine, files, key_of, keys_of, stored, tier_config  # noqa: E402

import kvhoist.vllm.tier  # noqa: E402
from kvhoist import ConfigError, StoreError, _figures  # noqa: E402

CELL = 4096


def test_chunks_come_back_over_restarts(store_dir):
    prompts = {}
    with Engine([tier_config(store_dir)]) as engine:
        for prompt in range(3):
            prompts[prompt] = stored(engine, prompt, 12)
    for _ in range(2):
        with Engine([tier_config(store_dir)]) as engine:
            for keys in prompts.values():
                context = engine.request(keys)
                assert engine.resolve(context, keys) == "H" * 12
                engine.check(context, keys)
                engine.finish(context)
                engine.forget()


def finished(engine, keys, **more):
    """A request for chunks that are there, which ends."""
    context = engine.request(keys, **more)
    if vtier.version() < (0, 33):
        engine.tier.touch(keys, context)
    engine.finish(context)


def hints(action, **payload):
    protocol = importlib.import_module("vllm.v1.kv_hints.protocol")
    return protocol.KvHintsEnvelope("1", "m", [protocol.KvHintAction("a", action, "1", payload)])


def test_a_request_says_that_its_chain_is_over_or_is_to_be_kept(store_dir, caplog):
    with Engine([tier_config(store_dir)]) as engine:
        chains = {name: stored(engine, name, 6) for name in ("silent", "over", "kept", "wrong")}
        finished(engine, chains["silent"])
        finished(engine, chains["over"], kv_transfer_params={"kvhoist": {"release": True}, "other": 1})
        finished(engine, chains["kept"], kv_transfer_params={"kvhoist": {"keep_seconds": 3600}})
        stats = engine.tier.store.cache.stats()
        assert (stats["released"], stats["tiers"]["disk"]["kept"]) == (6, 6)
        finished(engine, chains["wrong"], kv_transfer_params={"kvhoist": {"release": "soon"}})
        assert engine.tier.counters["hint"] == 1 and "expected release: true or false" in caplog.text
        assert engine.tier.store.cache.stats()["released"] == 6


@pytest.mark.skipif(vtier.version() < (0, 33), reason="vLLM has no hints before 0.33")
def test_an_orchestrators_hints_are_taken(store_dir):
    with Engine([tier_config(store_dir)]) as engine:
        chains = {name: stored(engine, name, 6) for name in ("over", "kept", "others")}
        finished(engine, chains["over"], kv_hints=hints("kvhoist.release"))
        finished(engine, chains["kept"], kv_hints=hints("kvhoist.keep", seconds=60))
        finished(engine, chains["others"], kv_hints=hints("somebody.else", seconds=60))
        stats = engine.tier.store.cache.stats()
        assert (stats["released"], stats["tiers"]["disk"]["kept"]) == (6, 6)


@pytest.mark.parametrize("cell_bytes", [1000, 4096, 70_272])
def test_rows_of_any_size_come_back(store_dir, cell_bytes):
    with Engine([tier_config(store_dir, host_bytes="8MiB")], cell_bytes=cell_bytes) as engine:
        keys = stored(engine, "a", 9)
        context = engine.request(keys)
        assert engine.resolve(context, keys) == "H" * 9
        engine.check(context, keys)


def test_every_group_of_the_kv_cache_comes_back(store_dir):
    with Engine([tier_config(store_dir)], groups=3) as engine:
        groups = [keys_of("a", 4, group) for group in range(3)]
        context = engine.request(*groups)
        for n in range(4):
            engine.put(context, [keys[n] for keys in groups])
            engine.settle()
        engine.forget()
        for keys in groups:
            assert engine.resolve(context, keys) == "HHHH"
            engine.check(context, keys)


def test_a_lookup_is_answered_at_once(store_dir):
    with Engine([tier_config(store_dir)]) as engine:
        keys = stored(engine, "a", 6)
        context = engine.request(keys)
        # Never a step lost on RETRY: a hit takes its row in the step that asks.
        assert engine.lookup(context, [*keys, key_of("b")]) == "PPPPPPM"
        engine.step()
        engine.wait()
        assert engine.resolve(context, keys) == "HHHHHH"


def test_a_key_is_to_be_retried_while_its_load_is_under_way(store_dir):
    with Engine([tier_config(store_dir)]) as engine:
        (key, *_) = stored(engine, "a", 1)
        context, results = engine.request([key]), engine.modules.base.LookupResult
        assert engine.tier.lookup(key, context) is results.HIT
        engine.lookup(context, [key])
        engine.step()
        assert engine.tier.lookup(key, context) is results.RETRY
        engine.settle()
        assert engine.tier.lookup(key, context) is results.HIT


def test_the_disk_holds_its_capacity_and_no_more(store_dir):
    with Engine([tier_config(store_dir, capacity="2MiB")]) as engine:
        slots = engine.tier.store.cache.stats()["tiers"]["disk"]["slots"]
        (path,) = files(store_dir)
        prompts = [stored(engine, prompt, 12) for prompt in range(10 * slots // 12)]
        assert path.stat().st_size <= 2 << 20
        assert path.stat().st_blocks * 512 <= 2 << 20
        assert engine.tier.store.cache.stats()["tiers"]["disk"]["resident"] <= slots
        survivors = 0
        for keys in prompts:
            context = engine.request(keys)
            found = engine.resolve(context, keys)
            hits = found.count("H")
            # Given as a set, evicted by what it is: a chain loses its end and never its middle.
            assert found == "H" * hits + "M" * (len(keys) - hits)
            engine.check(context, keys[:hits])
            survivors += hits
            engine.forget()
        assert slots // 2 < survivors <= slots
        engine.tier.store.cache.validate()


def test_what_requests_use_outlives_what_they_do_not(store_dir):
    with Engine([tier_config(store_dir, capacity="2MiB")]) as engine:
        slots = engine.tier.store.cache.stats()["tiers"]["disk"]["slots"]
        hot = stored(engine, "hot", 8)
        for prompt in range(4 * slots // 8):
            context = engine.request(hot)
            if vtier.version() < (0, 33):
                engine.manager.touch(hot, context)
            # The chunks themselves come from vLLM's memory, as far as this tier can tell.
            engine.finish(context)
            stored(engine, prompt, 8)
        context = engine.request(hot)
        assert engine.resolve(context, hot) == "H" * 8


def test_keys_in_any_order_are_stored_as_one_chain(store_dir, seed):
    """vLLM hands keys over as a set; their positions give the chain."""
    shuffled = random.Random(seed)
    with Engine([tier_config(store_dir, capacity="2MiB")], rows=64) as engine:
        slots = engine.tier.store.cache.stats()["tiers"]["disk"]["slots"]
        keys = keys_of("a", 16)
        context = engine.request(keys)
        # Rows in another order than the chain's.
        assert engine.prepare(context, shuffled.sample(keys, 16), touch=keys)
        for part in (keys[:6], keys[6:10], keys[10:]):
            shuffled.shuffle(part)
            # A dict keeps the order that a set would have had by chance.
            engine.manager.primary_tier.complete_store(part, context, True)
            job = engine.manager.create_store_job(dict.fromkeys(part), context, 0)
            engine.tier.submit_store(job)
            engine.settle()
        engine.forget()
        assert engine.resolve(context, keys) == "H" * 16
        engine.check(context, keys)
        engine.forget()
        seen = []
        for other in range(4 * slots):
            there = [engine.tier.store.contains(key) for key in keys]
            assert there == sorted(there, reverse=True), "a chain lost its middle"
            there = sum(there)
            seen.append(there)
            stored(engine, f"other {other}", 1)
        assert seen == sorted(seen, reverse=True) and set(seen) == set(range(17))


def test_chunks_whose_last_token_is_not_computed_are_refused(store_dir, monkeypatch):
    """0.28 offloads the last sampled token of an answer."""
    from types import SimpleNamespace

    from kvhoist import ConfigError
    from kvhoist.vllm import tier

    with Engine([tier_config(store_dir)], rows=16, cell_bytes=4096) as engine:
        view, spec = engine.tier.store.region, SimpleNamespace(offload_prompt_only=False)
        monkeypatch.setattr(tier, "_HOLDS_PROMOTIONS", False)
        monkeypatch.setattr(tier.SecondaryTierManager, "__init__", lambda *_given, **_more: None)
        with pytest.raises(ConfigError, match="^offload_prompt_only: found False, expected true"):
            tier.KvhoistTier(spec, view, "KvhoistTier", path=str(store_dir), capacity="1GiB")


def test_a_reset_waits_for_what_is_under_way(store_dir):
    import torch

    with Engine([tier_config(store_dir)], rows=48, cell_bytes=64 << 10) as engine:
        keys = stored(engine, "a", 16)
        for round_ in range(4):
            reader, writer = engine.request(keys), engine.request(keys_of(f"b{round_}", 16))
            assert engine.lookup(reader, keys) == "P" * 16
            engine.step()
            assert engine.put(writer, keys_of(f"b{round_}", 16)) is not None
            engine.manager.reset_cache()
            # From here on the memory is vLLM's alone.
            assert not engine.tier.store.jobs.under_way
            for view in engine.views:
                view.fill_(round_)
            assert engine.lookup(reader, keys) == "M" * 16, "vLLM may still write chunks of before it"
            engine.flush()
            engine.tier.store.cache.sync()
            for view in engine.views:
                assert torch.all(view == round_), "a transfer wrote after the reset"
            assert engine.resolve(reader, keys) == "H" * 16
            engine.check(reader, keys)
            engine.finish(reader)
            engine.finish(writer)
            engine.forget()


def test_what_a_running_request_offers_again_after_a_reset_is_not_stored(store_dir):
    """Blocks that a sliding window has left to others are among it."""
    keys = keys_of("a", 4)
    with Engine([tier_config(store_dir)]) as engine:
        context = engine.request(keys)
        engine.step(new=[context.req_id])
        engine.put(context, keys[:2])
        engine.settle()
        engine.forget()
        assert engine.put(context, keys)
        engine.settle()
        # In a later step it loses its blocks to others; what it had offered may be in vLLM's memory.
        engine.step(preempted=[context.req_id])
        assert engine.put(context, keys) == []
        engine.settle()
        engine.finish(context)
        assert not engine.tier.counters
    with Engine([tier_config(store_dir)]) as engine:
        assert engine.resolve(engine.request(keys), keys) == "HHMM"


def test_requests_that_have_nothing_from_before_a_reset_are_stored(store_dir):
    waiting, preempted = keys_of("waiting", 4), keys_of("preempted", 4)
    with Engine([tier_config(store_dir)]) as engine:
        contexts = engine.request(waiting), engine.request(preempted)
        engine.step(new=[contexts[1].req_id])
        engine.manager.reset_cache()
        engine.step(new=[contexts[0].req_id], preempted=[contexts[1].req_id])
        engine.flush()
        for context, keys in zip(contexts, (waiting, preempted)):
            assert engine.put(context, keys) == keys
            engine.settle()
            engine.finish(context)
    with Engine([tier_config(store_dir)]) as engine:
        for keys in (waiting, preempted):
            assert engine.resolve(engine.request(keys), keys) == "HHHH"


def test_a_shutdown_lets_go_of_the_memory(store_dir):
    engine = Engine([tier_config(store_dir)], rows=48, cell_bytes=64 << 10)
    keys = stored(engine, "a", 16)
    context = engine.request(keys)
    engine.lookup(context, keys)
    engine.step()
    engine.put(engine.request(keys_of("b", 16)), keys_of("b", 16))
    region = engine.spec._scheduler_mmap
    path = Path(region.mmap_path)
    engine.manager.shutdown()
    assert region.mmap_obj is None, "something still exports vLLM's memory"
    assert not path.exists()
    # Afterwards nothing raises, and nothing is there.
    assert engine.tier.lookup(keys[0], context) is engine.modules.base.LookupResult.MISS
    engine.tier.store.drain()
    assert all(job.success for job in engine.tier.get_finished_jobs())
    assert list(engine.tier.get_finished_jobs()) == []
    engine.tier.shutdown()
    engine.views.clear()
    for region in engine.regions:
        region.cleanup()
    with Engine([tier_config(store_dir)], rows=48, cell_bytes=64 << 10) as engine:
        keys = [*keys, *keys_of("b", 16)]
        context = engine.request(keys)
        assert engine.resolve(context, keys) == "H" * 32
        engine.check(context, keys)


@pytest.mark.parametrize(
    "other", [{"model": "meta/other"}, {"workers": 1}, {"cell_bytes": 8192}, {"groups": 2}, {"replica": 1}]
)
def test_what_differs_in_anything_never_meets(store_dir, other):
    with Engine([tier_config(store_dir)]) as engine:
        keys = stored(engine, "a", 4)
        with Engine([tier_config(store_dir)], **other) as apart:
            context = apart.request(keys)
            assert apart.resolve(context, keys) == "MMMM"
            apart.put(context, keys)
            apart.settle()
        context = engine.request(keys)
        assert engine.resolve(context, keys) == "HHHH"
        engine.check(context, keys)


def test_engines_of_other_sizes_meet_where_the_layout_is_the_same_for_all(store_dir, monkeypatch):
    """In the direct layout the order of a chunk's bytes changes with the number of workers, whatever vLLM says."""
    utils = ModuleType("vllm.v1.attention.backends.utils")
    utils.get_kv_cache_layout = lambda: "HND"
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    # Rows of both sizes have as many bytes.
    sizes = [dict(workers=2, cell_bytes=4096), dict(workers=4, cell_bytes=2048)]
    for canonical, found in ((False, "MMMM"), (True, "HHHH")):
        folder = store_dir / str(canonical)
        folder.mkdir()
        with Engine([tier_config(folder)], agnostic=True, canonical=canonical, **sizes[0]) as engine:
            keys = stored(engine, "a", 4)
        with Engine([tier_config(folder)], agnostic=True, canonical=canonical, **sizes[1]) as engine:
            assert engine.resolve(engine.request(keys), keys) == found


@pytest.mark.skipif(vtier.version() >= (0, 33), reason="vLLM's configuration says the layout")
def test_an_older_vllm_is_asked_for_the_layout_of_its_kv_cache(store_dir, monkeypatch):
    utils, layouts = ModuleType("vllm.v1.attention.backends.utils"), []
    monkeypatch.setitem(sys.modules, utils.__name__, utils)

    def layout():
        if layouts[-1] is None:
            raise AssertionError("Current vLLM config is not set")
        return layouts[-1]

    utils.get_kv_cache_layout = layout
    keys = keys_of("a", 2)
    for found in ("MM", "HH"):
        for one in ("NHD", "HND", None):
            layouts.append(one)
            with Engine([tier_config(store_dir)]) as engine:
                assert engine.resolve(engine.request(keys), keys) == found
                stored(engine, "a", 2)


def test_each_replica_serves_its_figures_at_a_port_of_its_own(store_dir, monkeypatch):
    served = []
    monkeypatch.setattr(_figures, "serve", lambda port, rank=0: served.append((port, rank)))
    with Engine([tier_config(store_dir, metrics_port=9400)]), Engine([tier_config(store_dir, metrics_port=9400)], replica=1):
        assert served == [(9400, 0), (9400, 1)]


def test_weights_of_one_name_are_told_apart_by_their_revision(store_dir):
    with Engine([tier_config(store_dir)]):
        with Engine([tier_config(store_dir, revision="2026-11")]) as other:
            assert other.resolve(other.request(keys_of("a", 1)), keys_of("a", 1)) == "M"


def test_a_longer_request_has_a_store_of_its_own_where_it_decides_the_kv(store_dir):
    """As vLLM chooses the factors of LongRoPE, and whether Llama 4 scales queries."""
    keys, tiers = keys_of("a", 2), store_dir / "tiers"
    tiers.mkdir()
    # vLLM 0.28 does not say it.
    told = "max_model_len" in vtier.boot().config.OffloadingModelConfig.__dataclass_fields__
    for name, config, depends in (
        ("phi", {"rope_scaling": {"type": "longrope"}}, True),
        ("llama", {"text_config": {"model_type": "llama4_text"}}, True),
        ("other", {"model_type": "llama", "rope_scaling": {"rope_type": "default"}}, False),
    ):
        model = store_dir / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        found = []
        for longest in (4096, 8192, 4096):
            with Engine([tier_config(tiers)], model=str(model), longest=longest) as engine:
                found.append(engine.resolve(engine.request(keys), keys))
                stored(engine, "a", 2)
        assert found == (["MM", "MM", "HH"] if depends and told else ["MM", "HH", "HH"]), name
    # Where no configuration is found, it may decide that.
    (store_dir / "list").mkdir()
    (store_dir / "list" / "config.json").write_text("[]")
    for name in ("meta/nowhere", str(store_dir), str(store_dir / "list")):
        found = []
        for longest in (4096, 8192, 4096):
            with Engine([tier_config(tiers)], model=name, longest=longest) as engine:
                found.append(engine.resolve(engine.request(keys), keys))
                stored(engine, "a", 2)
        assert found == (["MM", "MM", "HH"] if told else ["MM", "HH", "HH"]), name


def test_a_store_belongs_to_one_engine(store_dir):
    with Engine([tier_config(store_dir)]):
        with pytest.raises(StoreError, match="lock|use"):
            Engine([tier_config(store_dir)])


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"capacity": "lots"}, "capacity"),
        ({"capacity": "4KiB"}, "capacity"),
        ({"path": "relative"}, "path"),
        ({"threads": 4}, "threads"),
        ({"pool_shares": {"a": 0.5}}, "pool_shares"),
        ({"write_policy": "never"}, "write_policy"),
        ({"revision": 7}, "revision"),
    ],
)
def test_a_wrong_setting_is_named_at_the_start(store_dir, settings, field):
    with pytest.raises(ConfigError) as raised:
        Engine([{**tier_config(store_dir), **settings}])
    assert raised.value.field == field


def test_a_version_outside_is_refused_by_name(monkeypatch, caplog, store_dir):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.24.0")
    with pytest.raises(ImportError, match=r"found version 0\.24\.0, expected 0\.28 to 0\.33"):
        importlib.reload(kvhoist.vllm.tier)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with caplog.at_level(logging.WARNING, logger="kvhoist.vllm"), Engine([tier_config(store_dir)]):
        pass
    assert "found version 0.99.0" in caplog.text


def test_figures_come_in_the_way_that_vllm_declares_them(store_dir):
    with Engine([tier_config(store_dir)]) as engine:
        declared = type(engine.spec).build_metric_definitions(engine.extra)
        stored(engine, "a", 4)
        engine.tier._figures._asked_at = 0.0
        stats = engine.manager.get_stats()
        ours = {name: values for name, values in stats.data["data"].items() if "kvhoist" in name}
        assert set(ours) == {name for name in declared if "kvhoist" in name}
        for name, values in ours.items():
            for labels in values:
                assert len(labels) == len(declared[name].labelnames)
        ((usage,),) = [list(values.values()) for name, values in ours.items() if name.endswith("usage_perc")]
        assert 0 < usage < 1
        if hasattr(engine.spec, "config_info_keys"):
            keys = type(engine.spec).config_info_keys(engine.extra)
            (info,) = [info for info in engine.manager.config_info() if "kvhoist_version" in info]
            assert set(info) <= set(keys) and info["kvhoist_slots"] > 0


def test_events_say_what_was_stored(store_dir):
    with Engine([tier_config(store_dir, enable_kv_events=True)], events=True) as engine:
        keys = stored(engine, "a", 4)
        events = [event for event in engine.manager.take_events() if event.medium is engine.tier.medium]
        assert sorted(key for event in events for key in event.keys) == sorted(keys)
        assert not any(event.removed for event in events)
        assert not list(engine.tier.take_events())


def test_a_keyword_that_a_later_vllm_passes_is_taken_with_one_warning(store_dir, monkeypatch, caplog):
    """What the operator has misspelt is refused still."""
    real = kvhoist.vllm.KvhoistTier.__init__

    def passing_more(self, *given, **named):
        real(self, *given, **named, worker_group="a", next_thing=7)

    monkeypatch.setattr(kvhoist.vllm.KvhoistTier, "__init__", passing_more)
    for _ in range(2):
        with Engine([tier_config(store_dir)]) as engine:
            keys = stored(engine, "a", 4)
            assert engine.resolve(engine.request(keys), keys) == "HHHH"
    assert caplog.text.count("makes no use of next_thing, worker_group") == 1
    with pytest.raises(kvhoist.ConfigError, match="capactiy"):
        Engine([{**tier_config(store_dir), "capactiy": "1GiB"}])


@pytest.mark.skipif(vtier.version() < (0, 33), reason="vLLM has no hints before 0.33")
def test_a_hint_of_another_version_is_not_followed(store_dir, caplog):
    with Engine([tier_config(store_dir)]) as engine:
        keys = stored(engine, "over", 6)
        later = hints("kvhoist.release")
        protocol = importlib.import_module("vllm.v1.kv_hints.protocol")
        actions = [protocol.KvHintAction("a", "kvhoist.release", "2", {}), later.actions[0]]
        finished(engine, keys, kv_hints=protocol.KvHintsEnvelope("1", "m", actions))
        assert engine.tier.store.cache.stats()["released"] == 0 and engine.tier.counters["hint"] == 1
        assert "action_version: found '2', expected '1'" in caplog.text
        others = [protocol.KvHintAction("a", "somebody.else", "2", {}), later.actions[0]]
        finished(engine, keys, kv_hints=protocol.KvHintsEnvelope("1", "m", others))
        assert engine.tier.store.cache.stats()["released"] == 6


def test_a_build_from_source_is_tried_with_a_warning(monkeypatch, caplog, store_dir):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.1.dev1+gabcdef123")
    importlib.reload(kvhoist.vllm.tier)
    with Engine([tier_config(store_dir)]) as engine:
        assert stored(engine, "a", 2)
    assert "found version 0.1.dev1+gabcdef123" in caplog.text


def test_seeds_that_are_drawn_at_each_start_are_warned_of(store_dir, monkeypatch, caplog):
    """As this version of vLLM has it: its code, with names of its own, so that the engine's seed stays as it is."""
    from types import FunctionType

    from kvhoist.vllm import hash_seed
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    def seed():
        names = dict(vars(kv_cache_utils))
        FunctionType(kv_cache_utils.init_none_hash.__code__, names)(sha256)
        return names["NONE_HASH"]

    def said():
        caplog.clear()
        monkeypatch.setattr(hash_seed, "_has_warned", False)
        for replica in (0, 1):
            with Engine([tier_config(store_dir)], replica=replica):
                pass
        return sum(record.name == hash_seed.__name__ for record in caplog.records)

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert said() == (1 if seed() != seed() else 0)
    assert (seed() != seed()) == (vtier.version() < (0, 29))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert said() == 0 and seed() == seed()
