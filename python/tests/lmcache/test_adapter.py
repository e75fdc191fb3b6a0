"""The LMCache adapter's own interface: descriptors, locks, tasks that cannot begin, its end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import lm
import pytest

why = lm.missing()
if why:
    pytest.skip(why, allow_module_level=True)

lm.boot()

from lm import Alone, adapter_config, boot, keys_of  # noqa: E402

from kvhoist import ClosedError  # noqa: E402
from kvhoist.lmcache import KvhoistL2, adapter  # noqa: E402
from kvhoist.lmcache.lock_times import LockTimes  # noqa: E402


def test_the_three_descriptors_are_readable_when_their_tasks_have_ended(store_dir):
    with Alone(adapter_config(store_dir)) as alone:
        adapter, keys = alone.adapter, keys_of("a", 3)
        store, lookup, load = (
            adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()
        )  # fmt: skip
        assert len({store, lookup, load}) == 3
        assert adapter.pop_completed_store_tasks() == {}
        tasks = [adapter.submit_store_task([key], [obj]) for key, obj in zip(keys, alone.objects(3))]
        ended = {}
        while len(ended) < 3:
            lm.wait(store)
            ended |= adapter.pop_completed_store_tasks()
        assert list(sorted(ended)) == tasks
        assert all(result.is_successful() and result.bytes_transferred() == 200_704 for result in ended.values())
        alone.lock(keys)
        lm.wait(lookup)
        loads = [adapter.submit_load_task([key], [obj]) for key, obj in zip(keys, alone.objects(3))]
        bitmaps = {}
        while len(bitmaps) < 3:
            lm.wait(load)
            found = {task: adapter.query_load_result(task) for task in loads if task not in bitmaps}
            bitmaps |= {task: bitmap for task, bitmap in found.items() if bitmap is not None}
        assert all(bitmap.test(0) for bitmap in bitmaps.values())
        assert [adapter.query_load_result(task) for task in loads] == [None] * 3, "a result is given once"


def test_an_object_that_is_locked_is_not_deleted(store_dir):
    with Alone(adapter_config(store_dir)) as alone:
        keys = keys_of("a", 4)
        alone.store(keys)
        assert (alone.lock(keys[:2]), alone.lock(keys[:1])) == ("HH", "H")
        alone.adapter.delete(keys)
        assert alone.lock(keys) == "HHMM"
        alone.adapter.submit_unlock(keys[:2])
        alone.adapter.submit_unlock(keys[:2])
        alone.adapter.delete(keys)
        # The first was locked three times.
        assert alone.lock(keys) == "HMMM"
        alone.adapter.submit_unlock(keys[:1])
        alone.adapter.submit_unlock(keys)  # More often than it was locked: no harm.
        alone.adapter.delete(keys)
        assert alone.lock(keys) == "MMMM"
        assert alone.adapter.get_usage().total_bytes_used == 0
        assert dict(alone.adapter.get_usage().bytes_by_cache_salt) == {}


def test_an_unlock_waits_for_the_loads_of_the_same_objects(store_dir, monkeypatch):
    """LMCache frees the memory after it, also of a request that it gives up while its load is under way."""
    with Alone(adapter_config(store_dir)) as alone, ThreadPoolExecutor(1) as other:
        keys, may_end, end = keys_of("a", 3), threading.Event(), alone.adapter.store._ended
        assert alone.store(keys)
        monkeypatch.setattr(alone.adapter.store, "_ended", lambda one: (may_end.wait(lm.PATIENCE_S), end(one)))
        assert (alone.lock(keys), alone.lock(keys)) == ("HHH", "HHH")
        task = alone.adapter.submit_load_task(keys, alone.objects(3))
        alone.adapter.submit_unlock(keys[:2])  # Another request's, of other objects.
        # One whose lock is left may be of a request that was given up, too.
        unlock = other.submit(alone.adapter.submit_unlock, keys)
        assert not wait([unlock], 0.3).done
        assert alone.adapter.query_load_result(task) is None
        may_end.set()
        unlock.result(lm.PATIENCE_S)
        lm.wait(alone.adapter.get_load_event_fd())
        assert alone.adapter.query_load_result(task).popcount() == 3
        # Not for longer than LMCache keeps the memory.
        may_end.clear()
        monkeypatch.setattr(alone.adapter, "_times", LockTimes(staged_s=0.1))
        alone.lock(keys)
        task = alone.adapter.submit_load_task(keys, alone.objects(3))
        alone.adapter.submit_unlock(keys)
        assert alone.adapter.query_load_result(task) is None
        may_end.set()


def test_serialized_objects_of_another_size_are_named_in_the_log(store_dir, caplog):
    """The latest flat layout stands in for what a lookup cannot know."""
    with Alone(adapter_config(store_dir), dtype="uint8") as alone:
        keys = keys_of("a", 3)
        assert alone.store(keys)
        alone.layout = lm.layout_of(400_000, "float16")
        assert alone.lock(keys) == "HHH"
        alone.nbytes = 100_000
        assert alone.load(keys) == "MMM"
        assert "stored in another layout" in caplog.text and "evicted" not in caplog.text
        assert alone.load(keys_of("new", 1)) == "M"
        assert "evicted meanwhile" in caplog.text


def test_looks_for_evicted_objects_are_short_and_keep_no_lock(store_dir, monkeypatch):
    monkeypatch.setattr("kvhoist.lmcache.announced._CHECKED", 8)
    with Alone(adapter_config(store_dir, capacity="4MiB")) as alone, ThreadPoolExecutor(1) as other:
        announced, store, looks = alone.adapter._announced, alone.adapter.store, []
        starts_each = store.starts_each

        def is_free() -> bool:
            taken = announced._notifying.acquire(timeout=lm.PATIENCE_S)
            announced._notifying.release()
            return taken

        def looked(objects):
            looks.append(len(objects))
            assert other.submit(is_free).result()
            return starts_each(objects)

        monkeypatch.setattr(store, "starts_each", looked)
        capacity = alone.adapter.get_usage().total_capacity_bytes
        for prompt in range(40):
            alone.store(keys_of(prompt, 4))
            used = alone.adapter.get_usage().bytes_by_cache_salt[""]
            assert used <= capacity * (1 + 1 / 32) + 16 * (64 << 10)
        assert looks and max(looks) == 8
        # What is stored again during a look is not taken for evicted.
        first, *_ = announced._objects

        def stored_meanwhile(objects):
            announced.add([first], [dataclasses.replace(objects[0])])
            return [False] * len(objects)

        monkeypatch.setattr(store, "starts_each", stored_meanwhile)
        count = len(announced._objects)
        announced._forget_evicted(3)
        assert first in announced._objects and len(announced._objects) == count - 2


def test_tasks_that_cannot_begin_have_failed(store_dir, caplog):
    with Alone(adapter_config(store_dir)) as alone:
        keys = keys_of("a", 2)
        outside = [alone.at(1 << 40), alone.at(1 << 41)]
        task = alone.adapter.submit_store_task(keys, outside)
        lm.wait(alone.adapter.get_store_event_fd())
        ended = alone.adapter.pop_completed_store_tasks()
        assert not ended[task].is_successful() and ended[task].bytes_transferred() == 0
        task = alone.adapter.submit_load_task(keys, alone.objects(1))
        lm.wait(alone.adapter.get_load_event_fd())
        assert alone.adapter.query_load_result(task).popcount() == 0
        assert alone.lock(keys) == "MM"
        assert "expected one for each of 2 keys" in caplog.text
        # One of two in L1: it is stored, and the task has failed.
        task = alone.adapter.submit_store_task(keys, [alone.at(0), outside[0]])
        lm.wait(alone.adapter.get_store_event_fd())
        assert not alone.adapter.pop_completed_store_tasks()[task].is_successful()
        assert alone.store(keys) and alone.load(keys) == "HH"


def test_what_lmcache_did_not_keep_in_memory_for_its_store_is_not_found(store_dir, monkeypatch, caplog):
    with Alone(adapter_config(store_dir)) as alone:
        keys = keys_of("a", 3)
        monkeypatch.setattr(alone.adapter, "_times", LockTimes(locked_s=-1))
        assert not alone.store(keys)
        assert "LMCache keeps the memory for -1" in caplog.text
        monkeypatch.undo()
        assert alone.lock(keys) == "MMM"
        assert alone.store(keys) and alone.load(keys) == "HHH"
        # What cannot be removed is a miss, until it is removed or stored again.
        monkeypatch.setattr(alone.adapter, "_times", LockTimes(locked_s=-1))
        monkeypatch.setattr(alone.adapter.store, "remove", lambda _one: 1 / 0)
        others = keys_of("b", 3)
        assert not alone.store(others)
        monkeypatch.undo()
        assert alone.lock(others) == "MMM"
        assert alone.store(others[:1])
        assert alone.lock(others) == "HMM"
        assert not alone.adapter._doubted


def test_a_drive_that_is_far_behind_gets_no_more_stores(store_dir, monkeypatch, caplog):
    with Alone(adapter_config(store_dir)) as alone:
        keys = keys_of("a", 3)
        oldest = adapter._Task([], False, False, begun=time.monotonic() - 61)
        monkeypatch.setitem(alone.adapter._under_way, -1, oldest)
        assert not alone.store(keys)
        assert "the drive is 61 s behind" in caplog.text
        assert alone.adapter.report_status()["store_inflight_oldest_s"] >= 61
        monkeypatch.undo()
        assert alone.store(keys) and alone.load(keys) == "HHH"


def test_a_load_that_hangs_for_longer_than_its_memory_is_kept_is_told(store_dir, monkeypatch):
    with Alone(adapter_config(store_dir)) as alone:
        for age, is_healthy in ((580, True), (591, False)):
            load = adapter._Task([], False, True, begun=time.monotonic() - age)
            monkeypatch.setitem(alone.adapter._under_way, -1, load)
            status = alone.adapter.report_status()
            assert status["is_healthy"] == is_healthy and status["load_inflight_oldest_s"] >= age
            assert status["store_inflight_oldest_s"] == 0
            monkeypatch.undo()
        assert alone.adapter.report_status()["is_healthy"]


def test_objects_lie_across_the_edge_of_what_the_ring_pins(store_dir):
    """A lazy L1 grows behind what was there at the start."""
    for stable in (100 << 12, 0, 8 << 20):
        with Alone(adapter_config(store_dir / str(stable)), stable=stable) as alone:
            keys = keys_of("a", 20)
            assert alone.store(keys)
            assert alone.load(keys, alone.objects(20, first=4096 * 7)) == "H" * 20
            assert len(alone.adapter.store._edges) == (lm.version() >= (0, 5, 6) and 0 < stable < 8 << 20)


def test_a_close_waits_for_the_tasks_and_ends_the_descriptors(store_dir):
    keys = keys_of("a", 30)
    with Alone(adapter_config(store_dir)) as alone:
        adapter = alone.adapter
        adapter.submit_store_task(keys, alone.objects(30))
        adapter.close()
        assert adapter.store.tasks == (0, 0)
        assert adapter.pop_completed_store_tasks()[0].is_successful()
        with pytest.raises(ClosedError):
            adapter.submit_load_task(keys, alone.objects(30))
        assert not adapter.report_status()["is_healthy"]
        adapter.close()


def test_figures_say_what_the_store_does(store_dir):
    with Alone(adapter_config(store_dir)) as alone:
        alone.store(keys_of("a", 3))
        status = alone.adapter.report_status()
        assert status["is_healthy"] and status["resident"] == 12 and status["slots"] > 900
        assert status["store_inflight_task_count"] == status["load_inflight_task_count"] == 0
        assert status["store_inflight_oldest_s"] == 0
        usage = alone.adapter.get_usage()
        assert usage.total_bytes_used == 12 * (64 << 10) == usage.bytes_by_cache_salt[""]
        assert not alone.adapter.supports_global_eviction


def test_lmcaches_own_bench_stores_and_loads_all(store_dir, monkeypatch, capsys):
    """Its objects have a dtype and no list of dtypes."""
    from lmcache.cli.main import main

    config = json.dumps(adapter_config(store_dir, capacity="64MiB"))
    monkeypatch.setattr(sys, "argv", [
        "lmcache", "bench", "l2", "--l2-adapter", config, "--num-keys", "32", "--in-flight", "4",
        "--data-size-kb", "64", "--no-skip-verify", "--lookup-max-hit-rate", "1.0", "--warmup-rounds", "0",
    ])  # fmt: skip
    main()
    words = capsys.readouterr().out.split("\n")
    found = [int(line.split()[-1]) for line in words if line.startswith("Total success:")]
    assert found == [128, 128, 128], "stored, looked up, loaded"


def test_lmcaches_own_check_passes(store_dir, capsys):
    from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode

    config = json.dumps(adapter_config(store_dir, capacity="64MiB"))
    asyncio.run(run_test_mode("meta/tiny", l2_adapter=[config], num_keys=128))
    out = capsys.readouterr().out
    assert out.count("128/128") >= 4 and "FAIL" not in out and "0/128" not in out.replace("128/128", ""), out


def test_a_keyword_that_a_later_lmcache_passes_is_taken_with_a_warning(store_dir, caplog):
    alone = Alone(adapter_config(store_dir))
    alone.adapter.close()
    memory = boot().internal.L1MemoryDesc(alone._start, 8 << 20, 4096)
    KvhoistL2(adapter_config(store_dir)["adapter_params"], l1_memory_desc=memory, next_thing=7).close()
    assert "makes no use of next_thing" in caplog.text
