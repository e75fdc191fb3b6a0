"""The engine's messages in Python's `logging`."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvhoist

BLOCK = 4096
OPTIONS = dict(block_bytes=BLOCK, host_bytes="1MiB", capacity="2MiB", direct_io="prefer")

#: Messages that the native half keeps for `logging`.
QUEUE_MAX = 256


class Kept(logging.Handler):
    """Keeps records, where others can wait for them; waits itself for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue = queue.Queue()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.gate.wait()
        self.records.put(record)

    def await_one(self, text: str) -> logging.LogRecord:
        while True:
            record = self.records.get(timeout=60)
            if text in record.getMessage():
                return record


@pytest.fixture
def kept():
    handler, logger = Kept(), logging.getLogger("kvhoist")
    logger.addHandler(handler)
    yield handler
    handler.gate.set()
    logger.removeHandler(handler)


def warn(path) -> None:
    """Opens a store whose second superblock is damaged: the engine mends it, and warns with the path."""
    if not list(path.iterdir()):
        kvhoist.Cache(path, **OPTIONS).close()
    (store,) = path.iterdir()
    with open(store, "r+b") as file:
        file.seek(4096)
        file.write(b"damaged")
    kvhoist.Cache(path, **OPTIONS).close()


WARNING = "superblock"


def test_a_warning_of_the_engine_is_a_record(kept, store_dir):
    warn(store_dir)
    record = kept.await_one(WARNING)
    assert (record.name, record.levelno) == ("kvhoist.engine", logging.WARNING)
    assert str(store_dir) in record.getMessage()


def test_a_damaged_block_is_logged(kept, store_dir):
    with kvhoist.Cache(store_dir, **OPTIONS) as cache:
        cache.store(["a"], [b"\xa5" * BLOCK])
    (store,) = store_dir.iterdir()
    data = bytearray(store.read_bytes())
    data[data.index(b"\xa5" * BLOCK)] ^= 1
    store.write_bytes(data)
    with kvhoist.Cache(store_dir, **OPTIONS) as cache:
        assert cache.get("a") is None
    assert kept.await_one("given up").levelno == logging.WARNING


def test_a_handler_that_does_not_return_holds_nobody_up_and_what_is_lost_is_counted(kept, store_dir):
    kept.gate.clear()
    warn(store_dir)
    assert kept.entered.wait(60)
    # One message is with the handler; so many find room, and the others none.
    for _ in range(QUEUE_MAX + 10):
        warn(store_dir)
    kept.gate.set()
    lost = int(kept.await_one("messages of the engine were lost").getMessage().split()[0])
    assert lost >= 10


def test_names_of_files_reach_no_terminal_as_they_are(kept, store_dir):
    path = store_dir / "\x1b[2Jx"
    path.mkdir()
    warn(path)
    said = kept.await_one(WARNING).getMessage()
    assert "\x1b" not in said and said.isprintable() and "[2Jx" in said


def test_messages_of_the_last_moment_are_logged(store_dir):
    program = """
import logging, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_logs
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
test_logs.warn(Path(sys.argv[2]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, Path(__file__).parent, store_dir], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if WARNING in line)
    assert line.startswith("kvhoist.engine WARNING ")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_logs_of_its_own(kept, store_dir):
    warn(store_dir)
    kept.await_one(WARNING)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            warn(store_dir)
            kept.await_one(WARNING)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_command_takes_a_level_for_each_module(tmp_path):
    """As the binary does, whose service inherits the variable of an engine's process."""

    def said(given: str) -> tuple[int, str]:
        """The end of a command that opens a store which warns, and what it logged."""
        store = tmp_path / "store"
        store.mkdir(exist_ok=True)
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from pathlib import Path\n"
            "from kvhoist import __main__, doctor\n"
            "import test_logs\n"
            "doctor.run = lambda arguments: test_logs.warn(Path(arguments[0])) or 0\n"
            "sys.exit(__main__.main(['doctor', sys.argv[2]]))\n"
        )
        command = [sys.executable, "-c", script, str(Path(__file__).parent), str(store)]
        done = subprocess.run(command, env={**os.environ, "KVHOIST_LOG": given}, capture_output=True, text=True)
        return done.returncode, done.stderr

    for given, logged in (
        ("warn", True), ("off,kvhoist=warn", True), ("kvhoist=info", True), ("error, kvhoist_service=debug", False),
        ("debug,kvhoist=error", False), ("kvhoist_service=debug", False),
    ):  # fmt: skip
        status, text = said(given)
        assert status == 0 and ("superblock" in text) == logged, (given, text)
    for given in ("bogus", "warn,bogus", "kvhoist=bogus", "=warn"):
        status, text = said(given)
        assert status == 2 and "KVHOIST_LOG: found" in text and "kvhoist_service=debug" in text, (given, text)
