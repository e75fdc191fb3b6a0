"""Objects of any size in blocks of one: random sequences of calls against a model, over restarts and damage."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvhoist import Cache, UnavailableError
from kvhoist._native import chunk_keys
from kvhoist._stores import Place, tier_settings
from kvhoist.lmcache.objects import DIGEST_BYTES, ObjectStore, StoredObject
from kvhoist.vllm.jobs import ChunkJobs

BLOCK = 8192
ARENA = 64 * BLOCK
#: Where the arena is registered in two pieces: inside of a block, wherever that begins.
EDGE = 21 * 4096

#: Less than a block, whole blocks, and parts of one behind them; drives want multiples of 4096, others go another way.
SIZES = (4096, BLOCK, BLOCK + 4096, 3 * BLOCK, 3 * BLOCK + 4096, 5 * BLOCK - 100, 1)

names = st.integers(0, 9)
some_names = st.lists(names, min_size=1, max_size=6, unique=True)


def object_of(name: int) -> StoredObject:
    return StoredObject(hashlib.sha256(str(name).encode()).digest()[:DIGEST_BYTES], SIZES[name % len(SIZES)])


def bytes_of(one: StoredObject) -> bytes:
    return hashlib.shake_128(one.digest).digest(one.nbytes)


class Objects(RuleBasedStateMachine):
    """The model: which objects were stored, and which of those were damaged since.

    An object is there if it was stored and not removed, for there is room for all. One that was damaged may fail, and
    is not there after that. A loaded object has the right bytes, and no memory beside it changed.
    """

    @initialize()
    def begin(self):
        self.folder = tempfile.mkdtemp(prefix="kvhoist-", dir=os.environ.get("KVHOIST_TEST_DIR"))
        self.arena = mmap.mmap(-1, ARENA)
        self.stored: set[int] = set()
        self.damaged: set[int] = set()
        self.tasks = 0
        self.start()

    def start(self):
        import ctypes

        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.arena))
        self.ended, self.changed = {}, threading.Condition()
        config = tier_settings({"path": self.folder, "capacity": "4MiB", "direct_io": "prefer"})
        memory = [(self.address, EDGE, True), (self.address + EDGE, ARENA - EDGE, False)]
        self.store = ObjectStore(config, Place("test", "objects", {}), BLOCK, memory, self.end)

    def end(self, task):
        with self.changed:
            self.ended[task.job_id] = task
            self.changed.notify_all()

    def moved(self, begin) -> list[bool]:
        """Runs a task to its end."""
        self.tasks += 1
        begin(self.tasks)
        with self.changed:
            assert self.changed.wait_for(lambda: self.tasks in self.ended, 60), "a task never ended"
            ended = self.ended.pop(self.tasks)
        return [n in ended.good for n in range(len(ended.good) + len(ended.failed))]

    def lay_out(self, chosen: list[int], gap: int) -> list[int]:
        """Addresses of objects in the arena, one behind the other from `gap` pages on."""
        addresses, at = [], gap * 4096
        for name in chosen:
            addresses.append(self.address + at)
            at += -(-object_of(name).nbytes // 4096) * 4096
        assert at <= ARENA
        return addresses

    def memory(self, address: int, nbytes: int) -> slice:
        return slice(address - self.address, address - self.address + nbytes)

    @rule(chosen=some_names, gap=st.integers(0, 12), chained=st.booleans())
    def save(self, chosen, gap, chained):
        objects, addresses = [object_of(name) for name in chosen], self.lay_out(chosen, gap)
        self.arena[:] = b"\xff" * ARENA
        for one, address in zip(objects, addresses):
            self.arena[self.memory(address, one.nbytes)] = bytes_of(one)
        after = [None, *objects[:-1]] if chained else [None] * len(objects)
        assert all(self.moved(lambda task: self.store.submit_store(task, objects, addresses, after)))
        self.stored.update(chosen)

    @rule(chosen=some_names, gap=st.integers(0, 12))
    def load(self, chosen, gap):
        objects, addresses = [object_of(name) for name in chosen], self.lay_out(chosen, gap)
        self.arena[:] = b"\xee" * ARENA
        moved = self.moved(lambda task: self.store.submit_load(task, objects, addresses))
        expected = bytearray(b"\xee" * ARENA)
        for name, one, address, good in zip(chosen, objects, addresses, moved):
            assert not good or name in self.stored, "an object that was never stored"
            assert good or name not in self.stored - self.damaged, "a sound object failed"
            place = self.memory(address, one.nbytes)
            expected[place] = bytes_of(one) if good else self.arena[place]
            if not good:
                self.stored.discard(name)
                self.damaged.discard(name)
        assert self.arena[:] == expected, "other bytes, or beside an object"

    @rule(name=names)
    def remove(self, name):
        assert self.store.remove(object_of(name)) or name not in self.stored
        self.stored.discard(name)
        self.damaged.discard(name)

    @rule(damaged=st.sets(names, max_size=3))
    def restart(self, damaged):
        self.store.close()
        (path,) = Path(self.folder).rglob("kvhoist.store")
        data = path.read_bytes()
        for name in damaged & self.stored:
            end = bytes_of(object_of(name))[-BLOCK // 4 :]
            if len(end) > 16 and end in data:
                data = data.replace(end, bytes(len(end)))
                self.damaged.add(name)
        path.write_bytes(data)
        self.start()

    @invariant()
    def what_is_there_was_stored(self):
        there = self.store.contains_each([object_of(name) for name in range(10)])
        assert {name for name in range(10) if there[name]} == self.stored

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)


TestObjects = Objects.TestCase
TestObjects.settings = settings(
    max_examples=int(os.environ.get("KVHOIST_EXAMPLES", 15)),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Misled:
    """A queue that also gives the end of a submission that nobody made, first."""

    def __init__(self, queue):
        self._queue = queue
        self.given = False

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def drain(self):
        done = self._queue.drain()
        if done and not self.given:
            self.given, done = True, [(1 << 40, [True]), *done]
        return done


def test_every_end_is_reported_whatever_became_of_another(store_dir, caplog):
    """A submission of nobody's, and a report that raises: the tasks behind them end all the same."""
    import ctypes

    arena, ended, changed = mmap.mmap(-1, ARENA), [], threading.Condition()

    def end(task):
        with changed:
            ended.append(task.job_id)
            changed.notify_all()
        if task.job_id == 1:
            raise KeyError("an engine's own trouble")

    address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    config = tier_settings({"path": str(store_dir), "capacity": "4MiB", "direct_io": "prefer"})
    store = ObjectStore(config, Place("test", "objects", {}), BLOCK, [(address, ARENA, False)], end)
    store.jobs.queue = queue = Misled(store.jobs.queue)
    for task in range(1, 6):
        store.submit_store(task, [object_of(task)], [address + task * 8 * BLOCK], [None])
    with changed:
        assert changed.wait_for(lambda: len(ended) == 5, 60), "a task never ended"
    assert queue.given and sorted(ended) == [1, 2, 3, 4, 5]
    assert "an engine's own trouble" in caplog.text and str(1 << 40) in caplog.text
    store.close()


