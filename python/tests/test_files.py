"""Ranges of files, beside Python's own."""

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import nodes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvhoist
from kvhoist import files

numpy = pytest.importorskip("numpy")

SIZE = 300_001


@pytest.fixture
def path(tmp_path):
    content = random.Random(7).randbytes(SIZE)
    (tmp_path / "data").write_bytes(content)
    return tmp_path / "data", content


@given(
    ranges=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 100_000)), max_size=20),
    piece=st.sampled_from([4096, 1 << 16, None]),
    page_cache=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_ranges_are_what_the_file_holds(tmp_path_factory, ranges, piece, page_cache):
    content = random.Random(7).randbytes(SIZE)
    path = tmp_path_factory.mktemp("files") / "data"
    path.write_bytes(content)
    targets = [bytearray(min(n, SIZE - at)) for at, n in ranges]
    told = []
    result = files.read_many(
        [(path, at, target) for (at, _), target in zip(ranges, targets)],
        piece_bytes=piece, page_cache=page_cache, threads=3, progress=lambda *now: told.append(now),
    )  # fmt: skip
    for (at, _), target in zip(ranges, targets):
        assert bytes(target) == content[at : at + len(target)]
    assert result.nbytes == sum(map(len, targets))
    assert told and told[-1] == (result.nbytes, result.nbytes)
    assert result.page_cache_bytes == 0 or page_cache


def test_numpy_arrays_and_memoryviews_are_targets_and_sources(path, tmp_path):
    file, content = path
    array = numpy.empty(1000, dtype=numpy.uint16)
    assert files.open(file).read_into(array, 17).nbytes == 2000
    assert array.tobytes() == content[17:2017]
    result = files.write(tmp_path / "copy", [array, memoryview(content)[:3], b""])
    assert (tmp_path / "copy").read_bytes() == content[17:2017] + content[:3] and result.nbytes == 2003
    assert files.open(tmp_path / "copy").write_from(b"xyz", 1).nbytes == 3
    assert (tmp_path / "copy").read_bytes()[:5] == content[17:18] + b"xyz" + content[21:22]


@pytest.mark.parametrize(
    "target, words",
    [
        (b"read-only", "writable"),
        (numpy.empty((4, 4))[:, 1], "contiguous"),
        ("text", "expected a tensor"),
        (bytearray(SIZE + 1), f"the file's {SIZE} bytes"),
    ],
)
def test_targets_that_cannot_be_filled_are_refused(path, target, words):
    with pytest.raises(kvhoist.ArgumentError, match=words):
        files.open(path[0]).read_into(target)


def test_what_is_no_file_and_wrong_settings_are_refused(path, tmp_path):
    with pytest.raises(kvhoist.IoError) as raised:
        files.open(tmp_path / "nothing")
    assert raised.value.errno == 2 and "nothing" in str(raised.value)
    with pytest.raises(kvhoist.ArgumentError, match="found a folder"):
        files.open(tmp_path)
    for wrong in [{"threads": 0}, {"piece_bytes": 5}, {"mode": "nonsense"}]:
        with pytest.raises(kvhoist.ArgumentError, match=next(iter(wrong))):
            files.open(path[0]).read_into(bytearray(3), **wrong)
    with pytest.raises(kvhoist.ArgumentError, match="offset"):
        files.open(path[0]).read_into(bytearray(3), -1)
    with pytest.raises(TypeError, match="trheads"):
        files.write(tmp_path / "copy", [b"1"], trheads=1)
    assert not (tmp_path / "copy").exists()


def test_a_file_that_was_written_to_is_an_error(path):
    file = files.open(path[0])
    with open(path[0], "ab") as appended:
        appended.write(b"more")
    with pytest.raises(kvhoist.IoError, match="changed while it was read"):
        file.read_into(bytearray(SIZE))


def test_a_read_can_be_awaited(path):
    async def both():
        file, targets = files.open(path[0]), [bytearray(1000), bytearray(2000)]
        await asyncio.gather(*(file.read_into_async(target, 5) for target in targets))
        return targets

    assert asyncio.run(both()) == [path[1][5:1005], path[1][5:2005]]


def test_asyncio_writes(path, tmp_path):
    async def both():
        await files.write_async(tmp_path / "new", [b"one", b"two"])
        return await files.open(path[0]).write_from_async(b"three", 7)

    assert asyncio.run(both()).nbytes == 5
    assert (tmp_path / "new").read_bytes() == b"onetwo"
    assert path[0].read_bytes() == path[1][:7] + b"three" + path[1][12:]


