"""The vLLM tier under vLLM's own manager: failed jobs, damaged chunks, dead drives, killed processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

vtier.boot()

from vtier import Engine, files, keys_of, stored, tier_config  # noqa: E402

import kvhoist.vllm.jobs  # noqa: E402

CELL = 4096


def overwrite(path, chunk, count=1):
    """Damages every place of `chunk` in a store's file."""
    data = path.read_bytes()
    found = data.count(chunk)
    assert found >= count, "the chunk is not on disk"
    path.write_bytes(data.replace(chunk, bytes(len(chunk))))


def test_every_job_failing_costs_recomputing_and_no_more(store_dir, caplog):
    with Engine([tier_config(store_dir)]) as engine:
        keys = stored(engine, "a", 4)
        engine.tier.store.cache.close()
        context = engine.request(keys)
        with caplog.at_level(logging.WARNING, logger="kvhoist.vllm"):
            # The index outlives the cache: what it offers fails, and is a miss from then on.
            found = engine.resolve(context, keys)
            assert found == "MMMM"
            assert engine.lookup(context, keys) == "MMMM"
            more = keys_of("b", 4)
            context = engine.request(more)
            engine.put(context, more)
            engine.settle()
        assert engine.tier.counters["store"] >= 1
        assert "kvhoist: store failed" in caplog.text
        # vLLM's own memory serves on.
        assert engine.lookup(context, more) == "HHHH"
        engine.check(context, more)


def test_a_job_that_fails_in_half_keeps_the_other_half(store_dir):
    keys = keys_of("a", 8)
    with Engine([tier_config(store_dir)]) as engine:
        stored(engine, "a", 8)
    (path,) = files(store_dir)
    for key in keys[::2]:
        overwrite(path, bytes(vtier.cell_of(key, 0, CELL).numpy()))
    with Engine([tier_config(store_dir)]) as engine:
        context = engine.request(keys)
        assert engine.lookup(context, keys) == "P" * 8
        engine.settle()
        assert engine.lookup(context, keys) == "MH" * 4, "a miss at the next lookup, not a load for ever"
        engine.check(context, keys[1::2])
        figures = engine.tier.store.cache.stats()
        assert figures["checksum_failures"] == 4
        # Computed and stored anew, they come back.
        engine.put(context, keys[::2], touch=keys)
        engine.settle()
        engine.forget()
        assert engine.resolve(context, keys) == "H" * 8
        engine.check(context, keys)


def test_a_drive_that_dies_is_a_drive_without_chunks(store_dir):
    with Engine([tier_config(store_dir)]) as engine:
        keys = stored(engine, "a", 8)
        (path,) = files(store_dir)
        os.truncate(path, 4096)
        for _ in range(3):
            context = engine.request(keys)
            assert engine.resolve(context, keys) == "M" * 8
            engine.finish(context)
        context = engine.request(keys_of("b", 4))
        engine.put(context, keys_of("b", 4))
        engine.settle()
        assert engine.lookup(context, keys_of("b", 4)) == "HHHH"


def test_a_load_past_the_limit_is_recomputed_and_not_asked_for_for_ever(store_dir, monkeypatch):
    monkeypatch.setattr(kvhoist.vllm.jobs, "JOBS_MAX", 1)
    with Engine([tier_config(store_dir)]) as engine:
        prompts = [stored(engine, prompt, 2) for prompt in range(3)]
        contexts = [engine.request(keys) for keys in prompts]
        assert [engine.lookup(context, keys) for context, keys in zip(contexts, prompts)] == ["PP"] * 3
        engine.settle()
        found = [engine.lookup(context, keys) for context, keys in zip(contexts, prompts)]
        assert found == ["HH", "MM", "MM"], "one job a time, and what found no room is a miss at the next lookup"
        # Computed, they are offered again; they are on disk, and may be loaded from now on.
        engine.put(contexts[1], prompts[1], touch=prompts[1])
        engine.settle()
        engine.forget()
        assert engine.resolve(contexts[1], prompts[1]) == "HH"
        engine.check(contexts[1], prompts[1])


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import vtier
from vtier import Engine, keys_of, tier_config
with Engine([tier_config(sys.argv[2], capacity="64MiB")], rows=64, cell_bytes=16 << 10) as engine:
    print(engine.spec._scheduler_mmap.mmap_path, flush=True)
    for prompt in range(10**6):
        keys = keys_of(prompt, 16)
        context = engine.request(keys)
        for start in range(0, 16, 4):
            engine.put(context, keys[start:start + 4], touch=keys)
            engine.step()
        engine.settle()
        print(prompt, flush=True)
        engine.finish(context)
"""


def test_a_process_killed_while_it_stores_leaves_whole_chunks(store_dir, seed):
    command = [sys.executable, "-c", KILLED, str(Path(vtier.__file__).parent), str(store_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        # vLLM's own log goes the same way.
        lines = (line.strip() for line in process.stdout)
        shared = next(line for line in lines if line.startswith("/dev/shm/"))
        acknowledged = []
        for line in lines:
            if line.isdigit():
                acknowledged.append(int(line))
            if len(acknowledged) > seed % 8:
                break
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in lines if line.isdigit()]
    os.unlink(shared)
    with Engine([tier_config(store_dir, capacity="64MiB")], rows=64, cell_bytes=16 << 10) as engine:
        for prompt in range(acknowledged[-1] + 3):
            keys = keys_of(prompt, 16)
            context = engine.request(keys)
            found = engine.resolve(context, keys)
            if prompt in acknowledged:
                assert found == "H" * 16, prompt
            engine.check(context, [key for key, hit in zip(keys, found) if hit == "H"])
            engine.finish(context)
            engine.forget()
        engine.tier.store.cache.validate()


def test_the_log_tells_damaged_chunks_from_evicted_ones(store_dir, caplog):
    keys = keys_of("a", 4)
    with Engine([tier_config(store_dir)]) as engine:
        stored(engine, "a", 4)
    (path,) = files(store_dir)
    with Engine([tier_config(store_dir)]) as engine:
        gone = engine.request(keys)
        # Looked up, and gone before its load begins.
        assert engine.lookup(gone, keys[:1]) == "P"
        engine.tier.store.cache.remove(*kvhoist.vllm.jobs.chunk_keys(keys[:1]))
        engine.settle()
        assert "evicted meanwhile" in caplog.text and "checksum" not in caplog.text
        caplog.clear()
        overwrite(path, vtier.cell_of(keys[1], 0, CELL).numpy().tobytes())
        assert engine.resolve(engine.request(keys[1:]), keys[1:]) == "MHH"
        assert "damaged on the drive: a checksum failed (1 since the last miss)" in caplog.text
        assert "evicted" not in caplog.text
