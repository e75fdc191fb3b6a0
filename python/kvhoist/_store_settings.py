"""Settings of an engine's store: from its configuration and the environment, checked with the field's name."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, Mapping

from ._settings import EngineSettings
from ._values import config_error, nearest, parse_bytes, whole
from .errors import ConfigError

#: What a setting is when nobody sets it.
DEFAULT_HOST_BYTES = "1GiB"

WRITE_POLICIES = ("write_through", "write_back", "by_value")
#: Of a service: it writes blocks without being asked to.
SERVICE_WRITE_POLICIES = ("write_through", "by_value")
#: Settings of a tier beyond the node, which is one for all ranks and engines of it.
_OF_A_SERVICE = frozenset(name for name in EngineSettings.__annotations__ if name.startswith("remote")) | {"recompute_us"}
DIRECT_IO = ("require", "prefer")
STORAGE = ("auto", "uring", "blocking")


def _paths(value: Any) -> list[str]:
    paths = [value] if isinstance(value, str) else value
    expected = "an absolute path of a directory, or a list of them"
    if not isinstance(paths, (list, tuple)) or not paths:
        raise config_error("path", value, expected)
    for path in paths:
        if not isinstance(path, str) or not os.path.isabs(path):
            raise config_error("path", path, expected)
    try:
        distinct = set(map(os.path.realpath, paths))
    except ValueError:  # NUL, or half of a surrogate pair.
        raise config_error("path", value, expected) from None
    if len(distinct) != len(paths):
        raise config_error("path", value, "each path once")
    return list(paths)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise config_error(name, value, "one of " + ", ".join(map(repr, choices)))
    return value


@dataclass(frozen=True)
class StoreSettings:
    """Settings of an engine's store, checked. The pages of the engines have the tables."""

    #: Directories, one for each drive; every rank and model has stores of its own in them.
    path: list[str]
    #: Bytes on disk for this rank, of all its pools and paths together.
    capacity: int
    #: Host memory of this rank for blocks on their way, and for the hottest.
    host_bytes: int
    write_policy: str = "write_through"
    #: Bytes a day that by_value may write to disk: for the same pools and ranks as `capacity`.
    write_budget: int | None = None
    direct_io: str = "require"
    storage: str = "auto"
    deadline_ms: int = 30_000
    #: A question to a service's index ends after so long, as a miss.
    lookup_ms: int = 50
    #: Reads and writes that may be in flight, bytes.
    read_bytes_in_flight_max: int = 96 << 20
    write_bytes_in_flight_max: int = 96 << 20
    #: Whatever tells these weights from others of the same name: a commit, a date. Part of the store's identity.
    revision: str = ""
    #: Shares of `capacity` for pools beside the KV pool, by name: {"mamba": 0.2}.
    pool_shares: dict[str, float] = field(default_factory=dict)
    #: Bytes on disk for all ranks together, instead of `capacity`, which is then each rank's part of them.
    capacity_total: int | None = None
    #: "auto": one cache for all ranks where they share pages; "off"; or the socket of a service that runs already.
    service: str = "auto"
    #: Seconds after which a service that was started for these settings ends without a client.
    linger_s: int = 300
    #: Keep pages in kvhoist's host memory too, which is then a tier: `True`, or its bytes instead of `host_bytes`.
    keep_in_host: bool = False
    #: Where this process serves its figures: the port of rank 0, to which each rank adds its number. A service that is
    #: started for these settings has the port itself. 0: the system chooses.
    metrics_port: int | None = None

    def for_ranks(self, ranks: int) -> "StoreSettings":
        """These settings for one of so many ranks, or of so many groups of ranks that share their pages."""
        if self.capacity_total is None:
            return self
        if self.capacity_total < ranks:
            raise config_error("capacity_total", self.capacity_total, f"bytes for {ranks} ranks")
        budget = None if self.write_budget is None else self.write_budget // ranks
        return replace(self, capacity=self.capacity_total // ranks, write_budget=budget)

    def part(self, share: float) -> "StoreSettings":
        """These settings for one of the stores that they are for together."""
        budget = None if self.write_budget is None else int(self.write_budget * share)
        sizes = {"capacity": int(self.capacity * share), "host_bytes": int(self.host_bytes * share)}
        return replace(self, **sizes, write_budget=budget)

    @classmethod
    def load(cls, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> "StoreSettings":
        """From a configuration; `KVHOIST_PATH`, `KVHOIST_CAPACITY`, ... stand in for keys that are not there."""
        environ = os.environ if environ is None else environ
        given = dict(given)
        unknown = sorted(map(str, set(given) - set(cls.__dataclass_fields__)))
        if unknown:
            name, expected = unknown[0], nearest(unknown[0], cls.__dataclass_fields__)
            if name in _OF_A_SERVICE:
                expected = "nothing: write it into the file of `kvhoist serve --config`, and its socket into `service` here"
            raise config_error(name, given.get(name), expected)
        of_environment: dict[str, str] = {}
        found: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            variable = "KVHOIST_METRICS" if name == "metrics_port" else "KVHOIST_" + name.upper()
            value = environ.get(variable)
            if value and name not in given and name != "pool_shares" and not _is_overruled(name, value, given):
                # A list in the environment is written as a search path is.
                found[name] = value.split(os.pathsep) if name == "path" else value
                of_environment[name] = variable
        given.update(found)
        try:
            return cls(**_checked(given))
        except ConfigError as error:
            if variable := of_environment.get(error.field):
                named = ConfigError(str(error).replace(error.field, variable, 1))
                named.field = variable
                raise named from None
            raise


def refuse_total_of_environment(given: Mapping[str, Any], why: str) -> None:
    """Refuses `KVHOIST_CAPACITY_TOTAL` for an engine that has one store: nothing divides it there."""
    total = os.environ.get("KVHOIST_CAPACITY_TOTAL")
    if total and not _is_overruled("capacity_total", total, given):
        expected = f"nothing, and `capacity`, or KVHOIST_CAPACITY, in its place: {why}"
        raise config_error("KVHOIST_CAPACITY_TOTAL", total, expected)


def _is_overruled(name: str, value: str, given: Mapping[str, Any]) -> bool:
    """Whether what the environment says is given in another way."""
    if name in ("capacity", "capacity_total"):
        return "capacity" in given or "capacity_total" in given
    if name == "host_bytes":
        return _is_size(given.get("keep_in_host", False))
    # A word that is neither stays, to be refused.
    return name == "keep_in_host" and value.strip()[:1].isdigit() and "host_bytes" in given


def _is_size(kept: Any) -> bool:
    """Whether `keep_in_host` is a size, which stands for `host_bytes`."""
    return kept not in (True, False, "true", "false")


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    size = "capacity_total" if "capacity_total" in given else "capacity"
    service = _service(given.get("service", "auto"))
    if service.startswith("/"):
        # Its paths are the service's own.
        given = {"path": "/", **given}
    for name, example in (("path", "a directory on the NVMe drive"), (size, "bytes on disk, such as '200GiB'")):
        if name not in given:
            raise config_error(name, None, f"{example} (key {name!r} of extra_config, or KVHOIST_{name.upper()})")
    if size == "capacity_total" and "capacity" in given:
        raise config_error(size, given[size], "either it or capacity, which is for one rank")
    # All of it, until somebody says how many ranks there are.
    checked: dict[str, Any] = {"path": _paths(given["path"]), "capacity": parse_bytes(given[size], size)}
    if size == "capacity_total":
        checked[size] = checked["capacity"]
    checked["host_bytes"] = parse_bytes(given.get("host_bytes", DEFAULT_HOST_BYTES), "host_bytes")
    checked["service"] = service
    if "linger_s" in given:
        checked["linger_s"] = whole("linger_s", given["linger_s"], 1, 86_400)
    kept = given.get("keep_in_host", False)
    if _is_size(kept):
        if "host_bytes" in given:
            raise config_error("keep_in_host", kept, "true or false beside host_bytes")
        checked["host_bytes"] = parse_bytes(kept, "keep_in_host")
    checked["keep_in_host"] = kept not in (False, "false")
    for name, choices in (("write_policy", WRITE_POLICIES), ("direct_io", DIRECT_IO), ("storage", STORAGE)):
        if name in given:
            checked[name] = _choice(name, given[name], choices)
    if "write_budget" in given:
        if checked.get("write_policy") != "by_value":
            raise config_error("write_budget", given["write_budget"], "nothing, or write_policy 'by_value' beside it")
        checked["write_budget"] = parse_bytes(given["write_budget"], "write_budget")
    if "metrics_port" in given:
        checked["metrics_port"] = whole("metrics_port", given["metrics_port"], 0, 65_535)
    for name in ("deadline_ms", "lookup_ms"):
        if name in given:
            checked[name] = whole(name, given[name], 1, 86_400_000)
    for name in ("read_bytes_in_flight_max", "write_bytes_in_flight_max"):
        if name in given:
            checked[name] = parse_bytes(given[name], name)
    if "revision" in given:
        checked["revision"] = _text("revision", given["revision"])
    if "pool_shares" in given:
        checked["pool_shares"] = _shares(given["pool_shares"])
    return checked


def _service(value: Any) -> str:
    if value not in ("auto", "off") and not (isinstance(value, str) and os.path.isabs(value) and "\0" not in value):
        raise config_error("service", value, "'auto', 'off', or the absolute path of a service's socket")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 256:
        raise config_error(name, value, "a text of at most 256 characters")
    return value


def _shares(value: Any) -> dict[str, float]:
    expected = "a share of capacity from 0.0 to 1.0 for each pool's name, less than 1.0 in all"
    if not isinstance(value, dict):
        raise config_error("pool_shares", value, expected)
    for share in value.values():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise config_error("pool_shares", value, expected)
    if sum(value.values()) >= 1:
        raise config_error("pool_shares", value, expected)
    return {str(name): float(share) for name, share in value.items()}
