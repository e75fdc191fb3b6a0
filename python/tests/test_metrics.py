"""What is exported: the values, the format, the names on the board and in the rules, and the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from fnmatch import fnmatch
from pathlib import Path

import pytest

import kvhoist
import kvhoist.metrics

BLOCK = 4096
ROOT = Path(__file__).parents[2]
NAMES = {metric.name for metric in kvhoist.metrics.METRICS}
KINDS = {metric.name: metric.kind for metric in kvhoist.metrics.METRICS}


def metric_of(sample: str) -> str:
    """The name of a sample's metric: those of a histogram have longer ones."""
    name = re.sub("_(bucket|sum|count)$", "", sample)
    return name if KINDS.get(name) == "histogram" else sample


@pytest.fixture
def caches(store_dir):
    sizes = dict(block_bytes=BLOCK, host_blocks=4, direct_io="prefer")
    with (
        kvhoist.Cache(store_dir, namespace='a "b"\\\n', disk_blocks=8, **sizes) as first,
        kvhoist.Cache(namespace="memory", **sizes) as second,
    ):
        yield first, second


def values(name: str, cache) -> dict[str, float]:
    """Of one cache, by the label that is neither its namespace nor its number."""
    found = dict((metric.name, samples) for metric, samples in kvhoist.metrics.samples([cache]))[name]
    return {"/".join(v for k, v in s.labels.items() if k not in ("cache", "number")): s.value for s in found}


def test_figures_are_those_of_each_cache(caches):
    first, second = caches
    first.store([str(n) for n in range(6)], [bytes(BLOCK)] * 6)
    second.store(["x"], [bytes(BLOCK)])
    first.load(["5", "nowhere"], [bytearray(BLOCK), bytearray(BLOCK)])
    assert values("kvhoist_resident_blocks", first) == {"device": 0, "host": 4, "disk": 6, "remote": 0}
    assert values("kvhoist_slots", first) == {"device": 0, "host": 4, "disk": 8, "remote": 0}
    assert values("kvhoist_free_slots", first) == {"device": 0, "host": 0, "disk": 2, "remote": 0}
    assert values("kvhoist_resident_blocks", second) == {"device": 0, "host": 1, "disk": 0, "remote": 0}
    assert values("kvhoist_hits_total", first)["host"] == 1 and values("kvhoist_misses_total", first) == {"": 1}
    assert values("kvhoist_stores_total", first) == {"": 6} and values("kvhoist_stores_total", second) == {"": 1}
    assert values("kvhoist_retired", first) == {"device/": 0, "disk/": 0}
    assert values("kvhoist_dirty_blocks", first) == {"": 0}
    stats = first.stats()
    assert values("kvhoist_io_threads", first) == {"": 0 if stats["storage"] == "uring" else 16}
    second.close()
    assert values("kvhoist_slots", second) == {}


def test_durations_by_route_are_counted_in_the_buckets_of_a_service(caches):
    first, second = caches
    first.store([str(n) for n in range(6)], [bytes(BLOCK)] * 6)
    seconds = first.stats()["routes"]["host_to_disk"]["seconds"]
    assert seconds["count"] == 6 == sum(count for _, count in seconds["buckets"])
    assert 0 < seconds["p50"] <= seconds["p99"] <= 2 * seconds["sum"]
    ends = [end for end, _ in seconds["buckets"]]
    assert ends == [4e-6 * 2**n for n in range(23)] + [float("inf")]
    found = values("kvhoist_movement_seconds", first)
    assert found["host_to_disk/+Inf"] == 6 and "host_to_disk/0.000004" in found and "host_to_disk/16.777216" in found
    of_route = [found[f"host_to_disk/{end:.6f}"] for end in ends[:-1]]
    assert of_route == sorted(of_route), "each bucket counts those before it"
    assert not any(name.startswith("disk_to_") for name in found), "nothing was read"
    nothing = {"count": 0, "sum": 0.0, "p50": None, "p99": None, "buckets": []}
    assert second.stats()["routes"]["host_to_disk"]["seconds"] == nothing


