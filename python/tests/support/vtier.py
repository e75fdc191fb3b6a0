"""vLLM's real tiering manager and shared memory, from an unpacked wheel, without a server, a model or a GPU.

`KVHOIST_VLLM` names the folder of one unpacked version; the version is in the folder's name (`vllm-0.33.0`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import os
import re
import select
from pathlib import Path
from types import SimpleNamespace

import engines
from engines import vllm

ROOT = os.environ.get("KVHOIST_VLLM", "")

_engines = itertools.count()


def missing() -> str | None:
    """Why these tests cannot run here, if they cannot."""
    return engines.missing("KVHOIST_VLLM", "vllm")


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", Path(ROOT).name)[:3])


_modules: SimpleNamespace | None = None


def boot() -> SimpleNamespace:
    """Imports the modules, once."""
    global _modules
    if _modules is None:
        vllm.boot(ROOT)
        offload = "vllm.v1.kv_offload."
        names = {
            "base": "base", "config": "config", "factory": "factory", "tiering": "tiering.base",
            "tiers": "tiering.factory", "manager": "tiering.manager", "spec": "tiering.spec",
            "region": "cpu.shared_offload_region",
        }  # fmt: skip
        _modules = SimpleNamespace(**{name: importlib.import_module(offload + path) for name, path in names.items()})
    return _modules


def made(cls, **values):
    """A dataclass of vLLM's from those of `values` that this version has."""
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in known})


def tier_config(path, capacity="16MiB", **more) -> dict:
    """What an operator writes for the tier."""
    return {
        "type": "KvhoistTier", "module_path": "kvhoist.vllm", "path": str(path), "capacity": capacity,
        "host_bytes": "4MiB", "direct_io": "prefer", **more,
    }  # fmt: skip


def key_of(name, group: int = 0) -> bytes:
    """The key of the chunk called `name`."""
    return hashlib.sha256(str(name).encode()).digest() + group.to_bytes(4, "big")


def keys_of(prompt, count: int, group: int = 0) -> list[bytes]:
    return [key_of(f"{prompt}/{n}", group) for n in range(count)]


def cell_of(key: bytes, rank: int, nbytes: int):
    """What a worker has under a key."""
    import torch

    data = hashlib.shake_128(key + bytes([rank])).digest(nbytes)
    return torch.frombuffer(bytearray(data), dtype=torch.int8)


