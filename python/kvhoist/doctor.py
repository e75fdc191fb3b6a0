"""What an engine's configuration comes to, for `python -m kvhoist doctor`: the checks that need the engine's Python.

The rest of the report is the command's: the machine, the drives, what a store there reaches, and the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import fields
from importlib import metadata
from typing import Any, Iterator, Optional, Tuple

from . import __version__, _native
from ._store_settings import StoreSettings
from ._stores import tier_settings
from ._values import config_error, parse_bytes, parse_json, printable
from ._versions import VERSIONS
from .cache import slot_bytes
from .sglang.linker_settings import LinkerSettings
from .sglang.prefetch_limits import prefetch_limits
from .sglang.settings import SGLANG_KEYS, backend_settings
from .vllm.device_settings import DeviceSettings, vllm_settings

#: The engines whose configuration can be read.
_ENGINES = ("sglang", "vllm", "lmcache")

#: Where the engines find the adapters, and by which calls.
_SGLANG = {"module_path": "kvhoist.sglang", "class_name": "HiCacheKvhoist", "interface_v1": 1}
_CONNECTOR = {
    "kv_connector": "KvhoistConnector", "kv_connector_module_path": "kvhoist.vllm", "kv_load_failure_policy": "recompute",
}  # fmt: skip
_PLUGIN = {"type": "plugin", "module_path": "kvhoist.lmcache", "class_name": "KvhoistL2"}
_LINKER = {"linker": "KvhoistLinker", "linker_module_path": "kvhoist.sglang"}

#: Settings of an adapter that are the library's too, under the same names.
_OF_LIBRARY = (
    "host_bytes", "write_policy", "write_budget", "direct_io", "storage", "deadline_ms", "read_bytes_in_flight_max",
    "write_bytes_in_flight_max",
)  # fmt: skip

#: A finding: its subject, what was found, how to fix it, and whether it is a problem.
Finding = Tuple[str, str, Optional[str], bool]


def run(arguments: list[str]) -> int:
    """The doctor with these arguments; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvhoist doctor", add_help=False, allow_abbrev=False,
        description="What stands in the way of an engine's configuration. Other flags are those of `kvhoist doctor`:",
    )  # fmt: skip
    parser.add_argument("--engine", choices=_ENGINES, help="whose configuration it is (default: sglang)")
    parser.add_argument(
        "--config",
        help="SGLang's extra config, vLLM's kv-transfer-config or LMCache's l2-adapter: JSON, or a file with it (FILE or @FILE)",
    )
    parser.add_argument("--token-bytes", help="bytes of a token in the pool of a rank of SGLang, such as 131072 or 128KiB")
    parser.add_argument("--ranks", type=int, default=1, help="processes of this machine that open it: one a GPU")
    given, others = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(others):
        parser.print_help()
        print(flush=True)
    try:
        if not 1 <= given.ranks <= 1024:
            raise config_error("--ranks", given.ranks, "1 to 1024")
        token_bytes = None if given.token_bytes is None else parse_bytes(_number(given.token_bytes), "--token-bytes")
        findings, more = _examine(given.engine or "sglang", given.config, given.ranks, bool(given.engine), token_bytes)
    except (OSError, ValueError, RecursionError) as error:
        print(f"doctor: {printable(str(error))}", file=sys.stderr)
        return 2
    return _native.run_command(["kvhoist", "doctor", "--ranks", str(given.ranks), *more, *others], findings)


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def _examine(
    engine: str, config: str | None, ranks: int, named: bool, token_bytes: int | None
) -> tuple[list[Finding], list[str]]:
    """What is found here, and the flags by which the command goes on."""
    findings: list[Finding] = [("kvhoist", f"{__version__}, Python {platform.python_version()}", None, False)]
    if config is None:
        return [*findings, _engine(engine)] if named else findings, []
    given = _given(config)
    findings.append(_engine(engine))
    settings, found = _settings(engine, given, ranks, token_bytes)
    findings += found
    store = settings.store if isinstance(settings, DeviceSettings) else settings
    findings.append(("settings", ", ".join(_shown(store)), None, False))
    if advice := _native.huge_pool_advice(engine, _version(engine) or ""):
        findings.append(("engine's pool", f"in huge pages with {advice}", None, False))
    if store.service not in ("auto", "off"):
        # Its drives and its memory are the service's, which has looked at them.
        return [*findings, _service(store.service)], ["--config", "{}"]
    library = {name: value for name in _OF_LIBRARY if (value := getattr(store, name)) is not None}
    flags = ["--config", json.dumps({"path": store.path, "capacity": store.capacity, **library})]
    if isinstance(settings, DeviceSettings) and settings.route == "cufile":
        flags += ["--want", "ring,direct-io,cuda,cufile"]
    return findings, flags


