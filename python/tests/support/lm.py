"""LMCache's real storage manager over kvhoist, from an unpacked wheel, without a server, a model or a GPU.

`KVHOIST_LMCACHE` names the folder of one unpacked version; the version is in the folder's name (`lmcache-0.5.6`).
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import hashlib
import importlib
import json
import mmap
import os
import re
import select
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import engines
from engines import lmcache

ROOT = os.environ.get("KVHOIST_LMCACHE", "")

#: Longer than any wait of a test that goes well.
PATIENCE_S = 60


def missing() -> str | None:
    """Why these tests cannot run here, if they cannot."""
    return engines.missing("KVHOIST_LMCACHE", "lmcache")


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", Path(ROOT).name)[:3])


_modules: SimpleNamespace | None = None


def boot() -> SimpleNamespace:
    """Imports the modules, once."""
    global _modules
    if _modules is None:
        lmcache.boot(ROOT)
        names = {
            "api": "api", "config": "config", "internal": "internal_api", "manager": "storage_manager",
            "adapters": "l2_adapters.config", "base": "l2_adapters.base", "quota": "quota_manager",
        }  # fmt: skip
        modules = {name: importlib.import_module("lmcache.v1.distributed." + path) for name, path in names.items()}
        _modules = SimpleNamespace(**modules)
        # Its loops look once a second whether they are to stop: so long every test would wait.
        eviction = importlib.import_module("lmcache.v1.distributed.storage_controllers.eviction_controller")
        brief = {**vars(time), "sleep": lambda seconds: time.sleep(seconds / 20)}
        eviction.time = SimpleNamespace(**brief)
    return _modules


def adapter_config(path, capacity="64MiB", eviction=None, serde=None, **more) -> dict:
    """What an operator writes after `--l2-adapter`."""
    params = {
        "path": str(path), "capacity": capacity, "block_bytes": 64 << 10, "host_bytes": "4MiB", "direct_io": "prefer"
    }  # fmt: skip
    params |= more
    config = {
        "type": "plugin", "module_path": "kvhoist.lmcache", "class_name": "KvhoistL2", "adapter_params": params
    }  # fmt: skip
    if eviction:
        config["eviction"] = eviction
    if serde:
        config["serde"] = serde
    return config


def parsed(*configs: dict):
    """Configurations of adapters, as LMCache's command line reads them."""
    adapters = boot().adapters
    parser = adapters.add_l2_adapters_args(argparse.ArgumentParser())
    given = [word for config in configs for word in ("--l2-adapter", json.dumps(config))]
    return adapters.parse_args_to_l2_adapters_config(parser.parse_args(given))


def layout_of(nbytes: int, dtype: str = "int8", shape: tuple = (-1,)):
    """The layout of objects of so many bytes. A negative number in the shape is what the others leave."""
    import torch

    dtype = getattr(torch, dtype)
    sized = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta").reshape(shape)
    return boot().api.MemoryLayoutDesc([sized.shape], [dtype])


def keys_of(prompt, count: int, model="meta/tiny", rank=0, group=0, salt="") -> list:
    """The keys of a prompt's chunks."""
    hashes = [hashlib.sha256(f"{prompt}/{n}".encode()).digest() for n in range(count)]
    return [boot().api.ObjectKey(chunk, model, rank, group, salt) for chunk in hashes]


def bytes_of(key, nbytes: int) -> bytes:
    """What an object has in it."""
    name = repr((key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt))
    return hashlib.shake_128(name.encode()).digest(nbytes)


def memory_of(obj):
    """An object's memory, as bytes."""
    import numpy

    return numpy.frombuffer(obj.byte_array, dtype=numpy.uint8)