class Engine:
    """One EngineCore's side of KV offloading, and the memory of its workers.

    Methods call vLLM's manager in the order in which the scheduler does.
    """

    def __init__(
        self, tiers: list[dict], *, rows=16, workers=2, cell_bytes=4096, groups=1, replica=0, model="meta/tiny",
        agnostic=False, canonical=False, longest=0, **more,
    ):  # fmt: skip
        """`agnostic`: vLLM says that a block's bytes do not depend on the number of workers; `canonical`: its layout is
        the one of which that is true."""
        modules = self.modules = boot()
        config = modules.config
        self.name = f"kvhoist-test-{os.getpid()}-{next(_engines)}"
        self.cell_bytes = cell_bytes
        row_bytes = -(-cell_bytes * workers // 4096) * 4096
        extra = {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": tiers, **more
        }  # fmt: skip
        self.spec = modules.factory.OffloadingSpecFactory.create_spec(
            made(
                config.OffloadingConfig,
                groups=tuple(
                    made(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=(f"l{n}",), group_id=n)
                    for n in range(groups)
                ),
                worker_kv_bytes_per_block=cell_bytes,
                enable_kv_cache_events=bool(more.get("events")),
                extra_config=extra,
                engine_id=self.name,
                model=made(config.OffloadingModelConfig, name=model, dtype="bfloat16", max_model_len=longest),
                cache=config.OffloadingCacheConfig(16, 1),
                parallel=config.OffloadingParallelConfig(
                    0, workers, workers, 1, 1, 1, replica, replica + 1, None, agnostic
                ),
                canonical_layout=canonical,
                kv_cache_layout="LBHNC",
            )
        )
        self.extra = extra
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        # Each worker maps the same file, as its process would.
        region = modules.region.SharedOffloadRegion
        self.regions = [region(self.name, rows, rank, row_bytes, cell_bytes) for rank in range(workers)]
        self.views = [region.create_next_worker_view(cell_bytes) for region in self.regions]
        self._requests = itertools.count()

    # What the scheduler does for a request

    def request(self, *prefixes: list[bytes], **more):
        """A request whose prompt has these keys, a list for each KV cache group."""
        context = self.modules.base.ReqContext(req_id=f"request-{next(self._requests)}", **more)
        if hasattr(context, "set_offload_key_position"):
            for keys in prefixes:
                for n, key in enumerate(keys):
                    context.set_offload_key_position(key, (n + 1) * 16)
        self.manager.on_new_request(context)
        return context

    def finish(self, context) -> None:
        self.manager.on_request_finished(context)

    def prepare(self, context, keys: list[bytes], touch: list[bytes] | None = None):
        """Takes rows for chunks and has the workers write them; the keys that were new, or None without room."""
        prepared = self.manager.prepare_store(keys, context)
        if prepared is None:
            return None
        if version() < (0, 33):
            self.manager.touch(keys if touch is None else touch, context)
        for key, row in zip(prepared.keys_to_store, rows_of(prepared.store_spec)):
            for rank, view in enumerate(self.views):
                view[row] = cell_of(key, rank, self.cell_bytes)
        return prepared.keys_to_store

    def put(self, context, keys: list[bytes], touch: list[bytes] | None = None):
        """Stores chunks of a request; the keys that were new, or None where there was no room."""
        new = self.prepare(context, keys, touch)
        if new:
            self.manager.complete_store(set(new), context)
        return new

    def step(self, new=(), preempted=()) -> None:
        """The end of a scheduler's step, with the names of requests that it scheduled first, or preempted."""
        self.manager.on_schedule_end(self.modules.base.ScheduleEndContext(list(new), preempted))

    def settle(self) -> None:
        """Steps until no job is under way."""
        while True:
            self.step()
            if not self.manager.has_pending_work():
                return
            self.wait()

    def wait(self) -> None:
        """Returns when a job of the tier may have ended."""
        jobs = self.tier.store.jobs
        if jobs.under_way and not jobs.has_ended:
            select.select([jobs.queue.event_fd], [], [])

    def lookup(self, context, keys: list[bytes]) -> str:
        """What the manager says of each key, as letters: H(it), P(ending), R(etry), M(iss)."""
        names = {"HIT": "H", "HIT_PENDING": "P", "RETRY": "R", "MISS": "M"}
        return "".join(names[self.manager.lookup(key, context).name] for key in keys)

    def resolve(self, context, keys: list[bytes]) -> str:
        """Looks up as a waiting request does, step after step, until nothing is pending."""
        while True:
            found = self.lookup(context, keys)
            self.step()
            if not set(found) & set("PR"):
                return found
            self.wait()

    def check(self, context, keys: list[bytes]) -> None:
        """Every byte of chunks that are HIT."""
        import torch

        rows = rows_of(self.manager.prepare_load(keys, context))
        for key, row in zip(keys, rows):
            for rank, view in enumerate(self.views):
                assert torch.equal(view[row], cell_of(key, rank, self.cell_bytes)), (key.hex(), rank, row)
        self.manager.complete_load(keys, context)

    # The rest

    def forget(self) -> None:
        """Empties vLLM's own memory, as sleep and weight updates do."""
        self.manager.reset_cache()
        self.flush()

    def flush(self) -> None:
        """Steps until vLLM's jobs from before a reset have ended."""
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()
        else:
            for _ in range(3):
                self.step()

    def close(self) -> None:
        self.manager.shutdown()
        self.views.clear()
        for region in self.regions:
            region.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()


def rows_of(spec) -> list[int]:
    """The rows of a CPULoadStoreSpec."""
    rows = getattr(spec, "chunk_ids", None)
    return [int(row) for row in (spec.block_ids if rows is None else rows)]


def stored(engine, prompt, count, at_a_time=4):
    """Stores a prompt's chunks, some in each step, and lets vLLM forget them; the keys."""
    keys = keys_of(prompt, count)
    context = engine.request(keys)
    for start in range(0, count, at_a_time):
        assert engine.put(context, keys[start : start + at_a_time], touch=keys) is not None
        engine.settle()
    engine.finish(context)
    engine.forget()
    return keys


def files(folder):
    return sorted(folder.rglob("kvhoist.store"))
