"""The LMCache adapter under LMCache's own storage manager: bytes, restarts, limits, failures."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading

import lm
import pytest

why = lm.missing()
if why:
    pytest.skip(why, allow_module_level=True)

lm.boot()

from lm import Alone, Server, adapter_config, bytes_of, keys_of  # noqa: E402
from nodes import await_unlocked  # noqa: E402

import kvhoist.lmcache.adapter  # noqa: E402
import kvhoist.lmcache.unread  # noqa: E402
from kvhoist import ConfigError, StoreError, UnavailableError  # noqa: E402
from kvhoist.lmcache.lock_times import LockTimes  # noqa: E402

#: Objects' bytes in most tests: three blocks and a bit.
NBYTES = 200_000


def files(folder):
    return sorted(folder.rglob("kvhoist.store"))


def overwrite(path, piece):
    """Damages every place of `piece` in a store's file."""
    data = path.read_bytes()
    assert piece in data, "the object is not on disk"
    path.write_bytes(data.replace(piece, bytes(len(piece))))


def disk(server):
    return server.l2.store.cache.stats()["tiers"]["disk"]


def test_objects_come_back_over_restarts(store_dir):
    prompts = [keys_of(prompt, 12) for prompt in range(3)]
    with Server(adapter_config(store_dir)) as server:
        for keys in prompts:
            assert server.put(keys)
            server.forget()
    for _ in range(2):
        with Server(adapter_config(store_dir)) as server:
            for keys in prompts:
                assert server.get([*keys, *keys_of("new", 2)]) == "H" * 12 + "MM"


