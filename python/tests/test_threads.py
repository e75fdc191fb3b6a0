"""A system that has no thread to give: nothing hangs, nothing is done twice or after its end, nothing raises into an
engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from nodes import BLOCK, LINGER_S, PATIENCE_S, Node, await_, block, key, service_pids

import kvhoist
from kvhoist import service
from kvhoist._store_settings import StoreSettings
from kvhoist.service import pause, space, supervisor


def exhausted(*_arguments, **_more):
    raise RuntimeError("can't start new thread")


@pytest.fixture
def node(store_dir):
    with Node(store_dir) as node:
        yield node


def test_a_queue_moves_blocks_where_no_thread_can_be_started(node):
    """A real limit, in a process without privileges: what is submitted moves, and no second queue is to be had."""
    code = f"""
import os, resource, select, threading, kvhoist
BLOCK = {BLOCK}
def connected():
    return kvhoist.connect({node.socket!r}, space="tests", block_bytes=BLOCK, capacity="24MiB", host_bytes="2MiB")
client = connected()
pool = kvhoist.SharedMemory(8 * BLOCK)
region, queue = client.register_host(pool), client.queue()
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
    raise SystemExit("a thread could be started")
except RuntimeError:
    pass
def ends(tickets):
    results = {{}}
    while len(results) < len(tickets):
        assert select.select([queue.event_fd], [], [], 60)[0], "a submission has not ended"
        results.update(queue.drain())
    assert results.keys() == set(tickets), "a completion of nobody's"
    return [results[ticket] for ticket in tickets]