def test_every_job_ends_whatever_became_of_a_submission(store_dir):
    with Cache(None, block_bytes=4096, host_blocks=64) as cache:
        jobs = ChunkJobs(cache)
        jobs.jobs.queue = queue = Misled(jobs.jobs.queue)
        for job in range(5):
            name, block = bytes([job]) * 36, bytes(4096)
            jobs.begin(job, False, [([name], lambda q, n=name, b=block: q.submit_store(chunk_keys([n]), [b]))])
        jobs.drain()
        ended = sorted((one.job_id, len(one.good)) for one in jobs.finished())
        assert queue.given and ended == [(job, 1) for job in range(5)]


def test_a_thread_that_cannot_be_started_ends_the_start(store_dir, monkeypatch):
    def exhausted(_thread):
        raise RuntimeError("can't start new thread")

    arena = mmap.mmap(-1, ARENA)
    config = tier_settings({"path": str(store_dir), "capacity": "4MiB", "direct_io": "prefer"})

    def opened():
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        return ObjectStore(config, Place("test", "objects", {}), BLOCK, [(address, ARENA, False)], print)

    with monkeypatch.context() as none_to_be_had:
        none_to_be_had.setattr(threading.Thread, "start", exhausted)
        with pytest.raises(UnavailableError, match="ulimit -u"):
            opened()
    opened().close()  # It has left nothing open.
