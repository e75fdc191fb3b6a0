"""The vLLM tier on a node's service: data-parallel replicas share one space, and a service that dies costs misses."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from types import SimpleNamespace

import numpy
import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

vtier.boot()

from nodes import LINGER_S, Node, await_, service_pids  # noqa: E402
from vtier import Engine, keys_of  # noqa: E402

from kvhoist import ConfigError, UnavailableError  # noqa: E402
from kvhoist.service import (
    pause,  # noqa: E402
    space,  # noqa: E402
)

NEW = vtier.version() >= (0, 33)


@pytest.fixture
def node(store_dir):
    with Node(store_dir) as node:
        yield node


def config(node, capacity="32MiB", **more) -> dict:
    return {
        "type": "KvhoistTier", "module_path": "kvhoist.vllm", "service": node.socket, "capacity": capacity,
        "host_bytes": "4MiB", **more,
    }  # fmt: skip


def store(engine, prompt, count=8):
    """Stores a prompt's chunks, and has vLLM forget them; the keys."""
    keys = keys_of(prompt, count)
    context = engine.request(keys)
    assert engine.put(context, keys, touch=keys) is not None
    engine.settle()
    engine.finish(context)
    engine.forget()
    return keys


def found(engine, keys) -> str:
    """What a request finds of these chunks, every byte compared."""
    context = engine.request(keys)
    answers = engine.resolve(context, keys)
    engine.check(context, [key for key, answer in zip(keys, answers) if answer == "H"])
    engine.finish(context)
    engine.forget()
    return answers


def test_replicas_share_one_space(node):
    with Engine([config(node)]) as first, Engine([config(node)], replica=1) as second:
        keys = store(first, "a")
        assert found(second, keys) == "H" * 8, "a replica finds what another stored"
        more = store(second, "b")
        assert found(first, more) == "H" * 8
        assert first.tier.store.cache.stats()["tiers"]["disk"]["resident"] == 16, "each chunk is stored once"
        assert not first.tier.store.region.copied, "chunks go straight into vLLM's memory"
    with Engine([config(node)], replica=2) as third:
        assert found(third, keys + more) == "H" * 16


def test_the_first_replica_reports_what_a_space_counts_from_its_start_on(node):
    def evictions(engine) -> list:
        """What vLLM adds to its counter; nothing where the engine has no such figure."""
        engine.tier._figures._asked_at = 0.0
        added = engine.manager.get_stats().data["data"].get("vllm:kv_offload_kvhoist_evictions", {})
        return list(added.values())

    def evicts(engine, first: int) -> int:
        """Stores more than the space has room for: how many chunks are evicted."""
        count = lambda: engine.tier.store.cache.stats()["tiers"]["disk"]["evictions"]  # noqa: E731
        before = count()
        for n in range(first, first + 4):
            store(engine, f"prompt {n}")
        return count() - before

    space = config(node, "1200KiB", lookup_ms=2000)
    with Engine([space]) as engine:
        assert evicts(engine, 0) > 0
    with Engine([space]) as first, Engine([space], replica=1) as second:
        assert evictions(first) == [0], "what was before is of no concern"
        evicted = evicts(second, 10)
        assert evicted > 0
        assert (evictions(first), evictions(second)) == ([evicted], [])


def test_engines_of_other_models_share_nothing(node):
    with Engine([config(node, "16MiB")]) as one, Engine([config(node, "16MiB")], model="meta/other") as other:
        keys = store(one, "a")
        assert found(other, keys) == "M" * 8


@pytest.mark.skipif(not NEW, reason="before 0.33 a request's keys are not known when it is looked up first")
def test_a_request_is_one_question_a_step(node, monkeypatch):
    with Engine([config(node)], rows=32) as engine:
        keys, asked = store(engine, "a", 16), []
        index = engine.tier.store.cache._index
        real = index.contains_each
        monkeypatch.setattr(index, "contains_each", lambda names: asked.append(names) or real(names))
        context = engine.request(keys)
        assert engine.lookup(context, keys) == "P" * 16
        assert [len(names) for names in asked] == [16]
        other = engine.request(missing := keys_of("b", 4))
        assert engine.lookup(other, missing) == "MMMM" and engine.lookup(other, missing) == "MMMM"
        assert [len(names) for names in asked] == [16, 4]
        engine.step()
        assert engine.lookup(other, missing) == "MMMM"
        assert [len(names) for names in asked] == [16, 4, 4], "another replica may have stored them since"
        engine.settle()


def test_a_service_that_dies_costs_misses(node, caplog):
    with Engine([config(node)]) as engine:
        keys = store(engine, "a")
        node.kill()
        engine.step()
        assert found(engine, keys) == "M" * 8
        # Stores fail, and cost nothing.
        context = engine.request(more := keys_of("b", 4))
        engine.put(context, more, touch=more)
        engine.settle()
        assert engine.lookup(context, more) == "HHHH", "vLLM's own memory serves on"
        engine.finish(context)
        engine.forget()
        assert "does not answer" in caplog.text
        node.start()
        space = engine.tier.store.cache
        await_(lambda: space.connected, "the client to connect again")
        space._pause.end()
        engine.step()
        assert found(engine, keys) == "H" * 8, "what was stored is there again"
        assert set(found(engine, more)) <= set("HM")


