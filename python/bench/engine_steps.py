"""What SGLang does for a prompt whose pages are in its third tier, step by step: `engine_ttft.py --steps`.

SGLang's scheduler imports this as its back end's module. It wraps the methods that a prompt passes through, and writes
a line `NAME BEGIN END`, in seconds of the monotonic clock, which all processes share, into the file that KVHOIST_STEPS
names. `steps` makes durations that follow one another of them.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from typing import Any

Lines = list[tuple[str, float, float]]

#: Module, class and method of SGLang 0.5.17, and the name of its line.
WRAPPED = [
    ("sglang.srt.managers.cache_controller", "HiCacheController", "prefetch", "asked"),
    ("sglang.srt.managers.cache_controller", "HiCacheController", "_storage_hit_query", "query"),
    ("sglang.srt.managers.cache_controller", "HiCacheController", "_page_transfer", "read"),
    ("sglang.srt.managers.cache_controller", "HiCacheController", "start_loading", "load"),
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache", "check_prefetch_progress", "taken"),
]


def write(name: str, begin: float, end: float) -> None:
    """A line, whole: several threads write."""
    with open(os.environ["KVHOIST_STEPS"], "a", encoding="utf-8") as file:
        file.write(f"{name} {begin:.6f} {end:.6f}\n")


def timed(method: Any, name: str) -> Any:
    """The method, with a line for each call that has done something."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        waited = name != "taken" or args[0] in self.ongoing_prefetch
        begin = time.monotonic()
        result = method(self, *args, **more)
        end = time.monotonic()
        if waited and result is not False and not (name == "load" and result == -1):
            write(name, begin, end)
        if name == "load" and result != -1:
            threading.Thread(target=copied, args=(begin, self.ack_load_queue[-1].finish_event)).start()
        return result

    return call


def copied(begin: float, event: Any) -> None:
    """A line when the device has the pages."""
    event.synchronize()
    write("copied", begin, time.monotonic())


def steps(lines: Lines, begin: float, end: float) -> dict[str, float]:
    """Milliseconds of each step between a request's begin and its answer; {} where it loaded nothing."""
    mine = {name: (first, last) for name, first, last in lines if begin <= first <= end}
    if not {"asked", "query", "read", "load", "copied"} <= set(mine):
        return {}
    taken = mine.get("taken", mine["load"])[0]
    moments = [
        ("to the scheduler", begin, mine["asked"][0]),
        ("look-up in the third tier", mine["asked"][0], mine["query"][1]),
        ("until the read begins", mine["query"][1], mine["read"][0]),
        ("drives to host memory", *mine["read"]),
        ("until the scheduler takes it", mine["read"][1], taken),
        ("entering it into the tree, batch", taken, mine["load"][0]),
        ("begin of the copy to the device", *mine["load"]),
        ("rest of the copy to the device", mine["load"][1], max(mine["copied"][1], mine["load"][1])),
        ("rest of the prompt and the tokens", max(mine["copied"][1], mine["load"][1]), end),
    ]
    return {name: (last - first) * 1e3 for name, first, last in moments}


def read_lines(path: str) -> Lines:
    """What was written so far."""
    with open(path, encoding="utf-8") as file:
        return [(name, float(begin), float(end)) for name, begin, end in map(str.split, file)]


def wrap() -> None:
    """Wraps the methods, in the process of the scheduler."""
    for module, owner, method, name in WRAPPED:
        kind = getattr(importlib.import_module(module), owner)
        setattr(kind, method, timed(getattr(kind, method), name))


def __getattr__(name: str) -> Any:
    """The back end: SGLang asks for it once, before it makes it."""
    if name != "HiCacheKvhoist":
        raise AttributeError(name)
    wrap()
    from kvhoist.sglang import HiCacheKvhoist

    return HiCacheKvhoist
