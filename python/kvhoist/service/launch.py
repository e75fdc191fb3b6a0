"""A node's service from Python: `find_or_start` finds or starts one, by `python -m kvhoist serve`."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Callable

from .._folders import make_folder, open_private
from .._values import config_error
from ..errors import UnavailableError

logger = logging.getLogger(__name__)

#: Seconds until a started service must listen.
_START_PATIENCE_S = 120

#: Seconds for which other processes may start it, one after the other.
_LOCK_PATIENCE_S = 2 * _START_PATIENCE_S + 30

#: The kernel's bound on a socket's path.
_SOCKET_BYTES_MAX = 107

#: The GPUs of one replica, where the service serves all, and the socket where a service manager waits for the engine.
_OF_ONE_PROCESS = ("CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET")

#: Starts the command of its arguments, with standard error as its output, writes the number of its process, and ends.
#: So the process is no descendant of an engine, which kills all of those at its own end. It keeps the pipe open until
#: it ends. An engine binds ranks to processors near their GPUs; the service has all that the system lets it have.
_STARTER = """\
import os, sys
try:
    os.sched_setaffinity(0, range(8192))
except OSError:
    pass
pid = os.fork()
if pid:
    print(pid)
else:
    os.setsid()
    os.set_inheritable(os.dup(1), True)
    os.dup2(2, 1)
    os.execv(sys.argv[1], sys.argv[1:])
"""


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
    #: Where it serves its figures, on this machine's own address; 0: the system chooses.
    http_port: int = 0

    def targets(self) -> str:
        """The file with the address of its figures, as Prometheus reads it (`file_sd_configs`)."""
        return self.socket() + ".targets.json"

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
        # Where it answers stands in the file that `targets` names.
        more += ["--http", f"127.0.0.1:{self.http_port}"]
        return [sys.executable, "-m", "kvhoist", "serve", "--socket", self.socket(), *paths, *sizes, *more]


def listens(path: str) -> bool:
    """Whether a service listens there, or what else there is keeps this user out, as a connection then says.

    Waits for none: one that accepts no connections at present listens too.
    """
    with socket.socket(socket.AF_UNIX) as stream:
        stream.setblocking(False)
        try:
            stream.connect(path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


def find_or_start(settings: ServiceSettings) -> str:
    """The socket of the service of these paths. Starts a detached one if there is none.

    A file lock lets one of several processes start it; the others wait.

    Raises UnavailableError with the last line of the service's log if it does not begin to listen, and StoreError if
    others can use the lock or the log.
    """
    path = settings.socket()
    if listens(path):
        return path
    for directory in settings.paths:
        make_folder(directory, settings.capacity // len(settings.paths))
    name = os.path.join(settings.paths[0], "kvhoist-start.lock")
    with open_private(name) as lock:
        _lock(lock, name, path)
        try:
            if not listens(path):
                _start(settings, path)
        finally:
            # Not by the close: a child that another thread has forked meanwhile has the file open, too.
            fcntl.flock(lock, fcntl.LOCK_UN)
    return path


def _lock(lock: BinaryIO, name: str, path: str) -> None:
    """Takes the lock, for which it waits while another process starts the service of this socket.

    Without it where the service listens after all.
    """
    give_up = time.monotonic() + _LOCK_PATIENCE_S
    with contextlib.suppress(BlockingIOError):
        return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    logger.info("kvhoist: waiting for the process that has %s locked, which starts the service at %s", name, path)
    while time.monotonic() < give_up:
        time.sleep(0.02)
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not listens(path):
        raise UnavailableError(
            f"service: found {name} locked by other processes for {_LOCK_PATIENCE_S} s, expected that one of them starts "
            f"the service at {path} within {_START_PATIENCE_S} s; end the one that has it (`lslocks` names it)"
        )


@dataclass(frozen=True)
class _Process:
    """A process that is no child of this one."""

    pid: int
    #: One end of a pipe. The process has the other, and closes it by its end.
    pipe: IO[bytes]

    def ended(self, within_ms: int | None) -> bool:
        """Whether it ends within this time; `None`: waits for its end."""
        poll = select.poll()
        poll.register(self.pipe, 0)
        return bool(poll.poll(within_ms))


def _start(settings: ServiceSettings, path: str) -> None:
    log = os.path.join(settings.paths[0], "kvhoist-service.log")
    with open_private(log, others=0o022) as output:
        begun = output.seek(0, os.SEEK_END)
        process = _spawn(settings.command(), output, lambda: _last_line(log, begun))
    give_up = time.monotonic() + _START_PATIENCE_S
    while not listens(path):
        if process.ended(within_ms=10):
            said = f"{log} says: {_last_line(log, begun)}"
            raise UnavailableError(f"service: it ended before it listened at {path}; {said}")
        if time.monotonic() > give_up:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.ended(within_ms=None)
            raise UnavailableError(f"service: it did not listen at {path} for {_START_PATIENCE_S} s; see {log}")
    logger.info(
        "kvhoist: started a service, process %d, at %s; its log is %s, the address of its figures in %s",
        process.pid, path, log, settings.targets(),
    )  # fmt: skip
    # It outlives this process. While this process lives, a thread logs the end of the service.
    arguments = process, path, log, begun
    try:
        threading.Thread(target=_log_end, args=arguments, name="kvhoist-service", daemon=True).start()
    except RuntimeError as error:
        process.pipe.close()
        logger.warning("kvhoist: the end of the service will not be logged: %s", error)


def _spawn(command: list[str], output: IO[bytes], why: Callable[[], str]) -> _Process:
    """Starts a process that is no descendant of this one. `why` says what was written to `output`."""
    advice = "raise `ulimit -u`, or the container's limit of processes, if that is reached"
    try:
        starter = subprocess.Popen(
            [sys.executable, "-S", "-c", _STARTER, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=output, start_new_session=True, cwd="/", env=_environment(),
        )  # fmt: skip
    except OSError as error:
        raise UnavailableError(f"service: its process could not be started: {error}; {advice}") from error
    assert starter.stdout is not None
    pid = starter.stdout.readline().strip()
    status = starter.wait()
    if not pid:
        starter.stdout.close()
        found = f"status {status} of the process that starts it, which says: {why()}"
        raise UnavailableError(f"service: its process could not be started: {found}; {advice}")
    return _Process(int(pid), starter.stdout)


def _environment() -> dict[str, str]:
    """The environment of a service: this process's, without what is said to this process alone."""
    environment = dict(os.environ)
    for name in _OF_ONE_PROCESS:
        environment.pop(name, None)
    # The package is found where this process found it; the working directory differs.
    roots = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    return environment


def _log_end(process: _Process, path: str, log: str, begun: int) -> None:
    process.ended(within_ms=None)
    process.pipe.close()
    # A service that ends by itself, or is told to, removes its socket.
    level = logging.WARNING if os.path.exists(path) and not listens(path) else logging.INFO
    logger.log(level, "kvhoist: the service, process %d, ended; %s says: %s", process.pid, log, _last_line(log, begun))


def _last_line(log: str, begun: int) -> str:
    """The last line of a log that was `begun` bytes long when the service began."""
    try:
        with open(log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # It may have been cut off since.
            file.seek(max(0, size - 4096, begun if begun <= size else 0))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError as error:
        return str(error)
    nothing = "nothing, as of a process that was killed; where memory ran out, the kernel's log names it"
    return next((line for line in reversed(lines) if line.strip()), nothing)