class Server:
    """One LMCache server's storage, and what an engine does with it."""

    def __init__(
        self, *configs: dict, l1_bytes=16 << 20, nbytes=200_000, shared=False, dtype="int8", shape=(-1,), times=None
    ) -> None:
        """`times`: for how long LMCache keeps memory for a task."""
        modules, self.nbytes = boot(), nbytes
        self.modules, self.layout = modules, layout_of(nbytes, dtype, shape)
        l1 = modules.config.L1MemoryManagerConfig(l1_bytes, False, **({} if shared else {"shm_name": ""}))
        self.manager = modules.manager.StorageManager(
            modules.config.StorageManagerConfig(
                l1_manager_config=modules.config.L1ManagerConfig(l1, **(times or {})),
                eviction_config=modules.config.EvictionConfig("LRU"),
                l2_adapter_config=parsed(*configs),
            )
        )
        (self.adapter,) = self.manager._l2_adapters.values()
        #: kvhoist's, also where it is wrapped.
        self.l2 = getattr(self.adapter, "_inner", self.adapter)
        self.watch = Watch(self.adapter)

    # What an engine does

    def write(self, keys, data=bytes_of) -> list:
        """Writes objects to L1, and begins to store them; the keys that were new."""
        new = {} if version() >= (0, 5, 6) else {"mode": "new"}
        objects = self.manager.reserve_write(list(keys), self.layout, **new)
        for key, obj in objects.items():
            memory_of(obj).data[:] = data(key, obj.get_size())
        self.manager.finish_write(list(objects))
        return list(objects)

    def put(self, keys) -> bool:
        """Writes objects and waits until their store has ended; whether it succeeded."""
        new = self.write(keys)
        return self.watch.ended(new)

    def forget(self) -> None:
        """Empties L1."""
        self.manager.clear(force=True)

    def prefetch(self, *rows: list) -> list[str]:
        """Looks rows of keys up and loads what is there, as a lookup does; letters for each: H(it) or M(iss).

        Leading hits only, as LMCache serves them.
        """
        modules = self.modules
        if version() >= (0, 5, 6):
            groups = [modules.api.GroupedObjectKeys(row, row[0].object_group_id, self.layout) for row in rows]
            handle = self.manager.submit_prefetch_task(modules.api.PrefetchTaskSpec(groups))
        else:
            # Chunk by chunk.
            handle = self.manager.submit_prefetch_task([key for chunk in zip(*rows) for key in chunk], self.layout)
        assert self.manager.wait_prefetch_status(handle, PATIENCE_S), "a prefetch never ended"
        found = self.manager.query_prefetch_status(handle)
        if version() >= (0, 5, 6):
            hits = [[bitmap.test(n) for n in range(len(row))] for bitmap, row in zip(found.hit_cells, rows)]
        else:
            hits = [[found.test(n * len(rows) + r) for n in range(len(row))] for r, row in enumerate(rows)]
        return ["".join("H" if hit else "M" for hit in row) for row in hits]

    def check(self, keys, data=bytes_of) -> None:
        """Every byte of objects that are hits, and ends their use."""
        keys = list(keys)
        if not keys:
            return
        with self.manager.read_prefetched_results(keys) as objects:
            assert objects is not None, "a hit is not in L1"
            for key, obj in zip(keys, objects):
                assert memory_of(obj).tobytes() == data(key, obj.get_size()), key
        self.manager.finish_read_prefetched(keys)

    def get(self, keys) -> str:
        """Prefetches one row, checks its hits, and forgets them; the letters."""
        (found,) = self.prefetch(keys)
        self.check(keys[: found.count("H")])
        assert found == "H" * found.count("H") + "M" * found.count("M")
        self.forget()
        return found

    def look_up(self, keys) -> str:
        """What the adapter says is there, without a load."""
        found = lock(self.adapter, keys, self.layout)
        self.adapter.submit_unlock([key for key, letter in zip(keys, found) if letter == "H"])
        return found

    # The rest

    def close(self) -> None:
        self.manager.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()


def lock(adapter, keys, layout) -> str:
    """Looks keys up and locks them; the letters."""
    described = {key.object_group_id: layout for key in keys} if version() >= (0, 5, 6) else layout
    task = adapter.submit_lookup_and_lock_task(list(keys), described)
    bitmap = adapter.query_lookup_and_lock_result(task)
    return "".join("H" if bitmap.test(n) else "M" for n in range(len(keys)))