def test_a_service_that_dies_in_mid_transfer_fails_its_jobs(node):
    with Engine([config(node)], rows=48, cell_bytes=64 << 10) as engine:
        keys = store(engine, "a", 16)
        context = engine.request(keys)
        rows = numpy.arange(4, dtype=numpy.int32)
        job = vtier.made(
            engine.modules.tiering.TransferJob, job_id=7, keys=keys[:4], chunk_ids=rows, block_ids=rows,
            is_promotion=True, req_context=context,
        )  # fmt: skip
        with node.hanging():
            engine.tier.submit_load(job)
            assert not list(engine.tier.get_finished_jobs()), "nothing is reported while the service may use the memory"
            node.kill()
            engine.tier.store.drain()
            (result,) = engine.tier.get_finished_jobs()
            assert result.job_id == 7 and not result.success
            node.start()


def test_memory_that_the_service_cannot_map_is_copied(node, monkeypatch, caplog):
    monkeypatch.setattr(space, "file_of", lambda _address, _nbytes: None)
    with Engine([config(node)]) as engine:
        assert found(engine, store(engine, "a")) == "H" * 8
        assert engine.tier.store.region.copied
    assert "copied once more" in caplog.text


def test_a_service_is_found_or_started(store_dir, monkeypatch):
    path = store_dir / "s"
    own = {"type": "KvhoistTier", "module_path": "kvhoist.vllm", "path": str(path), "service": "auto"}
    given = {**own, "linger_s": LINGER_S, "capacity": "16MiB", "host_bytes": "4MiB", "direct_io": "prefer"}
    with Engine([given]) as first, Engine([given], replica=1) as second:
        assert first.tier.store.directories == second.tier.store.directories == [str(path / "kvhoist.sock")]
        keys = store(first, "a")
        assert found(second, keys) == "H" * 8


def test_no_service_at_the_socket_ends_the_start(tmp_path):
    socket = {"type": "KvhoistTier", "module_path": "kvhoist.vllm", "service": str(tmp_path / "no"), "capacity": "1MiB"}
    with pytest.raises(UnavailableError):
        Engine([socket])
    with pytest.raises(ConfigError, match="service"):
        Engine([{**socket, "service": "relative"}])


def test_a_store_of_its_own_is_the_default(store_dir):
    with Engine([vtier.tier_config(store_dir)]) as engine:
        assert type(engine.tier.store).__name__ == "ChunkStore"
        assert importlib.import_module("kvhoist._stores").tier_settings(
            {"path": str(store_dir), "capacity": "1MiB"}
        ).service == "off"


def exhausted(_thread):
    raise RuntimeError("can't start new thread")


def test_chunks_move_where_no_thread_can_be_started(node, monkeypatch):
    """Right bytes, and no load that runs after its end."""
    with Engine([config(node)]) as engine:
        monkeypatch.setattr(threading.Thread, "start", exhausted)
        keys = [*store(engine, "a"), *store(engine, "b")]
        for _ in range(3):
            assert found(engine, keys) == "H" * 16
        assert not engine.tier.counters


def test_a_scheduler_that_can_start_no_thread_gets_misses(store_dir, monkeypatch):
    """The service dies while threads are exhausted; when they are to be had again, it is started again."""
    path = store_dir / "s"
    given = {
        "type": "KvhoistTier", "module_path": "kvhoist.vllm", "path": str(path), "service": "auto",
        "linger_s": LINGER_S, "capacity": "16MiB", "host_bytes": "4MiB", "direct_io": "prefer",
    }  # fmt: skip
    with Engine([given]) as engine:
        keys, space = store(engine, "a"), engine.tier.store.cache
        (pid,) = service_pids(path)
        with monkeypatch.context() as none_to_be_had:
            none_to_be_had.setattr(threading.Thread, "start", exhausted)
            os.kill(pid, signal.SIGKILL)
            await_(lambda: not space.connected, "the end of the service")
            for _ in range(3):
                space._pause.end()
                space._keeper._next = 0.0
                engine.step()
                assert found(engine, keys) == "M" * 8
            assert not space._keeper._starting
        space._keeper._next = 0.0
        await_(lambda: (space._pause.end(), space.stats(), space.connected)[-1], "the next service")
        space._pause.end()
        engine.step()
        assert found(engine, keys) == "H" * 8


def test_a_service_that_hangs_costs_a_scheduler_one_short_question_a_pause(node, monkeypatch, caplog):
    with Engine([config(node, lookup_ms=30)]) as engine:
        space, asked = engine.tier.store.cache, []
        real = space._index.contains_each
        monkeypatch.setattr(space._index, "contains_each", lambda names: asked.append(names) or real(names))
        with node.hanging(), monkeypatch.context() as in_one_pause:
            # The clock of pauses stands still: all of these are in one.
            in_one_pause.setattr(pause, "time", SimpleNamespace(monotonic=lambda: 1000.0))
            space._pause.end()  # Of the start: such a short question may be late on a busy machine.
            for n in range(30):
                keys = keys_of(f"new {n}", 4)
                context = engine.request(keys)
                assert engine.lookup(context, keys) == "MMMM"
                engine.finish(context)
                engine.step()
            assert len(asked) == 1
            assert "has not answered for 30ms" in caplog.text, "and not the deadline of other calls"
        space._pause.end()
        engine.step()
        keys = store(engine, "a")
        await_(lambda: (space._pause.end(), engine.step(), found(engine, keys))[-1] == "H" * 8, "an answer")
