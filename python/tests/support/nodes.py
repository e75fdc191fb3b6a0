"""A node's service in a process of its own, that tests kill and start again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import kvhoist
from kvhoist import service

PATIENCE_S = 120

#: How long a service of the tests lingers: on a busy machine it may be this long until its first client attaches.
LINGER_S = 20

#: Bytes of a block of these tests.
BLOCK = 64 << 10


def await_(condition, what):
    """Waits for what another process does."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.002)


def await_unlocked(folder):
    """Waits until nobody has the stores in a folder: the kernel ends the writes of a killed process, then its locks."""
    for store in Path(folder).rglob("kvhoist.store"):
        with open(store, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


class Node:
    """`python -m kvhoist serve` over one store."""

    def __init__(self, store_dir, capacity="64MiB", host_bytes="8MiB", **more) -> None:
        # The path of a socket is short.
        self.place = Path(tempfile.mkdtemp(prefix="kvhoist-"))
        self.socket = str(self.place / "s")
        sizes = kvhoist.parse_bytes(capacity), kvhoist.parse_bytes(host_bytes)
        self.settings = service.ServiceSettings((str(store_dir),), *sizes, direct_io="prefer", **more)
        Path(store_dir).mkdir(exist_ok=True)
        self.start()

    def start(self, *flags: str) -> None:
        command = [*self.settings.command(), *flags]
        command[command.index("--socket") + 1] = self.socket
        environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout.readline().startswith("kvhoist: listening"), "no service"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL
        self.process.stdout.close()

    @contextlib.contextmanager
    def hanging(self):
        """The service answers nothing meanwhile."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            await_(self._all_stopped, "the service's threads to stop")
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def _all_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        try:
            return all(task.read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks)
        except (FileNotFoundError, ProcessLookupError):  # A thread has ended meanwhile.
            return False

    def start_deaths(self, stop: threading.Event) -> threading.Thread:
        """Kills the service and starts it again, four times or until `stop` is set, in the thread it returns."""

        def deaths():
            for _ in range(4):
                if stop.wait(0.05):
                    return
                self.kill()
                self.start()

        killer = threading.Thread(target=deaths)
        killer.start()
        return killer

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.place)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()


def block(n: int) -> bytes:
    return n.to_bytes(4, "little") * (BLOCK // 4)


def key(n: int) -> str:
    return f"{n:064x}"


def end_services(store_dir) -> None:
    """Ends the services of a store, which would linger."""
    for pid in service_pids(store_dir):
        os.kill(pid, signal.SIGTERM)
    await_(lambda: not service_pids(store_dir), "the end of the service")


def service_pids(store_dir):
    """Processes that have this store's lock: found by their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "serve" in words and str(store_dir) in words:
            found.append(int(process.name))
    return found