def test_the_wear_of_drives_and_the_budget_of_writes(store_dir, monkeypatch):
    sizes = dict(block_bytes=BLOCK, host_blocks=8, disk_blocks=8, direct_io="prefer")
    limit = dict(write_policy="by_value", drive_writes_per_day=0.5, drive_bytes=1 << 40)
    with kvhoist.Cache(store_dir, namespace="worn", **sizes, **limit) as cache:
        assert all(path and 0 <= used and written >= 0 for path, used, written, _ in cache.drives())
        drives = [("/mnt/a", 0.25, 512_000, 4.5), ("/mnt/b", 0.0, 512_000, None)]
        monkeypatch.setattr(type(cache), "drives", lambda self: drives)
        assert values("kvhoist_write_budget_bytes", cache) == {"": 1 << 39}
        assert values("kvhoist_drive_used", cache) == {"/mnt/a": 0.25, "/mnt/b": 0}
        assert values("kvhoist_drive_years_left", cache) == {"/mnt/a": 4.5}
        assert values("kvhoist_drive_written_bytes_total", cache) == {"/mnt/a": 512_000, "/mnt/b": 512_000}


def test_write_back_shows_what_is_not_on_disk_yet(store_dir):
    sizes = dict(block_bytes=BLOCK, host_blocks=32, disk_blocks=32, direct_io="prefer", write_policy="write_back")
    with kvhoist.Cache(store_dir, **sizes) as cache:
        cache.store(["a", "b"], [bytes(BLOCK)] * 2)
        assert values("kvhoist_dirty_blocks", cache) == {"": 2}
        cache.sync()
        assert values("kvhoist_dirty_blocks", cache) == {"": 0}


def test_the_text_is_what_prometheus_reads(caches):
    parser = pytest.importorskip("prometheus_client.parser")
    client = pytest.importorskip("prometheus_client")
    caches[0].store(["a"], [bytes(BLOCK)])

    def figures(text):
        families = parser.text_string_to_metric_families(text)
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): (family.type, sample.value)
            for family in families
            for sample in family.samples
            if metric_of(sample.name) in NAMES and sample.labels["cache"] in ("memory", 'a "b"\\\n')
        }

    registry = client.CollectorRegistry()
    registry.register(kvhoist.metrics.Collector())
    ours, theirs = figures(kvhoist.metrics.text(list(caches))), figures(client.generate_latest(registry).decode())
    # On a drive that answers, without a limit.
    drives = {f"kvhoist_drive_{name}" for name in ("used", "years_left", "written_bytes_total")}
    optional = {"kvhoist_write_budget_bytes"} | drives
    assert ours == theirs and NAMES - optional <= {metric_of(name) for name, _ in ours}
    assert all(kind == KINDS[metric_of(name)] for (name, _), (kind, _) in ours.items())
    assert all((kind == "counter") == name.endswith("_total") for name, kind in KINDS.items())


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_the_board_and_the_rules_use_names_that_are_exported(file):
    text = (ROOT / "docs" / "monitoring" / file).read_text()
    used = {metric_of(name) for name in re.findall(r"\bkvhoist_\w+", text)}
    # The page is made of the code.
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    names = NAMES | set(re.findall(r"^\| `(kvhoist_service_\w+)`", page, re.MULTILINE))
    assert used <= names and len(used) > 5, used - names