def test_the_file_that_was_opened_is_written_to(path, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_bytes(b"another file")
    monkeypatch.chdir(tmp_path)
    file = files.open("data")
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.write_from(b"three", 7)
    assert (tmp_path / "elsewhere" / "data").read_bytes() == b"another file"
    assert path[0].read_bytes() == path[1][:7] + b"three" + path[1][12:]
    target = bytearray(10)
    assert file.read_into(target, 5).nbytes == 10 and target == path[1][5:7] + b"three" + path[1][12:15]


def test_a_file_is_read_after_it_was_written_to(path):
    """By what has it open; a write by others is an error."""
    file, target = files.open(path[0]), bytearray(3)
    file.write_from(b"end", SIZE)
    assert file.size == SIZE + 3
    asyncio.run(file.write_from_async(b"END", SIZE))
    file.read_into(target, SIZE)
    assert target == b"END"
    path[0].write_bytes(path[1])
    with pytest.raises(kvhoist.IoError, match="changed while it was read"):
        file.read_into(target)


def test_a_file_is_read_after_a_write_to_it_failed_or_was_cancelled(path):
    file, target = files.open(path[0]), bytearray(3)

    def fail(done, _total):
        if done:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        file.write_from(b"end", SIZE, progress=fail)
    file.read_into(target, SIZE)
    assert target == b"end" and file.size == SIZE + 3

    async def cancelled():
        loop, is_cancelled = asyncio.get_running_loop(), threading.Event()

        def cancel(done, _total):
            if done:
                loop.call_soon_threadsafe(lambda: (writing.cancel(), is_cancelled.set()))
                assert is_cancelled.wait(nodes.PATIENCE_S)

        writing = asyncio.create_task(file.write_from_async(b"END", SIZE, progress=cancel))
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(cancelled())
    file.read_into(target, SIZE)
    assert target == b"END"


def test_transfers_that_are_awaited_begin_as_threads_are_free_for_them(path, tmp_path, monkeypatch):
    """Each has threads and buffers."""
    begun, start, over = [], files._native.files_read, threading.Event()
    monkeypatch.setattr(files._native, "files_read", lambda *given: begun.append(given) or start(*given))

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        held = loop.run_in_executor(None, over.wait)
        file, targets = files.open(path[0]), [bytearray(3) for _ in range(10)]
        reads = [asyncio.create_task(file.read_into_async(target, 5)) for target in targets]
        written, unwanted = (asyncio.create_task(files.write_async(name, [b"x"])) for name in ("new", "unwanted"))
        reads[0].cancel()
        await asyncio.sleep(0)
        reads[1].cancel()
        unwanted.cancel()
        monkeypatch.chdir(path[0].parents[1])
        early = len(begun)
        over.set()
        results = await asyncio.gather(unwanted, *reads, held, written, return_exceptions=True)
        assert [type(result) for result in results[:3]] == [asyncio.CancelledError] * 3
        assert early == 0 and targets[2:] == [path[1][5:8]] * 8

    monkeypatch.chdir(tmp_path)
    asyncio.run(main())
    assert (tmp_path / "new").read_bytes() == b"x", "where the program worked when it called"
    assert not (tmp_path / "unwanted").exists()


def test_a_cancelled_write_leaves_the_file_as_it_was(path, tmp_path):
    source = bytearray(64 << 20)

    async def cancelled():
        slow = {"threads": 1, "piece_bytes": 4096}
        start, started = files._file(path[0], [source], slow), []
        writing = asyncio.create_task(files._awaited(lambda: started.append(start()) or started[0], slow))
        while not started or started[0].progress() is not None:  # Until it is waited for.
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    for _ in range(20):
        asyncio.run(cancelled())
        source += b"resized"  # Refused while it is exported.
        assert os.listdir(tmp_path) == ["data"]
        if path[0].read_bytes() == path[1]:
            return
        # It was complete by then, on a busy machine.
        path[0].write_bytes(path[1])
    pytest.fail("20 writes of 64 MiB by requests of 4 KiB went on after they were cancelled")


def test_a_failed_progress_ends_the_transfer(path):
    def fail(*_):
        raise RuntimeError("no more")

    target = bytearray(SIZE)
    with pytest.raises(RuntimeError, match="no more"):
        files.open(path[0]).read_into(target, progress=fail, piece_bytes=4096, threads=1)
    target += b"resized"  # Refused while it is exported.


def test_a_call_that_fails_has_ended_its_transfer(path):
    """Whoever catches the exception has it, and with it the call's frames, for as long as they like."""
    target = bytearray(SIZE)

    def fail(*_):
        raise RuntimeError("no more")

    transfer = files.start_reads([(path[0], 0, target)], {"piece_bytes": 4096, "threads": 1})
    with pytest.raises(RuntimeError, match="no more"):
        files.finish(transfer, {"progress": fail})
    assert transfer.progress() is None, "it goes on"


def test_a_call_that_is_cancelled_again_waits_all_the_same(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(files, "finish", lambda *_: over.wait(nodes.PATIENCE_S))

    async def cancelled():
        reading = asyncio.create_task(files._awaited(lambda: SimpleNamespace(cancel=lambda: None), {}))
        for _ in range(4):
            await asyncio.sleep(0.01)
            assert not reading.done(), "its requests use the memory"
            reading.cancel()
        over.set()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(cancelled())


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(path, monkeypatch, capsys, caplog):
    with caplog.at_level("INFO", logger="kvhoist"):
        files.open(path[0]).read_into(bytearray(SIZE), progress=True)
        assert "0.0 of 0.0 GB" in caplog.text and capsys.readouterr().err == ""
        caplog.clear()
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        files.open(path[0]).read_into(bytearray(SIZE), progress=True)
        assert f"[{'#' * 30}] 0.0 of 0.0 GB\n" in capsys.readouterr().err and caplog.text == ""
    bar, told = files.Bar(), []
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    monkeypatch.setattr(files.logger, "info", lambda *_: told.append(_))
    for done in range(100):
        bar(done, 100)
    assert told == [], "a line every ten seconds, and one at the end"
    bar(100, 100)
    assert len(told) == 1


def test_a_service_holds_a_file_for_all_who_read_it(path, tmp_path):
    node = nodes.Node(tmp_path / "store")
    file = files.open(path[0])
    held = files.Service(node.socket).hold(file, keep=True)
    target = bytearray(1000)
    result = held.read_into(target, 5)
    assert (result.mode, result.held_bytes, bytes(target)) == ("service", 1000, path[1][5:1005])
    service = files.Service(node.socket)
    other = service.hold(file)
    node.kill()
    assert held.read_into(target, 70_000).held_bytes == 1000 and target == path[1][70_000:71_000], "it has come"
    other.write_from(b"new", 5)
    assert other.read_into(target).held_bytes == 0 and target[5:8] == b"new", "the copy is of what it was"
    with pytest.raises(kvhoist.UnavailableError):
        service.hold(file)
    with pytest.raises(kvhoist.UnavailableError, match="kvhoist serve"):
        files.Service(tmp_path / "nobody")


def test_a_held_file_that_is_dropped_while_the_service_hangs_stops_no_other_thread(path, tmp_path):
    node = nodes.Node(tmp_path / "store")
    service = files.Service(node.socket)
    held, errors, ticks, over = service.hold(files.open(path[0])), [], [], threading.Event()

    def ask():
        try:
            service.hold(files.open(path[0]))
        except kvhoist.Error as error:
            errors.append(error)

    def tick():
        while not over.wait(0.01):
            ticks.append(time.monotonic())

    threads = [threading.Thread(target=ask), threading.Thread(target=tick)]
    with node.hanging():
        for thread in threads:
            thread.start()
        nodes.await_(lambda: len(ticks) > 50, "the other thread to ask")
        # Waits for the one request before its own.
        del held
        over.set()
        for thread in threads:
            thread.join()
    node.kill()
    assert isinstance(errors[0], kvhoist.DeadlineError)
    assert max(later - one for one, later in itertools.pairwise(ticks)) < 5


def test_ctrl_c_ends_a_read(tmp_path):
    """Of a file that takes long: in requests of a page, past the page cache."""
    # A shell starts what runs in its background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(tmp_path / "large", "wb") as large:
        large.truncate(1 << 30)
    target = numpy.empty(1 << 30, dtype=numpy.uint8)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            files.open(tmp_path / "large").read_into(target, page_cache=False, piece_bytes=4096, threads=1)
    timer.join()
    signal.signal(signal.SIGINT, before)
