"""Settings of a store of device memory. Needs no engine and no device."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Mapping

from .._store_settings import StoreSettings, refuse_total_of_environment
from .._values import config_error, parse_bytes, whole

#: What `route` may be.
ROUTES = ("auto", "bounce", "cufile")

#: The route of each of llm-d's `gds_mode`. Its plain modes ask for a path without host memory.
GDS_MODES = {
    "disabled": "bounce",
    "bb_read_only": "bounce",
    "bb_write_only": "bounce",
    "bb_read_write": "bounce",
    "read_only": "auto",
    "write_only": "auto",
    "read_write": "auto",
}

#: Keys of kv_connector_extra_config that are vLLM's own.
VLLM_KEYS = frozenset(
    "spec_name spec_module_path block_size blocks_per_chunk offload_prompt_only self_describing_kv_events "
    "sync_load_budget_bytes canonical_layout".split()
)

#: Keys of vLLM's tiers, and what to do instead.
_OF_TIERS = {
    **dict.fromkeys(("cpu_bytes_to_use", "eviction_policy"), "this medium has host_bytes of its own"),
    **dict.fromkeys(("store_threshold", "max_tracker_size"), "each chunk is stored when it is computed"),
    "tier_poll_interval_s": "every step of vLLM looks for jobs that have ended",
    "enable_telemetry": "vLLM's /metrics have this medium's figures in any case",
}

#: Keys of kvhoist.
OWN_KEYS = frozenset(StoreSettings.__dataclass_fields__) - {"pool_shares", "capacity_total"} | frozenset(
    "route gds_mode device read_ratio bytes_in_flight_max store_bytes_queued_max copy_blocks_max".split()
)


@dataclass(frozen=True)
class DeviceSettings:
    """Settings of a store of device memory, checked."""

    store: StoreSettings
    #: How bytes get from drive to device, and the setting that says so.
    route: str = "auto"
    route_from: str = "route"
    #: `auto`: the CUDA device of the KV cache; `simulated`: host memory in its place.
    device: str = "auto"
    #: Most bytes of chunks being stored; chunks past it are not stored. None: half of the KV cache.
    store_bytes_queued_max: int | None = None
    #: Most thread blocks of the copy kernel.
    copy_blocks_max: int = 16

    @classmethod
    def load(cls, given: Mapping[str, Any]) -> "DeviceSettings":
        """Raises ConfigError with the name of the wrong setting."""
        given = dict(given)
        if "pool_shares" in given:
            raise config_error("pool_shares", given["pool_shares"], "nothing: the KV cache is one pool")
        refuse_total_of_environment(given, "an engine of one GPU has a store of its own")
        for name, otherwise, expected in (
            ("service", "off", "'off': a service cannot map a GPU's memory, so the engine has a store of its own"),
            ("keep_in_host", False, "nothing: `host_bytes` keeps the hottest chunks in any case"),
        ):
            if given.get(name, otherwise) not in (otherwise, "false"):
                raise config_error(name, given[name], expected)
            # Those of the environment are for other engines of the node.
            given[name] = otherwise
        own: dict[str, Any] = {}
        if "gds_mode" in given:
            mode = given.pop("gds_mode")
            if mode not in GDS_MODES or "route" in given:
                raise config_error("gds_mode", mode, f"one of {', '.join(GDS_MODES)}, and no route beside it")
            own.update(route=GDS_MODES[mode], route_from=f"gds_mode {mode}")
        for name, choices in (("route", ROUTES), ("device", ("auto", "simulated"))):
            if name in given:
                own[name] = given.pop(name)
                if own[name] not in choices:
                    raise config_error(name, own[name], "one of " + ", ".join(map(repr, choices)))
        if "store_bytes_queued_max" in given:
            own["store_bytes_queued_max"] = parse_bytes(given.pop("store_bytes_queued_max"), "store_bytes_queued_max")
        if "copy_blocks_max" in given:
            own["copy_blocks_max"] = whole("copy_blocks_max", given.pop("copy_blocks_max"), 1, 1024)
        given.update(_in_flight(given))
        return cls(store=StoreSettings.load(given), **own)


def _in_flight(given: dict[str, Any]) -> dict[str, int]:
    """Bytes in flight each way: `read_ratio` divides `bytes_in_flight_max`."""
    ratio, total = given.pop("read_ratio", None), given.pop("bytes_in_flight_max", None)
    each = [name for name in ("read_bytes_in_flight_max", "write_bytes_in_flight_max") if name in given]
    if each and (ratio is not None or total is not None):
        raise config_error(each[0], given[each[0]], "either it or read_ratio and bytes_in_flight_max")
    if each:
        return {}
    ratio = 0.75 if ratio is None else ratio
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < 1:
        raise config_error("read_ratio", ratio, "the reads' share of the bytes in flight, above 0.0 and below 1.0")
    total = parse_bytes("128MiB" if total is None else total, "bytes_in_flight_max")
    reads = max(int(total * ratio), 1)
    return {"read_bytes_in_flight_max": reads, "write_bytes_in_flight_max": max(total - reads, 1)}


def vllm_settings(extra_config: Mapping[str, Any]) -> DeviceSettings:
    """The settings in vLLM's kv_connector_extra_config, which also has keys of vLLM's own."""
    for name in sorted(_OF_TIERS.keys() & extra_config.keys()):
        raise config_error(name, extra_config[name], f"nothing: {_OF_TIERS[name]}")
    for name in sorted(map(str, set(extra_config) - VLLM_KEYS - OWN_KEYS)):
        like = difflib.get_close_matches(name, OWN_KEYS, 1)
        expected = f"{like[0]!r}, perhaps" if like else "one of " + ", ".join(sorted(OWN_KEYS))
        raise config_error(name, extra_config.get(name), f"no such key; {expected}")
    for name, why in (
        ("sync_load_budget_bytes", "0: a load that the step waits for cannot be recomputed when it fails"),
        ("canonical_layout", "false: chunks are stored as the GPU has them"),
    ):
        if extra_config.get(name):
            raise config_error(name, extra_config[name], why)
    return DeviceSettings.load({name: value for name, value in extra_config.items() if name in OWN_KEYS})