class Watch:
    """Sees the end of every store task: LMCache does not report failed ones."""

    def __init__(self, adapter) -> None:
        self._changed = threading.Condition()
        self._keys: dict[int, list] = {}
        self._results: dict = {}
        submit, pop = adapter.submit_store_task, adapter.pop_completed_store_tasks

        def submitted(keys, objects):
            with self._changed:
                task = submit(keys, objects)
                self._keys[task] = list(keys)
                return task

        def popped():
            results = pop()
            with self._changed:
                for task, result in results.items():
                    self._results.update(dict.fromkeys(self._keys[task], result.is_successful()))
                self._changed.notify_all()
            return results

        adapter.submit_store_task, adapter.pop_completed_store_tasks = submitted, popped

    def ended(self, keys) -> bool:
        """Waits until stores of all keys have ended; whether all succeeded."""
        with self._changed:
            there = self._changed.wait_for(lambda: all(key in self._results for key in keys), PATIENCE_S)
            assert there, "a store never ended"
            return all([self._results.pop(key) for key in keys])


class Alone:
    """The adapter without controllers, over memory of its own."""

    def __init__(self, config: dict, arena_bytes=8 << 20, nbytes=200_000, stable=None, dtype="int8") -> None:
        from kvhoist.lmcache import KvhoistL2

        modules = boot()
        self.nbytes, self.dtype, self.layout = nbytes, dtype, layout_of(nbytes, dtype)
        self.arena = mmap.mmap(-1, arena_bytes)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self.arena))
        known = {field.name for field in dataclasses.fields(modules.internal.L1MemoryDesc)}
        more = {"stable_registration_size": stable} if "stable_registration_size" in known else {}
        memory = modules.internal.L1MemoryDesc(self._start, arena_bytes, 4096, **more)
        self.adapter = KvhoistL2(config["adapter_params"], l1_memory_desc=memory)

    def at(self, offset: int):
        """The object that lies at an offset of the arena."""
        import torch

        size, shape, dtype = -(-self.nbytes // 4096) * 4096, torch.Size([self.nbytes]), getattr(torch, self.dtype)
        return SimpleNamespace(
            data_ptr=self._start + offset, offset=offset, get_size=lambda: self.nbytes,
            get_physical_size=lambda: size, get_shapes=lambda: [shape], get_dtypes=lambda: [dtype],
        )  # fmt: skip

    def objects(self, count: int, first: int = 0) -> list:
        """So many objects, one after the other."""
        size = -(-self.nbytes // 4096) * 4096
        return [self.at(first + n * size) for n in range(count)]

    def store(self, keys, objects=None) -> bool:
        """Stores objects; whether the task succeeded."""
        objects = self.objects(len(keys)) if objects is None else objects
        for key, obj in zip(keys, objects):
            self.arena[obj.offset : obj.offset + self.nbytes] = bytes_of(key, self.nbytes)
        task = self.adapter.submit_store_task(keys, objects)
        while not (results := self.adapter.pop_completed_store_tasks()):
            wait(self.adapter.get_store_event_fd())
        assert list(results) == [task]
        return results[task].is_successful()

    def load(self, keys, objects=None) -> str:
        """Loads objects and compares their bytes; the letters."""
        objects = self.objects(len(keys)) if objects is None else objects
        for obj in objects:
            self.arena[obj.offset : obj.offset + self.nbytes] = bytes(self.nbytes)
        task = self.adapter.submit_load_task(keys, objects)
        while (bitmap := self.adapter.query_load_result(task)) is None:
            wait(self.adapter.get_load_event_fd())
        for n, (key, obj) in enumerate(zip(keys, objects)):
            if bitmap.test(n):
                assert self.arena[obj.offset : obj.offset + self.nbytes] == bytes_of(key, self.nbytes)
        return "".join("H" if bitmap.test(n) else "M" for n in range(len(keys)))

    def lock(self, keys) -> str:
        return lock(self.adapter, keys, self.layout)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.adapter.close()


def wait(fd: int) -> None:
    """Returns when an event descriptor was readable, and takes what is in it, as LMCache does."""
    ready, _, _ = select.select([fd], [], [], PATIENCE_S)
    assert ready, "nothing has ended"
    os.read(fd, 8)
