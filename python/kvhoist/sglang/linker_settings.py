"""Settings of SGLang's linker. Needs no engine and no device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Mapping

from .._store_settings import StoreSettings
from .._values import config_error, nearest, whole

#: Which pages are offered to a request: those in host memory, or those on drives, too.
OFFERS = ("all", "host")

#: What waits for a layer.
WAITS = ("stream", "thread")

#: Keys of kvhoist.
KEYS = (frozenset(StoreSettings.__dataclass_fields__) - {"keep_in_host"}) | {
    "offer",
    "wait",
    "device",
    "copy_blocks_max",
}


@dataclass(frozen=True)
class LinkerSettings:
    """Settings of the linker, checked. `docs/sglang.md` has the table."""

    store: StoreSettings
    #: `all`: pages in host memory and on drives; `host`: the others are computed again.
    offer: str = "all"
    #: What waits for a layer: the `stream` that reads it, or its `thread`.
    wait: str = "stream"
    #: `auto`: the CUDA device of the pools; `simulated`: host memory in its place.
    device: str = "auto"
    #: Most thread blocks of the copy kernel.
    copy_blocks_max: int = 16

    @property
    def in_service(self) -> bool:
        """Whether a node's service keeps the pages."""
        return self.store.service != "off"

    @classmethod
    def load(cls, given: Mapping[str, Any] | None) -> "LinkerSettings":
        """From SGLang's linker_extra_config. Raises ConfigError with the name of the wrong setting."""
        given = dict(given or {})
        for name in sorted(map(str, set(given) - KEYS)):
            raise config_error(name, given.get(name), nearest(name, KEYS))
        own: dict[str, Any] = {}
        for name, choices in (("offer", OFFERS), ("wait", WAITS), ("device", ("auto", "simulated"))):
            if name in given:
                own[name] = given.pop(name)
                if own[name] not in choices:
                    raise config_error(name, own[name], "one of " + ", ".join(map(repr, choices)))
        if "copy_blocks_max" in given:
            own["copy_blocks_max"] = whole("copy_blocks_max", given.pop("copy_blocks_max"), 1, 1024)
        if "host_bytes" not in given and not os.environ.get("KVHOIST_HOST_BYTES"):
            expected = "pinned host memory of each rank for pages, such as '64GiB': twice the KV pool is a good start"
            raise config_error("host_bytes", None, expected)
        # The environment's service is for other engines of the node.
        settings = cls(store=StoreSettings.load({"service": "off", **given, "keep_in_host": False}), **own)
        if settings.in_service and "copy_blocks_max" in own:
            raise config_error("copy_blocks_max", own["copy_blocks_max"], "nothing: the service has its own")
        return settings
