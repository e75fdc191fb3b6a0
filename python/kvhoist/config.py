"""Settings of the HiCache backend: from extra_config and the environment, checked with the field's name."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Mapping

from . import _native
from .errors import ConfigError

logger = logging.getLogger(__name__)

_WHOLE = re.compile(r"\s*\d{1,40}\s*", re.ASCII)

#: Keys of extra_config that are SGLang's own.
SGLANG_KEYS = frozenset(
    "backend_name module_path class_name interface_v1 allocator prefetch_threshold prefetch_timeout_base "
    "prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys tp_lcm_size".split()
)

#: The engine's bound.
BLOCK_BYTES_MAX = 1 << 30

#: What a setting is when nobody sets it.
DEFAULT_HOST_BYTES = "1GiB"

WRITE_POLICIES = ("write_through", "write_back", "by_value")
#: Of a service: it writes blocks without being asked to.
SERVICE_WRITE_POLICIES = ("write_through", "by_value")
DIRECT_IO = ("require", "prefer")
STORAGE = ("auto", "uring", "blocking")


def shown(value: object) -> str:
    """A value for a message: its `repr`, cut to a line, with whatever a terminal would act on escaped."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to show"
    return printable(text if len(text) <= 200 else text[:200] + "...")


def printable(text: str) -> str:
    """Text with whatever a terminal would act on, or cannot show, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def config_error(field: str, found: object, expected: str) -> ConfigError:
    """A ConfigError in the engine's words, with its `field` set."""
    error = ConfigError(f"{field}: found {shown(found)}, expected {expected}")
    error.field = field
    return error


def parse_json(text: str) -> Any:
    """What JSON says, where each name stands once: of a name that stands twice one value would be ignored."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name, value in pairs:
            if name in given:
                raise config_error(name, f"{given[name]!r} and {value!r}", "each name once")
            given[name] = value
        return given

    return json.loads(text, object_pairs_hook=once)


def nearest(name: str, known: Iterable[str]) -> str:
    """What is expected instead of an unknown name: the known one that is most like it, or all."""
    names = sorted(known)
    likely = difflib.get_close_matches(name, names, n=1)
    return f"no such name; did you mean {likely[0]}?" if likely else "one of " + ", ".join(names)


#: Keywords that were warned of, each with the class that got it.
_warned: set[tuple[str, str]] = set()


def warn_of_keywords(what: str, names: Iterable[str]) -> None:
    """Logs, once each, that an engine has passed keywords of which a class makes no use."""
    new = sorted({(what, str(name)) for name in names} - _warned)
    _warned.update(new)
    if new:
        logger.warning("kvhoist: %s makes no use of %s, which the engine passes", what, ", ".join(n for _, n in new))


def parse_block_bytes(size: int | str) -> int:
    """Bytes of a block, of a number or of text as in `parse_bytes`. ConfigError for what no block has."""
    try:
        count = parse_bytes(size, "block_bytes")
    except ConfigError:
        count = 0
    if not 0 < count <= BLOCK_BYTES_MAX:
        raise config_error("block_bytes", size, f"1 to {BLOCK_BYTES_MAX} bytes, such as 65536 or '64KiB'")
    return count


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes of a number, or of a string with a unit: ``"64KiB"``, ``"1.5 MiB"``, ``"200Gi"``, ``"10GB"``.

    ``K``, ``Ki`` and ``KiB`` are 1024 bytes and ``KB`` is 1000; ``M``, ``G`` and ``T`` likewise; in any case. The
    command ``kvhoist`` and the environment's ``KVHOIST_CAPACITY`` read sizes in the same way.

    Raises ConfigError, with ``name`` as its field, for all else and for sizes that are not from 1 to 2^63 - 1.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    count: int | None = None
    if isinstance(size, str):
        # No size is longer, and half of a surrogate pair is no text for the engine.
        count = _native.parse_bytes(size) if len(size) <= 100 and size.isascii() else None
    elif isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 63:
        count = size
    if count is None:
        raise config_error(name, size, _native.BYTES_EXPECTED)
    return count


def _paths(value: Any) -> list[str]:
    # A list in the environment is written as a search path is.
    paths = value.split(os.pathsep) if isinstance(value, str) else value
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


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise config_error(name, value, f"a whole number from {low} to {high}")
    return value


@dataclass(frozen=True)
class HiCacheConfig:
    """The backend's settings, checked. `docs/sglang.md` has the table."""

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

    def for_ranks(self, ranks: int) -> "HiCacheConfig":
        """These settings for one of so many ranks, or of so many groups of ranks that share their pages."""
        if self.capacity_total is None:
            return self
        if self.capacity_total < ranks:
            raise config_error("capacity_total", self.capacity_total, f"bytes for {ranks} ranks")
        budget = None if self.write_budget is None else self.write_budget // ranks
        return replace(self, capacity=self.capacity_total // ranks, write_budget=budget)

    @classmethod
    def load(cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> "HiCacheConfig":
        """From SGLang's extra_config; `KVHOIST_PATH`, `KVHOIST_CAPACITY`, ... stand in for keys that are not there."""
        environ = os.environ if environ is None else environ
        extra_config = {} if extra_config is None else extra_config
        if not isinstance(extra_config, Mapping):
            raise config_error("extra_config", extra_config, "an object with the settings' names")
        given = {k: v for k, v in extra_config.items() if k not in SGLANG_KEYS}
        unknown = sorted(map(str, set(given) - set(cls.__dataclass_fields__)))
        if unknown:
            raise config_error(unknown[0], given.get(unknown[0]), nearest(unknown[0], cls.__dataclass_fields__))
        for name in cls.__dataclass_fields__:
            variable = "KVHOIST_METRICS" if name == "metrics_port" else "KVHOIST_" + name.upper()
            if name not in given and name != "pool_shares" and environ.get(variable):
                given[name] = environ[variable]
        return cls(**_checked(given))


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
        checked["linger_s"] = _whole("linger_s", given["linger_s"], 1, 86_400)
    kept = given.get("keep_in_host", False)
    if kept not in (True, False, "true", "false"):
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
        checked["metrics_port"] = _whole("metrics_port", given["metrics_port"], 0, 65_535)
    for name in ("deadline_ms", "lookup_ms"):
        if name in given:
            checked[name] = _whole(name, given[name], 1, 86_400_000)
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
