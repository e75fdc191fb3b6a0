"""What an operator sees of an engine's caches without writing Python: lines in the log, an address, and its file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from nodes import LINGER_S, await_, end_services

import kvhoist
from kvhoist import _figures, service
from kvhoist._store_settings import StoreSettings
from kvhoist._stores import Place, open_store, tier_settings
from kvhoist.service import ServiceSettings

ROOT = Path(__file__).parents[2]
BLOCK = 4096


def python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_figures_are_there_after_import_kvhoist():
    assert "kvhoist_hits_total" in python("import kvhoist; print(kvhoist.metrics.text())")
    python("import kvhoist\ntry: kvhoist.metrix\nexcept AttributeError as error: assert 'metrix' in str(error)\nelse: raise 1")


def stats(host=0, disk=0, misses=0, read=0, written=0, evictions=0) -> dict:
    tiers = {
        "host": {"hits": host},
        "disk": {"hits": disk, "bytes_in": written, "evictions": evictions},
    }
    errors = {"checksum_failures": 0, "read_errors": 0, "write_errors": 0}
    return {"tiers": tiers, "misses": misses, "read_bytes": read, **errors}


def test_a_line_now_and_then_says_what_happened_since_the_one_before(caplog):
    caplog.set_level(logging.INFO)
    due, found = [], {}
    lines = _figures.Lines(lambda seconds, call: due.append((seconds, call)))

    def closed():
        raise kvhoist.ClosedError("the cache is closed")

    def said(**figures_now) -> list[str]:
        """What is logged a minute after two batches, without a batch since."""
        found["stats"] = stats(**figures_now)
        for _ in range(2):
            lines.turn(lambda: {"closed": closed, "kv": lambda: found["stats"]})
        assert not caplog.records, "it is not due"
        ((seconds, call),) = due
        assert seconds == 60
        due.clear()
        call()
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    gib = 1 << 30
    assert said(host=5, disk=7, misses=2, read=gib, written=3 * gib, evictions=4) == [
        "kvhoist: pool kv in the last 60 s: 5 hits in host memory, 7 on disk, 2 misses; 1.00 GiB read, 3.00 GiB written; "
        "4 evictions"
    ]
    assert said(host=5, disk=7, misses=2, read=gib, written=3 * gib, evictions=4) == [], "nothing happened"
    assert "1 hits in host memory, 0 on disk, 0 misses; 1.00 GiB read" in said(
        host=6, disk=7, misses=2, read=2 * gib, written=3 * gib, evictions=4
    )[0]
    assert "2 hits in host memory" in said(host=2, disk=7, misses=2, read=2 * gib, written=3 * gib, evictions=4)[0]


def test_what_was_before_the_first_batch_is_in_no_line(caplog):
    caplog.set_level(logging.INFO)
    due = []
    lines = _figures.Lines(lambda _seconds, call: due.append(call))
    lines.begin("kv", stats(host=500, disk=70))
    lines.turn(lambda: {"kv": lambda: stats(host=501, disk=70)})
    due.pop()()
    assert "pool kv in the last 60 s: 1 hits in host memory, 0 on disk" in caplog.text


def test_the_line_comes_though_no_batch_follows(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(_figures, "EVERY_S", 0.01)
    _figures.Lines().turn(lambda: {"kv": lambda: stats(host=5)})
    await_(lambda: "pool kv in the last 0 s: 5 hits in host memory" in caplog.text, "the line")


def test_a_cache_and_a_space_have_what_the_lines_are_made_of(store_dir):
    with kvhoist.Cache(store_dir, block_bytes=BLOCK, capacity="4MiB", direct_io="prefer", host_blocks=1) as cache:
        cache.store(["a", "b", "c"], [bytes(BLOCK)] * 3)
        counts = _figures._counts(cache.stats())
        assert counts["written"] == 3 * BLOCK and counts["misses"] == 0
        cache.load(["a", "x"], [bytearray(BLOCK)] * 2)
        counts = _figures._counts(cache.stats())
        assert (counts["disk"], counts["misses"], counts["read"]) == (1, 1, BLOCK)


def test_the_port_is_a_setting_and_a_variable():
    given = {"path": "/a", "capacity": "1GiB"}
    assert StoreSettings.load(given, {}).metrics_port is None
    assert StoreSettings.load(given, {"KVHOIST_METRICS": "9400"}).metrics_port == 9400
    assert StoreSettings.load({**given, "metrics_port": 9500}, {"KVHOIST_METRICS": "9400"}).metrics_port == 9500


def test_a_wrong_variable_is_called_by_its_own_name():
    given = {"path": "/a", "capacity": "1GiB"}
    for variable, wrong in (("KVHOIST_METRICS", "bogus"), ("KVHOIST_HOST_BYTES", "1 apple"), ("KVHOIST_DEADLINE_MS", "0")):
        with pytest.raises(kvhoist.ConfigError, match=f"^{variable}: found '?{wrong}'?, expected") as refused:
            StoreSettings.load(given, {variable: wrong})
        assert refused.value.field == variable
    with pytest.raises(kvhoist.ConfigError, match="^metrics_port: found 'bogus'"):
        StoreSettings.load({**given, "metrics_port": "bogus"}, {"KVHOIST_METRICS": "9400"})


def test_a_process_of_an_engine_serves_its_figures_at_the_port_of_its_rank(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(_figures, "_servers", {})
    with kvhoist.metrics.serve(0) as other:
        _figures.serve(other.port - 3, rank=3)
        assert "choose another metrics_port" in caplog.text and not _figures._servers, "the engine starts all the same"
    _figures.serve(None)
    assert not _figures._servers
    _figures.serve(0, rank=1)
    _figures.serve(0, rank=1)
    (server,) = _figures._servers.values()
    with server, urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        assert b"kvhoist_hits_total" in answer.read()
    assert f"http://127.0.0.1:{server.port}/metrics" in caplog.text


def test_the_port_of_a_rank_is_the_setting_and_its_number(monkeypatch):
    with kvhoist.metrics.serve(0) as stand_in:
        for port, rank, wanted in ((9400, 0, 9400), (9400, 7, 9407), (0, 7, 0)):
            asked = []
            monkeypatch.setattr(_figures, "_servers", {})
            monkeypatch.setattr(kvhoist.metrics, "serve", lambda at, asked=asked: asked.append(at) or stand_in)
            _figures.serve(port, rank)
            assert asked == [wanted], (port, rank)


def test_a_store_serves_the_figures_of_its_rank(store_dir, monkeypatch):
    served = []
    monkeypatch.setattr(_figures, "serve", lambda port, rank=0: served.append((port, rank)))
    config = tier_settings({"path": str(store_dir), "capacity": "16MiB", "direct_io": "prefer", "metrics_port": 9400})
    for rank in (0, 3):
        open_store(config, Place("model", f"dp{rank}", {}, rank=rank), BLOCK).close()
    assert served == [(9400, 0), (9400, 3)]


def test_a_store_of_vllm_or_lmcache_serves_the_figures_of_its_process(store_dir, monkeypatch):
    monkeypatch.setattr(_figures, "_servers", {})
    config = tier_settings({"path": str(store_dir), "capacity": "16MiB", "direct_io": "prefer", "metrics_port": 0})
    with open_store(config, Place("model", "dp1", {}, rank=1), BLOCK):
        (server,) = _figures._servers.values()
        with server, urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
            assert b"kvhoist_slots" in answer.read()


def test_a_service_that_was_started_has_its_address_in_a_known_file(store_dir):
    settings = ServiceSettings((str(store_dir),), 64 << 20, 8 << 20, linger_s=LINGER_S, direct_io="prefer")
    path = service.find_or_start(settings)
    with kvhoist.connect(path, space="a", block_bytes=BLOCK):
        (entry,) = json.loads((store_dir / "kvhoist.sock.targets.json").read_text())
        assert entry["labels"] == {"socket": path}
        with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=60) as answer:
            assert b'kvhoist_slots{cache="a"' in answer.read()
    end_services(store_dir)
    assert not os.path.exists(settings.targets())


def test_the_wheel_has_the_command(store_dir):
    """What its operator would have to build otherwise: one line for each is enough to see that it is that command."""
    with kvhoist.Cache(store_dir, block_bytes=BLOCK, capacity="4MiB", direct_io="prefer", namespace="model") as cache:
        cache.store(["a"], [bytes(BLOCK)])
    command = [sys.executable, "-m", "kvhoist"]
    environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}

    def run(*arguments: str) -> str:
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "model" in run("inspect", str(store_dir))
    assert "model" in run("ls", str(store_dir))
    assert "payloads good                     1" in run("verify", str(store_dir))
    settings = ServiceSettings((str(store_dir / "service"),), 64 << 20, 8 << 20, linger_s=LINGER_S, direct_io="prefer")
    path = service.find_or_start(settings)
    with kvhoist.connect(path, space="a", block_bytes=BLOCK):
        assert "space" in run("status", "--socket", path)
        assert "hits/s" in run("top", "--socket", path, "--count", "1")
    assert "removed" in run("wipe", "--yes", str(store_dir))
    assert not (store_dir / "kvhoist.store").exists()