def _shown(config: StoreSettings) -> Iterator[str]:
    """The settings that are not what they are by themselves."""
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value != default:
            yield f"{field.name} {_written(field.name, value)}"


def _written(name: str, value: Any) -> str:
    if name == "path":
        return os.pathsep.join(value)
    is_size = "bytes" in name or name in ("capacity", "capacity_total", "write_budget")
    return _size(value) if is_size and isinstance(value, int) else str(value)


def _size(nbytes: int) -> str:
    """As its reader would write it: in the largest unit that leaves no fraction."""
    for unit, shift in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def _given(config: str) -> Any:
    """What `--config` says: JSON, or a file with it."""
    name = "" if config.lstrip().startswith(("{", "[")) else config.removeprefix("@")
    try:
        text = config
        if name:
            with open(name, encoding="utf-8") as file:
                text = file.read()
        return parse_json(text)
    except OSError as error:
        raise ValueError(f"--config: found no file {name} ({error.strerror}), expected JSON, or a file with it") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        where = f"in {name} " if name else ""
        raise ValueError(f"--config: found text {where}that is no JSON ({error}), expected an object of settings") from error


def _version(engine: str) -> str | None:
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return None


def _engine(engine: str) -> Finding:
    if version := _version(engine):
        return (engine, f"{version} (tested with {' and '.join(VERSIONS[engine])})", None, False)
    fix = "run the doctor by the Python that runs the engine, in which kvhoist is installed too"
    return (engine, f"not installed in {sys.executable}", fix, True)


def _service(socket: str) -> Finding:
    from .service.launch import listens

    if listens(socket):
        if os.access(socket, os.W_OK):
            return ("service", f"a service listens at {socket}", None, False)
        fix = "run as the service's user, or start the service with --allow-uid or --socket-group"
        return ("service", f"user {os.geteuid()} may not connect at {socket}", fix, True)
    return ("service", f"nobody listens at {socket}", f"start it: kvhoist serve --socket {socket} ...", True)


def _settings(
    engine: str, given: Any, ranks: int, token_bytes: int | None
) -> tuple[StoreSettings | DeviceSettings, list[Finding]]:
    """The settings as the engine's adapter reads them."""
    if engine == "sglang":
        if isinstance(given, dict) and _LINKER.keys() & given.keys():
            _check(given, _LINKER)
            return LinkerSettings.load(given.get("linker_extra_config")).store.for_ranks(ranks), []
        _check_sglang(given)
        settings = backend_settings(given).for_ranks(ranks)
        words, fix = prefetch_limits(given, token_bytes)
        return settings, [("prefetches", words, fix, fix is not None)]
    if engine == "lmcache":
        settings = tier_settings(lmcache_adapter(given))
        return settings, [] if settings.revision else list(_unnamed(given, settings))
    if is_gpu_spec(given):
        return vllm_gpu_settings(given), []
    shared_bytes, tier = vllm_tier(given)
    return tier_settings(tier), [_shared_memory(shared_bytes)]


def _shared_memory(wanted: int) -> Finding:
    system = os.statvfs("/dev/shm")
    free = system.f_bavail * system.f_frsize
    free_gib, wanted_gib = (f"{nbytes / (1 << 30):.1f} GiB" for nbytes in (free, wanted))
    found = f"/dev/shm: {free_gib} free, {wanted_gib} an engine in cpu_bytes_to_use"
    return ("shared memory", found, "mount -o remount,size=... /dev/shm; docker --shm-size", free < wanted)


def _check_sglang(given: Any) -> None:
    """Whether SGLang would find the adapter, where the configuration is the whole of it and not the settings alone."""
    if not isinstance(given, dict) or not (SGLANG_KEYS - {"interface_v1"} | _SGLANG.keys()) & given.keys():
        return
    _check(given, _SGLANG)


