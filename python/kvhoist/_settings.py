"""Keywords of `Cache` that are settings of the engine, with their types: docs/reference/settings.md describes them."""

from __future__ import annotations

from typing import Literal, Sequence, TypedDict, Union

__all__ = ["EngineSettings"]

_Size = Union[int, str]
_Mode = Literal["auto", "on", "off"]


class EngineSettings(TypedDict, total=False):
    """Settings of the engine. A size is a number of bytes, or text such as ``"200GiB"``."""

    eviction_policy: Literal["lru", "rb", "rb_refuse"]
    workers: int | None
    spin_us: int
    low_watermark: float
    high_watermark: float
    bypass_host: bool
    device: Literal["auto", "simulated", "cuda"]
    device_ordinal: int
    device_layout: Sequence[int] | None
    device_bytes: _Size
    device_blocks: int
    copy: Literal["loop", "batch", "kernel"] | None
    copy_blocks_max: int
    copy_prefer: Literal["latency", "throughput", "spare_gpu"]
    gdr: _Mode
    gdr_device: str | None
    gdr_stuck_ms: int
    cufile: _Mode
    cufile_stuck_ms: int
    write_policy: Literal["write_through", "write_through_selective", "write_back", "by_value"]
    selective_hits: int
    write_budget: _Size | None
    drive_writes_per_day: float | None
    drive_bytes: _Size | None
    storage: Literal["auto", "uring", "blocking"]
    direct_io: Literal["require", "prefer"]
    blocking_threads: int
    quarantine_max: int
    disk_failures_max: int
    read_bytes_in_flight_max: _Size
    write_bytes_in_flight_max: _Size
    movements_max: int
    waiters_max: int
    background_max: int
    deadline_ms: int
