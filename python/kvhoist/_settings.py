"""Keywords of `Cache` that are settings of the engine, with their types: docs/reference/settings.md describes them.

Written by docs/generate.py from src/config/settings.rs: change that, and run it.
"""

from __future__ import annotations

from typing import Sequence, TypedDict, Union

__all__ = ["EngineSettings"]

_Size = Union[int, str]


class EngineSettings(TypedDict, total=False):
    """Settings of the engine. Choices are words, checked when the cache is opened. A size is a number of bytes, or text
    such as ``"200GiB"``."""

    eviction_policy: str
    workers: int | None
    spin_us: int
    low_watermark: float
    high_watermark: float
    bypass_host: bool
    device_bytes: _Size
    device_blocks: int
    device: str
    device_ordinal: int
    device_layout: Sequence[int] | None
    copy: str | None
    copy_blocks_max: int
    copy_prefer: str
    gdr: str
    gdr_device: str | None
    gdr_stuck_ms: int
    cufile: str
    cufile_stuck_ms: int
    write_policy: str
    selective_hits: int
    write_budget: _Size | None
    drive_writes_per_day: float | None
    drive_bytes: _Size | None
    storage: str
    direct_io: str
    blocking_threads: int
    quarantine_max: int
    disk_failures_max: int
    remote: str | None
    remote_policy: str
    remote_bytes: _Size | None
    remote_upload_bytes_per_s: _Size
    remote_interval_s: int
    remote_deadline_ms: int
    recompute_us: int | None
    remote_index_bytes: _Size
    read_bytes_in_flight_max: _Size
    write_bytes_in_flight_max: _Size
    movements_max: int
    waiters_max: int
    background_max: int
    deadline_ms: int