def _check(given: dict, wanted: dict) -> None:
    for name, expected in wanted.items():
        if given.get(name) != expected:
            raise config_error(name, given.get(name), repr(expected))


def vllm_tier(given: dict) -> tuple[int, dict]:
    """cpu_bytes_to_use and the tier's own settings, of kv-transfer-config, its extra config, or the tier alone."""
    extra = given.get("kv_connector_extra_config", given) if isinstance(given, dict) else None
    if not isinstance(extra, dict):
        raise config_error("kv_connector_extra_config", extra, "an object with secondary_tiers")
    if (extra is not given or "kv_connector" in given) and given.get("kv_connector") != "OffloadingConnector":
        raise config_error("kv_connector", given.get("kv_connector"), "'OffloadingConnector' or 'KvhoistConnector'")
    if extra.get("spec_name", "TieringOffloadingSpec") != "TieringOffloadingSpec":
        raise config_error("spec_name", extra["spec_name"], "'TieringOffloadingSpec'")
    tiers = extra.get("secondary_tiers", [given])
    tiers = [tier for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []
    found = [tier for tier in tiers if tier.get("type", "KvhoistTier") == "KvhoistTier"]
    if len(found) != 1:
        raise config_error("secondary_tiers", extra.get("secondary_tiers"), "a list with one tier of type KvhoistTier")
    (tier,) = found
    if tier is not given and tier.get("module_path") != "kvhoist.vllm":
        raise config_error("module_path", tier.get("module_path"), "'kvhoist.vllm'")
    shared_bytes = extra.get("cpu_bytes_to_use", 1)
    of_vllm = ("type", "module_path", "backpressure", "enable_kv_events", "locality")
    settings = {name: value for name, value in tier.items() if name not in of_vllm}
    return parse_bytes(shared_bytes, "cpu_bytes_to_use"), settings


def is_gpu_spec(given: Any) -> bool:
    """Whether a configuration of vLLM's is that of KvhoistConnector, and not that of a tier."""
    if not isinstance(given, dict):
        return False
    extra = given.get("kv_connector_extra_config", given)
    named = isinstance(extra, dict) and extra.get("spec_name") == "KvhoistOffloadingSpec"
    return named or given.get("kv_connector") == "KvhoistConnector"


def vllm_gpu_settings(given: dict) -> DeviceSettings:
    """The settings of KvhoistOffloadingSpec, of kv-transfer-config or its extra config, as vLLM would read them."""
    extra = given.get("kv_connector_extra_config", given)
    if not isinstance(extra, dict):
        raise config_error("kv_connector_extra_config", extra, "an object with the settings' names")
    if extra is not given:
        _check(given, _CONNECTOR)
    return vllm_settings(extra)


def _unnamed(given: dict, settings: StoreSettings) -> Iterator[Finding]:
    """What LMCache's objects depend on, and the adapter does not see: only `revision` can tell it apart."""
    if given.get("serde") is not None:
        fix = "set revision in adapter_params; another one with each change of serde, of the model's layout or its ranks"
        yield ("serde", "no revision: objects of another serde would be taken for this one's", fix, True)
    if settings.service != "off":
        found = "share objects; each of several in a vLLM's lmcache.mp.server_urls needs a revision of its own"
        yield ("servers", found, None, False)


def lmcache_adapter(given: dict) -> dict:
    """The adapter's own settings, of LMCache's `--l2-adapter`, or of its adapter_params alone."""
    if not isinstance(given, dict):
        raise config_error("adapter_params", given, "an object with the settings' names")
    if "type" in given or "adapter_params" in given:
        _check(given, _PLUGIN)
        params = given.get("adapter_params")
        if not isinstance(params, dict):
            raise config_error("adapter_params", params, "an object with the settings' names")
        given = params
    if "block_bytes" in given:
        block_bytes = parse_bytes(given["block_bytes"], "block_bytes")
        if slot_bytes(block_bytes) != block_bytes:
            raise config_error("block_bytes", block_bytes, "a multiple of 4096 bytes")
    return {name: value for name, value in given.items() if name != "block_bytes"}
