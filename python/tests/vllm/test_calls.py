"""Random sequences of the scheduler's calls against a model of dicts: what is a hit, and every byte of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

vtier.boot()

from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: E402
from vtier import Engine, cell_of, keys_of, tier_config  # noqa: E402

CHUNKS = 6
ROWS = 12

prompts = st.integers(0, 3)


class SchedulerCalls(RuleBasedStateMachine):
    """Requests of four prompts come, store, load, are preempted by resets, and end, over restarts and damage.

    The model: which keys were stored, and which of those were damaged since. A key that never was stored is never a
    hit; one that was stored and not damaged is always one, for there is room for all on disk; one that was damaged is a
    miss or has the right bytes, and is a hit again once it was stored anew. A store of a key that the tier still holds
    writes nothing, so that damage which no load has met yet stays.
    """

    @initialize()
    def begin(self):
        self.folder = tempfile.mkdtemp(prefix="kvhoist-")
        self.engine = None
        self.stored: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.contexts: dict[int, object] = {}
        self.start()

    def start(self):
        self.engine = Engine([tier_config(self.folder, capacity="4MiB")], rows=ROWS)

    def context(self, prompt):
        if prompt not in self.contexts:
            self.contexts[prompt] = self.engine.request(keys_of(prompt, CHUNKS))
        return self.contexts[prompt]

    @rule(prompt=prompts, first=st.integers(0, CHUNKS - 1), count=st.integers(1, CHUNKS), settle=st.booleans())
    def store(self, prompt, first, count, settle):
        keys = keys_of(prompt, CHUNKS)
        held = {key for key in keys if self.engine.tier.store.contains(key)}
        new = self.engine.put(self.context(prompt), keys[first : first + count], touch=keys)
        if new:
            self.stored.update(new)
            self.damaged.difference_update(set(new) - held)
        if settle:
            self.engine.settle()
        else:
            self.engine.step()

    @rule(prompt=prompts)
    def load(self, prompt):
        keys, context = keys_of(prompt, CHUNKS), self.context(prompt)
        # Nothing under way holds rows of vLLM's memory: there is room for all.
        self.engine.settle()
        found = self.engine.resolve(context, keys)
        for key, result in zip(keys, found):
            assert result == "M" or key in self.stored, "a hit that was never stored"
            assert result == "H" or key not in self.stored - self.damaged, "a miss that was stored"
        self.engine.check(context, [key for key, result in zip(keys, found) if result == "H"])

    @rule(prompt=prompts)
    def look_without_waiting(self, prompt):
        keys = keys_of(prompt, CHUNKS)
        found = self.engine.lookup(self.context(prompt), keys)
        assert all(key in self.stored for key, result in zip(keys, found) if result in "HP")
        self.engine.step()

    @rule()
    def reset(self):
        self.engine.forget()
        assert not self.engine.tier.store.jobs.under_way

    @rule(prompt=prompts)
    def finish(self, prompt):
        context = self.contexts.pop(prompt, None)
        if context is not None:
            self.engine.settle()
            self.engine.finish(context)

    @rule(damaged=st.sets(st.tuples(prompts, st.integers(0, CHUNKS - 1)), max_size=4))
    def restart(self, damaged):
        self.engine.settle()
        self.engine.close()
        self.contexts.clear()
        (path,) = self.files()
        data = path.read_bytes()
        for prompt, n in damaged:
            key = keys_of(prompt, CHUNKS)[n]
            chunk = bytes(cell_of(key, 1, self.engine.cell_bytes).numpy())
            if chunk in data:
                data = data.replace(chunk, bytes(len(chunk)))
                self.damaged.add(key)
        path.write_bytes(data)
        self.start()

    def files(self):
        return list(Path(self.folder).rglob("kvhoist.store"))

    @precondition(lambda self: self.engine is not None)
    @invariant()
    def nothing_is_lost(self):
        tier, jobs = self.engine.tier, self.engine.tier.store.jobs._jobs.values()
        storing = {key for job in jobs if not job.is_load for one in job.submissions.values() for key in one.names}
        loading = {key for job in jobs if job.is_load for one in job.submissions.values() for key in one.names}
        told = {key for ended in tier.store.jobs._ended for key in (*ended.good, *ended.failed)}
        retried = {key for key, answer in tier._known.items() if answer.name == "RETRY"}
        lost = {key for key, answer in tier._known.items() if answer.name == "MISS"}
        assert loading <= retried <= loading | told
        for key in self.stored - self.damaged - storing:
            assert tier.store.contains(key), "a chunk was lost"
        assert lost <= self.damaged | storing | told, "a chunk that is sound was given up"

    def teardown(self):
        if self.engine is not None:
            self.engine.close()
            shutil.rmtree(self.folder, ignore_errors=True)


TestSchedulerCalls = SchedulerCalls.TestCase
TestSchedulerCalls.settings = settings(
    max_examples=int(os.environ.get("KVHOIST_EXAMPLES", 6)),
    # The few of a test run are the same ones each time; a run by hand looks elsewhere.
    derandomize="KVHOIST_EXAMPLES" not in os.environ,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
