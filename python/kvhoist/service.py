"""A node's service from Python: `python -m kvhoist serve` runs one, `find_or_start` finds or starts one."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from . import _logs, _native
from .config import DIRECT_IO, SERVICE_WRITE_POLICIES, STORAGE, config_error, parse_bytes
from .errors import UnavailableError

logger = logging.getLogger(__name__)

#: Seconds until a started service must listen.
_START_PATIENCE_S = 120

#: Seconds between two looks of a service at the places where it is found.
_LOOK_EVERY_S = 1.0

#: The kernel's bound on a socket's path.
_SOCKET_BYTES_MAX = 107


@dataclass(frozen=True)
class ServiceSettings:
    """The settings that a service is started with. A running service keeps its own."""

    #: Directories, one for each drive.
    paths: tuple[str, ...]
    #: Bytes on disk of all spaces.
    capacity: int
    #: Bytes of host memory that all spaces together may reserve; no other is used.
    host_bytes: int
    #: Seconds without a client after which it ends by itself.
    linger_s: int = 300
    direct_io: str = "require"
    storage: str = "auto"
    #: Move blocks through the service's host memory, and keep them there.
    keep_in_host: bool = False
    #: When blocks go to disk: "write_through" or "by_value".
    write_policy: str = "write_through"
    #: Bytes a day that by_value may write to disk, of all spaces together.
    write_budget: int | None = None

    def socket(self) -> str:
        """Where the service of these paths listens: beside the store on the first."""
        path = os.path.join(self.paths[0], "kvhoist.sock")
        if len(os.fsencode(path)) > _SOCKET_BYTES_MAX:
            expected = f"a path whose socket {path} has {_SOCKET_BYTES_MAX} bytes at most; name a socket as `service`"
            raise config_error("path", self.paths[0], expected)
        return path

    def command(self) -> list[str]:
        """The command line of a service with these settings."""
        paths = [argument for path in self.paths for argument in ("--path", path)]
        sizes = ["--capacity", str(self.capacity), "--host-bytes", str(self.host_bytes), "--no-move-host"]
        more = ["--linger", str(self.linger_s), "--direct-io", self.direct_io, "--storage", self.storage]
        more += ["--write-policy", self.write_policy]
        more += ["--keep-in-host"] if self.keep_in_host else []
        more += ["--write-budget", str(self.write_budget)] if self.write_budget else []
        return [sys.executable, "-m", "kvhoist", "serve", "--socket", self.socket(), *paths, *sizes, *more]


def listens(path: str) -> bool:
    """Whether a service listens there."""
    with socket.socket(socket.AF_UNIX) as stream:
        try:
            stream.connect(path)
        except OSError:
            return False
    return True


def find_or_start(settings: ServiceSettings) -> str:
    """The socket of the service of these paths. Starts a detached one if there is none.

    A file lock lets one of several processes start it; the others wait.

    Raises UnavailableError with the last line of the service's log if it does not begin to listen.
    """
    path = settings.socket()
    if listens(path):
        return path
    for directory in settings.paths:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.path.join(settings.paths[0], "kvhoist-start.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listens(path):
            _start(settings, path)
    return path


def _start(settings: ServiceSettings, path: str) -> None:
    log = os.path.join(settings.paths[0], "kvhoist-service.log")
    environment = dict(os.environ)
    # The package is found where this process found it; the working directory differs.
    roots = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    with open(log, "ab") as output:
        try:
            service = subprocess.Popen(
                settings.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                cwd="/", env=environment,
            )  # fmt: skip
        except OSError as error:
            raise UnavailableError(
                f"service: its process could not be started: {error}; raise `ulimit -u`, or the container's limit of "
                "processes, if that is reached"
            ) from error
    give_up = time.monotonic() + _START_PATIENCE_S
    while not listens(path):
        status = service.poll()
        if status is not None:
            raise UnavailableError(f"service: it ended with status {status}; {log} says: {_last_line(log)}")
        if time.monotonic() > give_up:
            service.kill()
            service.wait()
            raise UnavailableError(f"service: it did not listen at {path} for {_START_PATIENCE_S} s; see {log}")
        time.sleep(0.01)
    logger.info("kvhoist: started a service, process %d, at %s; its log is %s", service.pid, path, log)
    # It outlives this process. While this process lives, a thread logs the end of the service.
    try:
        threading.Thread(target=_reap, args=(service,), name="kvhoist-service", daemon=True).start()
    except RuntimeError as error:
        logger.warning("kvhoist: the end of the service will not be logged: %s", error)


def _reap(service: subprocess.Popen) -> None:
    status = service.wait()
    level = logging.WARNING if status else logging.INFO
    logger.log(level, "kvhoist: the service, process %d, ended with status %d", service.pid, status)


def _last_line(log: str) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError as error:
        return str(error)
    return next((line for line in reversed(lines) if line.strip()), "nothing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `python -m kvhoist serve`, which are those of the command `kvhoist serve`."""
    default = _native.default_socket()
    parser.add_argument("--socket", default=default, help="where clients connect (default: %(default)s)")
    parser.add_argument("--path", action="append", required=True, help="a folder on a drive; may be given again")
    parser.add_argument("--capacity", required=True, help="disk for all spaces, such as 2TiB")
    parser.add_argument("--host-bytes", required=True, help="host memory for the blocks of all spaces")
    parser.add_argument("--linger", type=int, metavar="SECONDS", help="end after so long without a client")
    parser.add_argument("--direct-io", choices=DIRECT_IO, default="require")
    parser.add_argument("--storage", choices=STORAGE, default="auto")
    parser.add_argument("--keep-in-host", action="store_true", help="move blocks through host memory, and keep them")
    parser.add_argument(
        "--share", action="append", default=[], metavar="NAME:disk=MIN..MAX,host=MIN..MAX",
        help="disk and host memory that a tenant's spaces get at least and at most; may be given again",
    )  # fmt: skip
    parser.add_argument("--allow-uid", action="append", type=int, default=[], metavar="UID", help="admit a user too")
    parser.add_argument("--socket-group", metavar="GROUP", help="admit the members of a group too; it gets the socket")
    parser.add_argument("--write-policy", choices=SERVICE_WRITE_POLICIES, default="write_through")
    parser.add_argument("--write-budget", metavar="SIZE", help="bytes a day that by_value may write, of all spaces")
    parser.add_argument("--no-move-host", action="store_true", help="give a space no more memory than it asks for")
    parser.add_argument("--no-pin", action="store_true", help="pin no client's memory")


