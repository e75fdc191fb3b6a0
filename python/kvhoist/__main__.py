"""`python -m kvhoist doctor`: what a machine gives an engine's adapter, on one screen."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from typing import Any

from . import Cache, Error, __version__, _native, parse_bytes, service
from .cache import slot_bytes
from .chunks import tier_settings
from .config import HiCacheConfig, config_error, parse_json, printable
from .device_settings import DeviceSettings, vllm_settings
from .linker_settings import LinkerSettings

PROBE_BLOCK = 1 << 20
PROBE_BLOCKS = 64

#: What the tests drive of each engine.
TESTED = {
    "sglang": "the backend is tested with 0.5.17 and 0.5.23",
    "vllm": "the tier is tested with 0.28 and 0.33",
    "lmcache": "the adapter is tested with 0.5.0 and 0.5.6",
}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0, 1 where something would not work, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m kvhoist", description="kvhoist's Python package")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what this machine gives the backend, and what stands in its way")
    doctor.add_argument("--path", action="append", help="a folder on the drive to be used; may be given again")
    doctor.add_argument("--engine", choices=tuple(TESTED), default="sglang", help="whose configuration it is")
    doctor.add_argument(
        "--config",
        help="SGLang's extra config, vLLM's kv-transfer-config or LMCache's l2-adapter: JSON, or a file with it (FILE or @FILE)",
    )
    doctor.add_argument("--ranks", type=int, default=1, help="processes of this machine that open it: one a GPU")
    service.add_arguments(commands.add_parser("serve", help="own the drives for all processes of this node"))
    given = parser.parse_args(arguments)
    if given.command == "serve":
        try:
            return service.serve(given)
        except (OSError, Error) as error:
            print(f"kvhoist: {printable(str(error))}", file=sys.stderr)
            return 2
    try:
        return Doctor(given.path, given.config, given.engine, given.ranks).run()
    except (OSError, ValueError, RecursionError) as error:
        print(f"doctor: {printable(str(error))}", file=sys.stderr)
        return 2


class Doctor:
    """One examination."""

    def __init__(
        self, paths: list[str] | None, config: str | None, engine: str = "sglang", ranks: int = 1
    ) -> None:
        if not 1 <= ranks <= 1024:
            raise config_error("--ranks", ranks, "1 to 1024")
        self.ranks = ranks
        self.config = None
        self.engine = engine
        self.shared_bytes = 0
        self.troubles = 0
        if config is not None:
            if not config.lstrip().startswith(("{", "[")):
                with open(config.removeprefix("@"), encoding="utf-8") as file:
                    config = file.read()
            given = parse_json(config)
            if engine == "vllm" and is_gpu_spec(given):
                self.config = vllm_gpu_settings(given).store
            elif engine == "vllm":
                self.shared_bytes, given = vllm_tier(given)
            if engine == "lmcache":
                given = lmcache_adapter(given)
            if self.config is None and engine != "sglang":
                self.config = tier_settings(given)
            elif self.config is None and isinstance(given, dict) and "linker" in given:
                self.config = LinkerSettings.load(given.get("linker_extra_config")).store.for_ranks(ranks)
            elif self.config is None:
                self.config = HiCacheConfig.load(given).for_ranks(ranks)
        self.paths = paths or (self.config.path if self.config else [tempfile.gettempdir()])

    def run(self) -> int:
        """Prints what it finds, a line each."""
        self._say("kvhoist", f"{__version__}, Python {platform.python_version()}, Linux {platform.release()}")
        self._say("engines", _native.ENGINES)
        self._engine()
        if self.config:
            given = {name: value for name, value in vars(self.config).items() if value not in (None, "", {})}
            given["path"] = ":".join(self.config.path)
            self._say("settings", ", ".join(f"{name} {value}" for name, value in given.items()))
        self._machine()
        for path in self.paths:
            self._path(path)
        found = "1 problem" if self.troubles == 1 else f"{self.troubles or 'no'} problems"
        print(f"\nfound {found}")
        return 1 if self.troubles else 0

    def _say(self, what: str, found: str) -> None:
        print(f"{what:<16}{printable(found)}")

    def _trouble(self, what: str, found: str) -> None:
        self.troubles += 1
        self._say(what, f"NO: {found}")

    def _engine(self) -> None:
        from importlib import metadata

        try:
            self._say(self.engine, f"{metadata.version(self.engine)} ({TESTED[self.engine]})")
        except metadata.PackageNotFoundError:
            self._say(self.engine, "not installed here")
        if self.shared_bytes:
            system = os.statvfs("/dev/shm")
            free = system.f_bavail * system.f_frsize
            text = f"/dev/shm: {free >> 20} MiB free, {self.shared_bytes >> 20} MiB an engine in cpu_bytes_to_use"
            (self._say if free >= self.shared_bytes else self._trouble)("shared memory", text)

    def _machine(self) -> None:
        config = self.config
        sizes = (config.capacity, config.host_bytes, self.ranks, config.write_budget or 0) if config else (0, 0, 1, 0)
        for what, found, fix, is_trouble in _native.examine(self.paths, *sizes):
            (self._trouble if is_trouble else self._say)(what, found)
            if fix:
                print(f"{'':<16}-> {printable(fix)}")

    def _path(self, path: str) -> None:
        # What is missing was told of. A folder above it may lie on another drive: it says nothing.
        if not os.path.isdir(path):
            return
        try:
            with tempfile.TemporaryDirectory(prefix=".kvhoist-doctor-", dir=path) as probe:
                self._probe(path, probe)
        except (Error, OSError) as error:
            self._trouble("store", f"{path}: {error}")

    def _probe(self, folder: str, probe: str) -> None:
        options: dict[str, Any] = dict(block_bytes=PROBE_BLOCK, host_bytes=32 * PROBE_BLOCK, direct_io="prefer")
        options["capacity"] = parse_bytes("2MiB") + PROBE_BLOCKS * PROBE_BLOCK
        blocks = [os.urandom(PROBE_BLOCK) for _ in range(PROBE_BLOCKS)]
        keys = [f"doctor {n}" for n in range(PROBE_BLOCKS)]
        with Cache(probe, **options) as cache:
            started = time.perf_counter()
            cache.store(keys, blocks)
            wrote = time.perf_counter() - started
            cache.sync()
        with Cache(probe, **options) as cache:
            into = [bytearray(PROBE_BLOCK) for _ in keys]
            started = time.perf_counter()
            found = cache.load(keys, into)
            took = time.perf_counter() - started
            stats = cache.stats()
        if not all(found) or any(a != b for a, b in zip(into, blocks)):
            self._trouble("bytes", f"{folder}: what was stored did not come back")
        if not stats["direct_io"]:
            self._trouble("direct I/O", f"{folder}: its file system has none; the page cache would be filled twice")
        else:
            self._say("direct I/O", f"{folder}: yes")
        if stats["storage"] != "uring":
            self._trouble("io_uring", f"refused by this kernel or container; {stats['storage']} serves, at more CPU")
        else:
            self._say("io_uring", f"yes; host memory registered with it: {'yes' if stats['registered'] else 'no'}")
            if not stats["registered"]:
                print(f"{'':<16}-> ulimit -l unlimited; LimitMEMLOCK=infinity in systemd; docker --ulimit memlock=-1")
        mib = PROBE_BLOCKS * PROBE_BLOCK >> 20
        self._say("drive", f"{folder}: {mib} MiB written at {mib / wrote:.0f} MiB/s, read at {mib / took:.0f} MiB/s")


def vllm_tier(given: dict) -> tuple[int, dict]:
    """cpu_bytes_to_use and the tier's own settings, of kv-transfer-config, its extra config, or the tier alone."""
    extra = given.get("kv_connector_extra_config", given) if isinstance(given, dict) else None
    if not isinstance(extra, dict):
        raise config_error("kv_connector_extra_config", extra, "an object with secondary_tiers")
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
        for name, expected in (
            ("kv_connector", "KvhoistConnector"),
            ("kv_connector_module_path", "kvhoist.vllm"),
            ("kv_load_failure_policy", "recompute"),
        ):
            if given.get(name) != expected:
                raise config_error(name, given.get(name), repr(expected))
    return vllm_settings(extra)


def lmcache_adapter(given: dict) -> dict:
    """The adapter's own settings, of LMCache's `--l2-adapter`, or of its adapter_params alone."""
    if not isinstance(given, dict):
        raise config_error("adapter_params", given, "an object with the settings' names")
    if "type" in given or "adapter_params" in given:
        for name, expected in (("type", "plugin"), ("module_path", "kvhoist.lmcache"), ("class_name", "KvhoistL2")):
            if given.get(name) != expected:
                raise config_error(name, given.get(name), repr(expected))
        params = given.get("adapter_params")
        if not isinstance(params, dict):
            raise config_error("adapter_params", params, "an object with the settings' names")
        given = params
    block_bytes = parse_bytes(given.get("block_bytes", PROBE_BLOCK), "block_bytes")
    if slot_bytes(block_bytes) != block_bytes:
        raise config_error("block_bytes", block_bytes, "a multiple of 4096 bytes")
    return {name: value for name, value in given.items() if name != "block_bytes"}


if __name__ == "__main__":
    sys.exit(main())