keys = [f"{{n:064x}}" for n in range(48)]
data = [n.to_bytes(4, "little") * (BLOCK // 4) for n in range(48)]
assert ends([queue.submit_store([k], [d]) for k, d in zip(keys, data)]) == [[True]] * 48
out = [bytearray(BLOCK) for _ in keys]
assert ends([queue.submit_load([k], [o]) for k, o in zip(keys, out)]) == [[True]] * 48
assert [bytes(o) for o in out] == data
places = [(region.address + n * BLOCK, BLOCK) for n in range(8)]
assert ends([queue.submit_load(keys[:8], places)]) == [[True] * 8] and bytes(pool.view) == b"".join(data[:8])
assert queue.outstanding == 0
for what in (client.queue, connected):
    try:
        what()
        raise SystemExit("a thread could be started")
    except kvhoist.IoError as error:
        assert "thread" in str(error), error
client.close()
print("done")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_a_submission_that_is_refused_does_nothing(node):
    with kvhoist.connect(node.socket, space="tests", block_bytes=BLOCK, capacity="24MiB", host_bytes="2MiB") as client:
        queue = client.queue(1)
        first = queue.submit_store([key(1)], [block(1)])
        for _ in range(3):
            with pytest.raises(kvhoist.BusyError, match="depth"):
                queue.submit_store([key(2)], [block(2)])
        with pytest.raises(kvhoist.ArgumentError):
            queue.submit_store([key(2)], 7)
        done = []
        await_(lambda: done.extend(queue.drain()) or done, "the first")
        assert done == [(first, [True])] and queue.outstanding == 0
        assert client.contains_each([key(1), key(2)]) == [True, False]
        # Memory that is not the client's: the submission ends with the error, and others with it in one drain end too.
        queue = client.queue()
        wrong, right = queue.submit_load([key(1)], [(4096, BLOCK)]), queue.submit_load([key(1)], [bytearray(BLOCK)])
        done = {}
        await_(lambda: done.update(queue.drain()) or len(done) == 2, "both")
        assert isinstance(done[wrong][0], kvhoist.ArgumentError) and done[right] == [True]
    with pytest.raises(kvhoist.ClosedError):
        queue.submit_load([key(1)], [bytearray(BLOCK)])


def test_a_queue_that_is_dropped_leaves_the_memory_of_its_loads(node):
    """The service hangs in the middle: dropping the queue does not wait for it."""
    with kvhoist.connect(node.socket, space="tests", block_bytes=BLOCK, capacity="24MiB", host_bytes="2MiB") as client:
        assert client.store([key(1)], [block(1)]) == [True]
        with node.hanging():
            queue, out = client.queue(), [bytearray(BLOCK) for _ in range(32)]
            for one in out:
                queue.submit_load([key(1)], [one])
            held = [queue]
            del queue
            dropping = threading.Thread(target=held.clear)
            dropping.start()
            dropping.join(PATIENCE_S)
            assert not dropping.is_alive(), "a drop waits for a service that hangs"
            for one in out:
                one.clear()  # No export is left.
        assert client.get(key(1)) == block(1)


def keeper(monkeypatch, store_dir):
    """A keeper whose service cannot be started, with a clock of the test's."""
    clock, tries = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0), []

    def start(_settings):
        tries.append(clock.now)
        if len(tries) > 1:
            raise kvhoist.UnavailableError("service: it ended")
        return "socket"

    monkeypatch.setattr(supervisor, "find_or_start", start)
    monkeypatch.setattr(supervisor, "time", clock)
    config = StoreSettings.load({"path": str(store_dir), "capacity": "1MiB"}, {})
    return supervisor.ServiceSupervisor(config), clock, tries


@pytest.mark.parametrize("service", ["auto", "/run/a.sock"])
def test_a_policy_that_a_service_does_not_have_is_warned_of(monkeypatch, store_dir, caplog, service):
    monkeypatch.setattr(supervisor, "find_or_start", lambda _settings: "socket")
    given = {"path": str(store_dir), "capacity": "1MiB", "service": service}
    for policy in ("write_through", "by_value"):
        supervisor.ServiceSupervisor(StoreSettings.load({**given, "write_policy": policy}, {}))
    assert "write_policy" not in caplog.text
    supervisor.ServiceSupervisor(StoreSettings.load({**given, "write_policy": "write_back"}, {}))
    (record,) = (record for record in caplog.records if "write_policy" in record.getMessage())
    assert record.levelname == "WARNING"
    assert "write_policy: found 'write_back', expected 'write_through' or 'by_value' beside" in record.getMessage()


def test_a_service_is_started_again_when_threads_are_to_be_had_again(monkeypatch, store_dir, caplog):
    kept, clock, tries = keeper(monkeypatch, store_dir)
    with monkeypatch.context() as none_to_be_had:
        none_to_be_had.setattr(threading.Thread, "start", exhausted)
        for _ in range(20):
            clock.now += 100
            kept.missed()
    assert "can't start new thread" in caplog.text and len(tries) == 1
    clock.now += 100
    kept.missed()
    await_(lambda: len(tries) == 2 and not kept._starting, "another attempt")


def test_a_service_that_cannot_be_started_is_tried_less_and_less_often(monkeypatch, store_dir):
    kept, clock, tries = keeper(monkeypatch, store_dir)
    for _ in range(4000):
        clock.now += 0.25
        kept.missed()
        await_(lambda: not kept._starting, "the end of an attempt")
    between = [later - earlier for earlier, later in zip(tries[1:], tries[2:])]
    assert between[:8] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_started_service_needs_no_thread_to_watch_it(monkeypatch, store_dir, caplog):
    monkeypatch.setattr(threading.Thread, "start", exhausted)
    settings = service.ServiceSettings((str(store_dir),), 64 << 20, 8 << 20, direct_io="prefer", linger_s=LINGER_S)
    assert service.listens(service.find_or_start(settings)) and "will not be logged" in caplog.text
    for pid in service_pids(store_dir):
        os.kill(pid, signal.SIGTERM)
    await_(lambda: not [pid for pid in service_pids(store_dir) if not is_zombie(pid)], "its end")


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def space_of(node, **more):
    given = {"service": node.socket, "capacity": "24MiB", "host_bytes": "4MiB", **more}
    return space.ServiceSpace(StoreSettings.load(given, {}), "space", BLOCK)


def test_a_service_that_hangs_costs_one_short_question_a_pause(node, monkeypatch, caplog):
    space, asked, keys = space_of(node, lookup_ms=30), [], [bytes([n]) * 32 for n in range(8)]
    real, space._index = space._index, SimpleNamespace()
    for name in ("contains_each", "touch", "release", "keep", "stats"):
        call = getattr(real, name)
        setattr(space._index, name, lambda *a, call=call, name=name, **more: (asked.append(name), call(*a, **more))[1])
    with node.hanging(), monkeypatch.context() as in_one_pause:
        for name, call, miss in (
            ("contains_each", lambda: space.contains_each(keys), [False] * 8),
            ("touch", lambda: space.touch(keys), None), ("release", lambda: space.release(keys), 0),
            ("keep", lambda: space.keep(keys, 1.0), 0),
        ):  # fmt: skip
            asked.clear()
            space._pause.end()
            # The clock stands still: all of these are in one pause.
            in_one_pause.setattr(pause, "time", SimpleNamespace(monotonic=lambda: 1000.0))
            assert all(call() == miss for _ in range(50)) and asked == [name]
        asked.clear()
        space._pause.end()
        assert space.stats()["tiers"]["disk"]["slots"] > 0 and asked == ["stats"], "the last figures"
        assert caplog.text.count("has not answered for 30ms") == 5, "and not the deadline of other calls"
        with pytest.raises(kvhoist.UnavailableError, match="a moment ago"):
            space.remove(keys[0])
    space._index = real
    space._client.store(keys[:1], [block(1)])
    await_(lambda: (space._pause.end(), space.contains(keys[0]))[1], "an answer")
    space.close()


def test_a_question_ends_in_its_own_time(node):
    options = dict(space="tests", block_bytes=BLOCK, capacity="24MiB", host_bytes="2MiB", ask_ms=20)
    with pytest.raises(kvhoist.ConfigError, match="ask_ms"):
        kvhoist.connect(node.socket, **{**options, "ask_ms": 0})
    with kvhoist.connect(node.socket, **options) as client:
        with node.hanging():
            for ask in (client.match_prefix, client.contains_each, client.touch, client.release):
                # Other calls would wait for 30 s.
                with pytest.raises(kvhoist.DeadlineError, match="ask_ms"):
                    ask([key(1)])
            with pytest.raises(kvhoist.DeadlineError):
                client.stats(briefly=True)
        assert client.stats()["stores"] == 0


def test_a_service_that_hangs_is_left_alone_for_longer_each_time(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(pause, "time", clock)
    one, late, gone = pause.Pause(), kvhoist.DeadlineError("late"), kvhoist.UnavailableError("gone")
    lengths = []
    for _ in range(6):
        assert not one.is_on()
        one.begin(late)
        began = clock.now
        while one.is_on():
            clock.now += 0.25
        lengths.append(clock.now - began)
    assert lengths == [1, 2, 4, 8, 10, 10]
    one.begin(gone)
    clock.now += 1.25
    assert not one.is_on(), "one that is away costs nothing to ask"
    clock.now += 60
    one.begin(late)
    clock.now += 1.25
    assert not one.is_on(), "it has answered in between"
    one.begin(late)
    one.end()
    assert not one.is_on()