def test_prometheus_takes_the_files_of_the_page_and_finds_those_of_the_unit_and_of_engines():
    text = (ROOT / "docs" / "monitoring.md").read_text()
    files = re.findall(r'"(\S+\.targets\.json)"', text)
    # patFileSDName of its discovery/file/file.go.
    pattern = re.compile(r"^[^*]*(\*[^/]*)?\.(json|yml|yaml|JSON|YML|YAML)$")
    assert files and all(pattern.match(file) for file in files), files
    for written in ["/run/kvhoist/kvhoist.sock.targets.json", "/mnt/nvme0/kvhoist/kvhoist.sock.targets.json"]:
        assert any(fnmatch(written, file) for file in files), written
    (job,) = re.findall(r"job_name: (\w+)", text)
    rules = (ROOT / "docs" / "monitoring" / "alerts.yml").read_text()
    assert f'expr: up{{job="{job}"}} == 0' in rules


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool; install it with: apt-get install prometheus"
)
def test_trials_that_fail_for_two_reasons_in_turn_are_one_alert(tmp_path):
    labels = {"instance": "node", "cache": "model", "number": "1"}
    reasons = ["unavailable: no answer", "throttled: the service answers SlowDown"]
    of = ",".join(f'{name}="{value}"' for name, value in labels.items())
    present = ["1 stale " * 20, "stale 1 " * 20]
    alert = {
        "exp_labels": labels | {"severity": "warning"},
        "exp_annotations": {
            "summary": "model on node: nothing is written to the remote store",
            "description": "The label reason of kvhoist_remote_read_only, kvhoist status and the log say why. It is tried "
            "again once a minute at least, and what waits is written then.",
        },
    }
    test = {
        "rule_files": [str(ROOT / "docs" / "monitoring" / "alerts.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'kvhoist_remote_read_only{{{of},reason="{reason}"}}', "values": scraped.strip()}
                    for reason, scraped in zip(reasons, present)
                ],
                "alert_rule_test": [
                    {"eval_time": at, "alertname": "KvhoistRemoteReadOnly", "exp_alerts": alerts}
                    for at, alerts in [("14m", []), ("16m", [alert])]
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps(test))
    ended = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_board_has_a_query_in_every_panel_and_no_panel_on_another():
    board = json.loads((ROOT / "docs" / "monitoring" / "grafana.json").read_text())
    taken = set()
    for panel in board["panels"]:
        assert all(re.search(r"\bkvhoist_\w+", target["expr"]) for target in panel["targets"]), panel["title"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def get(server, path) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_server_answers_until_it_is_closed(caches):
    with kvhoist.metrics.serve(0) as server:
        status, page = get(server, "/metrics?x=1")
        assert status == 200 and 'kvhoist_slots{cache="memory"' in page and r'cache="a \"b\"\\\n"' in page
        assert get(server, "/healthz") == (200, "ok\n")
        assert get(server, "/secret")[0] == 404
        with pytest.raises(OSError):
            kvhoist.metrics.serve(server.port)
    with pytest.raises(urllib.error.URLError):
        get(server, "/metrics")
    assert not any(thread.name == "kvhoist-metrics" for thread in threading.enumerate())


def sent(server, text: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(text)
    return connection


def test_connections_that_never_read_keep_nobody_from_the_figures(monkeypatch):
    monkeypatch.setattr(kvhoist.metrics, "_GRACE_S", 0.01)
    # More than the buffers of two sockets.
    monkeypatch.setattr(kvhoist.metrics, "text", lambda: "x" * (8 << 20))
    before = threading.active_count()
    with kvhoist.metrics.serve(0) as server:
        hostile = [sent(server, b"GET /metrics HTTP/1.0\r\n\r\n" if n % 2 else b"GET /me") for n in range(40)]
        for _ in range(3):
            assert get(server, "/healthz") == (200, "ok\n")
        assert threading.active_count() - before <= kvhoist.metrics._CONNECTIONS_MAX + 2, "one more may be ending"
        for connection in hostile:
            connection.close()


def test_no_connection_lasts_for_ever(monkeypatch):
    monkeypatch.setattr(kvhoist.metrics, "_EXCHANGE_S", 0.01)
    with kvhoist.metrics.serve(0) as server:
        for text in (b"", b"GET /metrics HTTP/1.0\r\nX: y"):
            assert sent(server, text).recv(1) == b"", "closed without an answer"


def test_requests_for_other_names_are_refused():
    with kvhoist.metrics.serve(0, hosts=["node7.example"]) as server:

        def status(host: str) -> int:
            url = f"http://127.0.0.1:{server.port}/metrics"
            try:
                with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host}), timeout=60) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                return error.code

        for host in ("127.0.0.1", "10.0.0.1:9401", "[::1]:9401", "LOCALHOST:1", "node7.example:9401", "Node7.example."):
            assert status(host) == 200, host
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1].evil.example", "::1", "1"):
            assert status(host) == 421, host


def test_health_says_what_is_out_of_service(caches, monkeypatch):
    at = [metric.name for metric in kvhoist.metrics.METRICS].index("kvhoist_read_only")
    samples = caches[0].samples()
    assert samples[at] == [("", [("tier", "disk"), ("reason", "")], 0.0)]
    samples[at] = [("", [("tier", "disk"), ("reason", "no space")], 1.0)]
    monkeypatch.setattr(type(caches[0]), "samples", lambda self: samples)
    with kvhoist.metrics.serve(0) as server:
        status, said = get(server, "/healthz")
        assert status == 503 and "memory: disk is read-only: no space" in said
        assert 'kvhoist_read_only{cache="memory"' in get(server, "/metrics")[1]


def test_the_module_explains_itself(store_dir):
    import doctest

    failed, tried = doctest.testmod(kvhoist.metrics)
    assert tried > 2 and failed == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_server_and_closes_it_at_once(caches):
    with kvhoist.metrics.serve(0) as server:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)  # Its end, where it waits for a thread that it has not.
                status = int(server._server.socket.fileno() != -1)
                server.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz") as answer:
            assert answer.status == 200, "the parent's goes on"
