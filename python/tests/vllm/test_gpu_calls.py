"""Random sequences of the scheduler's and the worker's calls to the GPU spec, against a dict of what was stored."""

from __future__ import annotations

import os
import shutil
import tempfile
from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

import vgpu  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule  # noqa: E402
from vgpu import Gate, Gpu, Served, names_of  # noqa: E402

from kvhoist.vllm.device_chunks import chunk_keys  # noqa: E402

PROMPTS = st.integers(0, 4)
LENGTHS = st.integers(1, 8)


def blocks_of(prompt: int, count: int) -> list[bytes]:
    """Prompts 0 and 1 begin alike, and so do 2 and 3."""
    return names_of(f"trunk {prompt // 2}", min(count, 3)) + names_of(f"branch {prompt}", max(count - 3, 0))


class Calls(RuleBasedStateMachine):
    """Serves prompts, of which nothing but what was computed under the same weights may ever come back."""

    per_chunk = 1

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="kvhoist-", dir=os.environ.get("KVHOIST_TEST_DIR"))
        #: Names that were stored by now, and those of them that were before the last reset.
        self.stored: set[bytes] = set()
        self.hidden: set[bytes] = set()
        self.flying: list[tuple] = []
        self.open()

    def open(self) -> None:
        # Less room than all prompts together need: they evict one another.
        given = vgpu.settings(self.folder, capacity="2MiB", host_bytes="512KiB", blocks_per_chunk=self.per_chunk)
        self.served = Served(given, Gpu(layers=2, head_size=128, heads=4, blocks=160))
        self.worker = self.served.worker.connector_worker.worker

    def land(self) -> None:
        for _, _, gate in self.flying:
            gate.open()
        self.served.settle()
        for ids, _, _ in self.flying:
            self.served._free += sum(ids, [])
        self.flying.clear()

    @rule(prompt=PROMPTS, count=LENGTHS)
    def serve(self, prompt: int, count: int) -> None:
        for _, _, gate in self.flying:
            gate.open()
        names = blocks_of(prompt, count)
        known = 0
        while known < count and names[known] in self.stored:
            known += 1
        # Every byte of what was loaded is compared there.
        loaded = self.served.serve(names)
        assert loaded <= known, "a block that was never computed"
        self.stored.update(names)

    @precondition(lambda self: len(self.flying) < 3)
    @rule(prompt=PROMPTS, count=LENGTHS)
    def compute_while_the_gpu_is_busy(self, prompt: int, count: int) -> None:
        names, ids = blocks_of(prompt, count), self.served.take(count + 1)
        request = self.served.request(names)
        if self.served.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
            self.land()
            self.served.matched(request)
        gate = Gate()
        self.worker._now = lambda: gate
        try:
            self.served.compute(request, ids, names, settle=False)
            self.served.step()
        finally:
            del self.worker._now
        self.flying.append((ids, names, gate))
        self.stored.update(names)

    @precondition(lambda self: self.flying)
    @rule()
    def settle(self) -> None:
        self.land()

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 2))
    def reuse_blocks(self, which: int) -> None:
        ids, _, _ = self.flying[which % len(self.flying)]
        request = self.served.request(names_of("another", len(ids[0]) - 1))
        scheduled = SimpleNamespace(req_id=request.request_id, block_ids=tuple(ids))
        if self.served.scheduler.get_num_new_matched_tokens(request, 0)[0] != 0:
            return
        # Events of a stream happen in its order.
        for _, _, gate in self.flying[: which % len(self.flying) + 1]:
            gate.open_soon()
        self.served.step([scheduled], {request.request_id: request.num_tokens})
        for block in sum(ids, []):
            self.served.gpu.fill(block, b"others")
        request.status = vgpu.requests.RequestStatus.FINISHED_ABORTED
        request.num_computed_tokens = 0
        self.served.scheduler.request_finished_all_groups(request, tuple(ids))
        self.served.step(finished=[request.request_id])

    @rule(prompt=PROMPTS, at=st.integers(0, 7))
    def lose(self, prompt: int, at: int) -> None:
        name = blocks_of(prompt, 8)[at]
        self.served.store.cache.remove(chunk_keys([self.served.manager._name(name + bytes(4))])[0])

    @rule(prompt=PROMPTS, count=LENGTHS)
    def serve_while_nothing_can_begin(self, prompt: int, count: int) -> None:
        self.land()

        def refuse(*_arguments):
            raise RuntimeError("no room")

        self.served.store._addresses = refuse
        try:
            assert self.served.serve(blocks_of(prompt, count)) == 0
        finally:
            del self.served.store._addresses

    @rule()
    def reset(self) -> None:
        self.land()
        assert self.served.scheduler.reset_cache()
        self.hidden |= self.stored
        self.stored = set()

    @rule()
    def restart(self) -> None:
        self.land()
        self.served.close()
        # What was stored after a reset is gone, and what was before it is back.
        self.stored |= self.hidden
        self.hidden = set()
        self.open()

    @invariant()
    def limits_hold(self) -> None:
        stats = self.served.store.cache.stats()
        disk = stats["tiers"]["disk"]
        assert disk["resident"] <= disk["slots"]
        assert not stats["disk_retired"]

    def teardown(self) -> None:
        self.land()
        self.served.store.cache.validate()
        self.served.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class CallsOfSeveralBlocks(Calls):
    """The same with chunks of two blocks."""

    per_chunk = 2


few = settings(
    max_examples=int(os.environ.get("KVHOIST_EXAMPLES", 6)),
    # The few of a test run are the same ones each time; a run by hand looks elsewhere.
    derandomize="KVHOIST_EXAMPLES" not in os.environ,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestCalls = Calls.TestCase
TestCalls.settings = few
TestCallsOfSeveralBlocks = CallsOfSeveralBlocks.TestCase
TestCallsOfSeveralBlocks.settings = few