@pytest.mark.parametrize("nbytes", [1000, 4096, 65_536, 70_272, 1 << 20])
@pytest.mark.parametrize("shared", [False, True])
def test_objects_of_any_size_come_back(store_dir, nbytes, shared):
    keys = keys_of("a", 9)
    for restart in range(2):
        with Server(adapter_config(store_dir), nbytes=nbytes, shared=shared) as server:
            assert restart or server.put(keys)
            server.forget()
            assert server.get(keys) == "H" * 9
            assert disk(server)["resident"] == 9 * -(-nbytes // (64 << 10))


def test_objects_of_several_sizes_share_a_store(store_dir):
    for restart in range(2):
        for model, nbytes in (("one", 70_000), ("two", 300_000), ("three", 4096)):
            with Server(adapter_config(store_dir), nbytes=nbytes) as server:
                keys = keys_of("a", 5, model=model)
                assert restart or server.put(keys)
                server.forget()
                assert server.get(keys) == "HHHHH"


def test_rows_of_ranks_and_groups_come_back(store_dir):
    rows = [keys_of("a", 4, rank=rank, group=group) for rank in (1, 2) for group in (0, 1)]
    if lm.version() < (0, 5, 6):
        rows = rows[::2]  # One group then.
    with Server(adapter_config(store_dir)) as server:
        for row in rows:
            assert server.put(row)
        server.forget()
        assert server.prefetch(*rows) == ["HHHH"] * len(rows)
        for row in rows:
            server.check(row)


def test_the_disk_holds_its_capacity_and_no_more(store_dir):
    # No multiple of a prompt: some prefix has lost a part.
    capacity = (4 << 20) + 9 * (64 << 10)
    with Server(adapter_config(store_dir, capacity=capacity)) as server:
        slots = disk(server)["slots"]
        (path,) = files(store_dir)
        prompts = [keys_of(prompt, 4) for prompt in range(10 * slots // 16)]
        for keys in prompts:
            assert server.get(keys) == "MMMM"  # As an engine does before it computes.
            assert server.put(keys)
            server.forget()
            assert path.stat().st_size <= capacity
            usage = server.l2.get_usage()
            assert usage.total_bytes_used <= usage.total_capacity_bytes <= capacity
            # What is gone without LMCache's doing is taken back before it is much.
            assert usage.bytes_by_cache_salt[""] <= usage.total_capacity_bytes * (1 + 1 / 32) + 16 * (64 << 10)
        # A prefix loses its end and never its middle, and the latest are there.
        found = [server.look_up(keys) for keys in prompts]
        assert not [letters for letters in found if "MH" in letters]
        survivors = [server.get(keys).count("H") for keys in prompts]
        assert survivors == [letters.count("H") for letters in found]
        assert slots // 8 <= sum(survivors) <= slots // 4
        assert survivors[-1] == 4 and survivors[0] == 0
        server.l2.store.cache.validate()


def test_what_is_looked_up_outlives_what_is_not(store_dir):
    with Server(adapter_config(store_dir, capacity="4MiB")) as server:
        hot = keys_of("hot", 4)
        server.put(hot)
        for prompt in range(4 * disk(server)["slots"] // 16):
            # Found, and not loaded: LMCache may have it in its own memory.
            assert server.look_up(hot) == "HHHH"
            server.put(keys_of(prompt, 4))
            server.forget()
        assert server.get(hot) == "HHHH"


def test_every_task_failing_costs_recomputing_and_no_more(store_dir, caplog):
    with Server(adapter_config(store_dir)) as server:
        keys = keys_of("a", 4)
        server.put(keys)
        server.forget()
        server.l2.store.cache.close()
        with caplog.at_level(logging.WARNING, logger="kvhoist.lmcache"):
            # The index outlives the cache: what it offers fails, and is a miss for its request.
            assert server.get(keys) == "MMMM"
            more = keys_of("b", 4)
            assert not server.put(more)
        assert server.l2.counters["store"] >= 1 and server.l2.counters["objects"] >= 4
        assert "kvhoist: store failed" in caplog.text
        # LMCache's own memory serves on.
        assert server.prefetch(more) == ["HHHH"]
        server.check(more)


def test_a_damaged_object_fails_alone_and_comes_back_when_it_is_stored(store_dir, caplog):
    keys = keys_of("a", 8)
    with Server(adapter_config(store_dir)) as server:
        server.put(keys)
    (path,) = files(store_dir)
    for key in keys[1::2]:
        # In the second of its blocks.
        overwrite(path, bytes_of(key, NBYTES)[70_000:71_000])
    with Alone(adapter_config(store_dir)) as alone:
        assert alone.lock(keys) == "H" * 8
        assert alone.load(keys) == "HM" * 4
        assert alone.adapter.report_status()["checksum_failures"] == 4
        assert "damaged on the drive: a checksum failed (4 since" in caplog.text and "evicted" not in caplog.text
        assert alone.lock(keys) == "HM" * 4, "a miss at the next lookup"
        assert alone.load(keys) == "HM" * 4
        # Before 0.5.6 the first store after a failed load is refused.
        assert alone.store(keys) != kvhoist.lmcache.unread.ANNOUNCES_FAILED_LOADS
        assert alone.store(keys)
        assert alone.lock(keys) == "H" * 8
        assert alone.load(keys) == "H" * 8


def test_memory_into_which_a_load_failed_is_not_stored(store_dir, monkeypatch, caplog):
    """LMCache before 0.5.6 announces an object of a failed load as written before it deletes it: in between it may
    store what lies there, under the object's key."""
    monkeypatch.setattr("kvhoist.lmcache.unread.ANNOUNCES_FAILED_LOADS", True)
    keys = keys_of("a", 6)
    with Alone(adapter_config(store_dir)) as alone:
        assert alone.load(keys[:4]) == "MMMM"
        with caplog.at_level(logging.WARNING, logger="kvhoist.lmcache"):
            assert not alone.store(keys), "the task fails"
        assert "their last load has failed" in caplog.text
        assert alone.lock(keys) == "MMMMHH", "the others of its objects are stored"
        # Computed meanwhile: the next store is no mistake.
        assert alone.store(keys)
        assert alone.load(keys) == "H" * 6
        assert alone.load(keys_of("b", 2)) == "MM"
        assert not alone.store(keys_of("b", 2)), "nothing is left of the task"
        assert alone.lock(keys_of("b", 2)) == "MM"
        assert alone.adapter.report_status()["store_inflight_task_count"] == 0


def test_a_drive_that_dies_is_a_drive_without_objects(store_dir):
    with Server(adapter_config(store_dir)) as server:
        keys = keys_of("a", 8)
        server.put(keys)
        server.forget()
        (path,) = files(store_dir)
        os.truncate(path, 4096)
        for _ in range(3):
            assert server.get(keys) == "M" * 8
        more = keys_of("b", 4)
        server.put(more)
        assert server.prefetch(more) == ["HHHH"]
        server.check(more)


def test_stores_and_loads_of_many_requests_at_once(store_dir):
    """More blocks in a task than may be under way in the cache, and several tasks at a time."""
    # Their 80 MB stay below the mark at which L1 evicts, which it also does before a block is stored.
    prompts = [keys_of(prompt, 200) for prompt in range(4)]
    with Server(adapter_config(store_dir, capacity="256MiB"), l1_bytes=160 << 20, nbytes=100_000) as server:
        for keys in prompts:
            server.write(keys)
        for keys in prompts:
            assert server.watch.ended(keys)
        server.forget()
        for keys in prompts:
            assert server.prefetch(keys) == ["H" * 200]
        for keys in prompts:
            server.check(keys)


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import lm
lm.boot()
with lm.Server(lm.adapter_config(sys.argv[2], capacity="256MiB")) as server:
    for prompt in range(10**6):
        server.write(lm.keys_of(f"later {prompt}", 8))
        keys = lm.keys_of(prompt, 8)
        assert server.put(keys)
        print(prompt, flush=True)
        server.watch.ended(lm.keys_of(f"later {prompt}", 8))
        server.forget()
"""


def test_a_killed_process_leaves_what_was_acknowledged_and_nothing_wrong(store_dir):
    command = [sys.executable, "-c", KILLED, os.path.dirname(lm.__file__), str(store_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    acknowledged = -1
    while acknowledged < 5:
        line = process.stdout.readline()
        assert line, "the process died by itself"
        acknowledged = int(line) if line.strip().isdigit() else acknowledged
    process.send_signal(signal.SIGKILL)
    process.wait()
    await_unlocked(store_dir)
    with Server(adapter_config(store_dir, capacity="256MiB")) as server:
        for prompt in range(acknowledged + 1):
            assert server.get(keys_of(prompt, 8)) == "H" * 8, prompt
        for prompt in range(acknowledged + 3):
            server.get(keys_of(f"later {prompt}", 8))  # It compares the bytes of what it finds.
        server.l2.store.cache.validate()


@pytest.mark.parametrize(
    "other",
    [{"model": "meta/other"}, {"rank": 1}, {"group": 1}, {"salt": "someone"}],
    ids=lambda other: "".join(other),
)
def test_what_differs_in_its_key_never_meets(store_dir, other):
    with Server(adapter_config(store_dir)) as server:
        keys, others = keys_of("a", 4), keys_of("a", 4, **other)
        server.put(keys)
        server.forget()
        assert server.look_up(others) == "MMMM"
        server.put(others)
        server.forget()
        assert server.get(keys) == server.get(others) == "HHHH"


#: Chunks of a layer's keys and values: (2, layers, tokens, heads of a rank).
SPLIT = {"dtype": "float16", "shape": (2, 8, 25, -1)}


@pytest.mark.parametrize(
    "one, other",
    [
        ({}, {"nbytes": 100_000}),
        ({}, {"dtype": "float16"}),
        (SPLIT, {**SPLIT, "shape": (2, 4, 25, -1)}),
        (SPLIT, {**SPLIT, "shape": (1, 8, 25, -1)}),
        (SPLIT, {**SPLIT, "shape": (-1,)}),
    ],
    ids=["bytes", "dtype", "TP2-PP2", "fused", "flat"],
)
def test_what_lies_otherwise_in_memory_never_meets(store_dir, one, other):
    keys = keys_of("a", 4)
    with Server(adapter_config(store_dir), **one) as server:
        server.put(keys)
    with Server(adapter_config(store_dir), **other) as server:
        assert server.get(keys) == "MMMM"
        server.put(keys)
        server.forget()
        assert server.get(keys) == "HHHH"
        # Nor in one process, whatever was stored last.
        server.layout = lm.layout_of(**{"nbytes": NBYTES, **one})
        assert server.get(keys) == "HHHH"
    with Server(adapter_config(store_dir), **one) as server:
        assert server.get(keys) == "HHHH"
        server.layout = lm.layout_of(60_000)
        assert server.get(keys) == "MMMM"
        assert not server.l2.counters, "a miss, and no failed load"


def test_weights_of_one_name_are_told_apart_by_their_revision(store_dir):
    keys = keys_of("a", 1)
    with Server(adapter_config(store_dir)) as server:
        server.put(keys)
        with Server(adapter_config(store_dir, revision="2026-11")) as other:
            assert other.look_up(keys) == "M"


def test_what_an_earlier_process_stored_is_deleted_once_a_lookup_has_found_it(store_dir):
    keys, others = keys_of("a", 4), keys_of("b", 2, model="meta/other")
    with Server(adapter_config(store_dir)) as server:
        assert server.put(keys) and server.put(others)
    with Server(adapter_config(store_dir)) as server:
        assert server.look_up(keys[:1]) == "H"
        server.adapter.delete(keys)
        assert server.look_up(keys) == "MMMM"
        assert disk(server)["resident"] == 2 * 4


def test_a_delete_that_cannot_know_the_objects_says_so_and_deletes_the_others(store_dir, caplog):
    keys, others = keys_of("a", 4), keys_of("b", 2, model="meta/other")
    with Server(adapter_config(store_dir)) as server:
        assert server.put(keys) and server.put(others)
    with Server(adapter_config(store_dir)) as server:
        assert server.look_up(others) == "HH"
        with pytest.raises(UnavailableError, match="found 4 keys .* look one up first"):
            server.adapter.delete([*keys, *others])
        assert server.l2.report_status()["failures"] == {"delete": 1, "objects": 4}
        assert "delete failed" in caplog.text
        assert server.look_up(others) == "MM"
        assert server.get(keys) == "HHHH"


def test_objects_that_lmcache_serializes_are_found_once_one_was_stored(store_dir):
    """Lookups describe what LMCache will have in memory, stores and loads what it serializes that to."""
    keys = keys_of("a", 4)
    config = adapter_config(store_dir, serde={"type": "fp8"})
    halves = lambda key, nbytes: b"\x00\x3c" * (nbytes // 2)  # noqa: E731  Ones, which fp8 can say.
    for restart in range(2):
        with Server(config, dtype="float16", nbytes=NBYTES) as server:
            if restart:
                assert server.get(keys) == "MMMM"
            assert server.watch.ended(server.write(keys_of("b", 1) if restart else keys, halves))
            server.forget()
            assert server.prefetch(keys) == ["HHHH"]
            server.check(keys, halves)


def test_the_times_of_lmcaches_locks_are_those_that_its_server_was_given(store_dir):
    with Server(adapter_config(store_dir)) as server:
        assert server.l2._times == LockTimes() == LockTimes(290, 590)
    with Server(adapter_config(store_dir), times={"read_ttl_seconds": 900, "write_ttl_seconds": 86_400}) as server:
        assert server.l2._times == LockTimes(890, 86_390)
        server.manager.delete_l2_adapter(0)
        (config,) = lm.parsed(adapter_config(store_dir)).adapters
        added = server.manager._l2_adapters[server.manager.add_l2_adapter(config)]
        assert added._times == LockTimes(890, 86_390)
    for name in ("read", "write"):
        with pytest.raises(ConfigError, match=f"^l1_{name}_ttl_seconds: found 59, expected 60 or more"):
            Server(adapter_config(store_dir), times={f"{name}_ttl_seconds": 59})


@pytest.mark.skipif(lm.version() < (0, 5, 6), reason="before 0.5.6 LMCache gives no request up")
def test_memory_of_a_request_that_is_given_up_is_kept_until_its_load_has_ended(store_dir, monkeypatch):
    """As where another adapter cannot begin its part of the load."""
    keys, may_end, were_under_way = keys_of("a", 4), threading.Event(), []
    with Server(adapter_config(store_dir)) as server:
        assert server.put(keys)
        server.forget()
        end, submit, l1 = server.l2.store._ended, server.adapter.submit_load_task, server.manager._l1_manager
        free = l1.finish_write_and_delete

        def failing(keys, objects):
            submit(keys, objects)
            raise RuntimeError("of the next adapter")

        def freed(*given, **named):
            were_under_way.append(server.l2.report_status()["load_inflight_oldest_s"] > 0)
            return free(*given, **named)

        monkeypatch.setattr(server.l2.store, "_ended", lambda one: (may_end.wait(lm.PATIENCE_S), end(one)))
        monkeypatch.setattr(server.adapter, "submit_load_task", failing)
        monkeypatch.setattr(l1, "finish_write_and_delete", freed)
        timer = threading.Timer(0.3, may_end.set)
        timer.start()
        assert server.prefetch(keys) == ["MMMM"]
        timer.join()
        assert were_under_way == [False]


def test_a_store_belongs_to_one_server(store_dir):
    with Server(adapter_config(store_dir)):
        with pytest.raises(StoreError, match="lock|use"):
            Server(adapter_config(store_dir))


def test_adapters_come_and_go_while_the_server_runs(store_dir):
    keys = keys_of("a", 4)
    with Server(adapter_config(store_dir)) as server:
        server.put(keys)
        server.forget()
        server.manager.delete_l2_adapter(0)
        assert server.get(keys) == "MMMM"
        (config,) = lm.parsed(adapter_config(store_dir)).adapters
        server.manager.add_l2_adapter(config)
        assert server.get(keys) == "HHHH"


def test_quotas_of_salts_are_lmcaches_to_enforce(store_dir):
    with Server(adapter_config(store_dir, eviction={"eviction_policy": "IsolatedLRU"})) as server:
        mine, theirs = keys_of("a", 4, salt="mine"), keys_of("a", 4, salt="theirs")
        server.manager.quota_manager.set_quota("mine", 1 << 30)
        server.put(mine)
        server.put(theirs)
        server.forget()
        (state,) = server.manager._l2_eviction_controller._adapter_states
        server.manager._l2_eviction_controller._check_and_evict(state)
        # No quota is a quota of nothing.
        assert server.get(mine) == "HHHH"
        assert server.get(theirs) == "MMMM"
        assert set(server.l2.get_usage().bytes_by_cache_salt) == {"mine"}


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"capacity": "lots"}, "capacity"),
        ({"capacity": "4KiB"}, "capacity"),
        ({"path": "relative"}, "path"),
        ({"slot_bytes": 4}, "slot_bytes"),
        ({"block_bytes": 5000}, "block_bytes"),
        ({"block_bytes": "2 rods"}, "block_bytes"),
        ({"pool_shares": {"a": 0.5}}, "pool_shares"),
        ({"write_policy": "never"}, "write_policy"),
        ({"revision": 7}, "revision"),
    ],
)
def test_a_wrong_setting_is_named_at_the_start(store_dir, settings, field):
    with pytest.raises(ConfigError) as raised:
        Alone(adapter_config(**{"path": store_dir, **settings}))
    assert raised.value.field == field


def test_an_l1_outside_of_host_memory_is_refused(store_dir):
    with pytest.raises(ConfigError, match="an L1 in host memory"):
        kvhoist.lmcache.KvhoistL2(adapter_config(store_dir)["adapter_params"], l1_memory_desc=None)


def test_a_version_outside_is_refused_by_name(monkeypatch, caplog, store_dir):
    import lmcache

    monkeypatch.setattr(lmcache, "__version__", "0.4.7")
    with pytest.raises(ImportError, match=r"found version 0\.4\.7, expected 0\.5"):
        importlib.reload(kvhoist.lmcache.adapter)
    monkeypatch.setattr(lmcache, "__version__", "0.9.1")
    with caplog.at_level(logging.WARNING, logger="kvhoist.lmcache"), Alone(adapter_config(store_dir)):
        pass
    assert "found version 0.9.1" in caplog.text


# The adapter alone
