"""The service of an engine's settings: found or started, and started again when it has gone."""

from __future__ import annotations

import logging
import os
import threading
import time

from .. import _native
from .._folders import make_folder
from .._store_settings import SERVICE_WRITE_POLICIES, StoreSettings
from .._values import config_error
from .launch import ServiceSettings, find_or_start

logger = logging.getLogger(__name__)

#: Seconds from an attempt to start a service again to the next; they double with each that fails.
_RESTART_EVERY_S = 1.0
_RESTART_EVERY_S_MAX = 60.0


def service_settings(config: StoreSettings) -> ServiceSettings:
    """The settings of the service of these paths, the same for every model: all disk and memory of the machine, of
    which each space takes what it asks for, and no more."""
    for path in config.path:
        make_folder(path, config.capacity // len(config.path))
    disk, memory = _native.machine_sizes(config.path)
    disk = disk or config.capacity
    memory = memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A space has the share of the service's budget that its disk is of all.
    budget = None if config.write_budget is None else max(1, config.write_budget * disk // config.capacity)
    policy = config.write_policy if config.write_policy in SERVICE_WRITE_POLICIES else "write_through"
    return ServiceSettings(
        tuple(config.path), disk, memory, config.linger_s, config.direct_io, config.storage, config.keep_in_host, policy,
        budget, config.metrics_port or 0,
    )  # fmt: skip


class ServiceSupervisor:
    """Finds or starts the service of some settings, and starts it again when it has gone."""

    def __init__(self, config: StoreSettings) -> None:
        if config.write_policy not in SERVICE_WRITE_POLICIES:
            expected = f"{' or '.join(map(repr, SERVICE_WRITE_POLICIES))} beside a service"
            instead = "one that is started here has 'write_through'" if config.service == "auto" else "it has its own"
            logger.warning("kvhoist: %s: %s", config_error("write_policy", config.write_policy, expected), instead)
        self._settings = service_settings(config) if config.service == "auto" else None
        self._lock = threading.Lock()
        self._starting = False
        self._pause_s = _RESTART_EVERY_S
        self._next = 0.0
        self.socket = config.service if self._settings is None else find_or_start(self._settings)

    def missed(self) -> None:
        """Starts the service again, in the background, after a call found it away. Clients reconnect by themselves.

        Never raises: an attempt that fails is logged, and followed by another.
        """
        settings = self._settings
        with self._lock:
            if settings is None or self._starting or time.monotonic() < self._next:
                return
            self._starting = True
        try:
            thread = threading.Thread(target=self._start, args=(settings,), name="kvhoist-service-start", daemon=True)
            thread.start()
        except Exception as error:  # No thread is to be had.
            self._tried(error)

    def _start(self, settings: ServiceSettings) -> None:
        try:
            find_or_start(settings)
        except Exception as error:
            self._tried(error)
        else:
            self._tried(None)

    def _tried(self, error: Exception | None) -> None:
        with self._lock:
            self._starting = False
            self._next = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _RESTART_EVERY_S_MAX) if error else _RESTART_EVERY_S
        if error:
            logger.warning("kvhoist: the service cannot be started again: %s; trying later", error)