class _Places:
    """Files and folders by which a service is found, as they are now."""

    def __init__(self, paths: list[str]) -> None:
        self._known = {path: self._identity(path) for path in paths}

    @staticmethod
    def _identity(path: str) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        except OSError:  # It cannot be looked at now, which says nothing.
            return (0, 0)
        return (found.st_dev, found.st_ino)

    def are_there(self) -> bool:
        """Whether none was deleted, or replaced by another."""
        return all(self._identity(path) in (known, (0, 0)) for path, known in self._known.items())


def serve(given: argparse.Namespace) -> int:
    """Serves until a signal: SIGTERM, SIGINT and SIGHUP drain, a second one ends at once."""
    ends, ended = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}, signal.SIGUSR1
    # Blocked in all threads that are started from here; this thread waits for the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ends, ended})
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _logs.start()
    settings = {
        "direct_io": given.direct_io, "storage": given.storage, "bypass_host": not given.keep_in_host,
        "write_policy": given.write_policy,
    }  # fmt: skip
    if given.write_budget is not None:
        settings["write_budget"] = parse_bytes(given.write_budget, "--write-budget")
    if given.linger is not None and not 1 <= given.linger <= 86_400:
        raise config_error("--linger", given.linger, "1 to 86400 seconds")
    server = _native.Server(
        given.socket, given.path, settings,
        capacity_bytes=parse_bytes(given.capacity, "--capacity"), host_bytes=parse_bytes(given.host_bytes, "--host-bytes"),
        shares=given.share, linger_ms=None if given.linger is None else given.linger * 1000,
        pin=not given.no_pin, move_host=not given.no_move_host, uids=given.allow_uid, socket_group=given.socket_group,
    )  # fmt: skip
    failure: list[BaseException] = []

    def wait() -> None:
        try:
            server.wait()
        except BaseException as error:
            failure.append(error)
        os.kill(os.getpid(), ended)

    threading.Thread(target=wait, name="kvhoist-wait", daemon=True).start()
    print(f"kvhoist: listening at {given.socket}", flush=True)
    # Of a service that ends by itself: any other may outlive its socket, which a cleaner of old files may delete.
    places = None if given.linger is None else _Places([given.socket, *given.path])
    draining = False
    while (found := signal.sigtimedwait({*ends, ended}, _LOOK_EVERY_S)) is None or found.si_signo != ended:
        if found is None:
            if draining or places is None or places.are_there():
                continue
            logger.warning("kvhoist: %s or its socket was deleted or replaced: this service ends", given.path)
        elif draining:
            os._exit(128 + found.si_signo)
        draining = True
        server.drain()
    if failure:
        raise failure[0]
    return 0
