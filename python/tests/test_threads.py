"""A system that has no thread to give: nothing hangs, nothing is done twice or after its end, nothing raises into an
engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nodes import PATIENCE_S, Node, await_
from test_service import BLOCK, block, key

import kvhoist


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
