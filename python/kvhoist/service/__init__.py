"""A node's service from Python: `find_or_start` finds or starts one, by `python -m kvhoist serve`."""

from __future__ import annotations

from .launch import ServiceSettings, find_or_start, listens

__all__ = ["ServiceSettings", "find_or_start", "listens"]
