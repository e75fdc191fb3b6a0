"""Clients of a node's service: bytes, memory of all kinds, queues and asyncio, a service that dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nodes import BLOCK, LINGER_S, PATIENCE_S, Node, await_, block, end_services, key, service_pids

import kvhoist
from kvhoist import service


@pytest.fixture
def node(store_dir):
    with Node(store_dir) as node:
        yield node


def connected(node, **more):
    values = dict(space="tests", block_bytes=BLOCK, capacity="24MiB", host_bytes="2MiB", bounce_bytes=4 * BLOCK)
    return kvhoist.connect(node.socket, **{**values, **more})


def test_blocks_come_back_as_they_were(node):
    with connected(node) as client:
        keys, blocks = [key(n) for n in range(20)], [block(n) for n in range(20)]
        assert client.store(keys, blocks) == [True] * 20
        assert client.match_prefix(keys + ["no"]) == 20 and client.match_prefix(["no"] + keys) == 0
        out = [bytearray(BLOCK) for _ in range(21)]
        assert client.load(keys + ["no"], out) == [True] * 20 + [False]
        assert [bytes(b) for b in out] == blocks + [bytes(BLOCK)]
        assert client.get(keys[3]) == blocks[3] and client.get("no") is None and keys[3] in client
        assert client.contains_each([keys[0], "no", keys[1]]) == [True, False, True]
        client.touch(keys)
        assert client.keep(keys[:5], 3600) == 5 and client.release(keys + ["no"]) == 15
        assert asyncio.run(client.release_async(keys[5:])) == 15
        with pytest.raises(kvhoist.ArgumentError, match="seconds"):
            client.keep(keys, -1)
        assert client.prefetch(keys[:2]) in range(3)
        assert client.remove(keys[0]) is True and client.remove(keys[0], durable=True) is False
        client.sync()
        stats = client.stats()
        assert (stats["stores"], stats["tiers"]["disk"]["resident"], stats["disk_trouble"]) == (20, 19, None)
        # The blocks came from memory of no region: copied there, and from there straight to the drive.
        seconds = stats["routes"]["region_to_disk"]["seconds"]
        assert seconds["count"] == 20 == sum(count for _, count in seconds["buckets"])
        assert 0 < seconds["p50"] <= seconds["p99"] and stats["routes"]["host_hit"]["seconds"]["p99"] is None
    # Another client of the space, and one of another.
    with connected(node) as client, connected(node, space="other", capacity="8MiB") as other:
        assert client.get(keys[7]) == blocks[7] and other.get(keys[7]) is None
    assert node.end() == 0 and not os.path.exists(node.socket)


def test_memory_of_every_kind(node):
    """Shared memory goes straight; what cannot be passed is copied, and says so."""
    with connected(node) as client:
        pool = kvhoist.SharedMemory(8 * BLOCK)
        shared = client.register_host(pool)
        # A memfd that takes no seal, as SGLang's pools are.
        fd = os.memfd_create("pool")
        os.ftruncate(fd, 8 * BLOCK)
        plain = mmap.mmap(fd, 8 * BLOCK)
        unsealed = client.register_host(plain, fd=fd)
        own = mmap.mmap(-1, 8 * BLOCK)
        copied = client.register_host(own, pin=True)
        assert [r.copied for r in (shared, unsealed, copied)] == [False, False, True]
        for n, (region, memory) in enumerate([(shared, pool.view), (unsealed, plain), (copied, own)]):
            keys = [key(100 * n + at) for at in range(8)]
            for at in range(8):
                memory[at * BLOCK : (at + 1) * BLOCK] = block(100 * n + at)
            places = [(region.address + at * BLOCK, BLOCK) for at in range(8)]
            before = client.stats()["straight_bytes"]
            assert client.store(keys, places) == [True] * 8
            memory[:] = bytes(8 * BLOCK)
            assert client.load(keys[::-1], places) == [True] * 8
            for at in range(8):
                assert memory[at * BLOCK : (at + 1) * BLOCK] == block(100 * n + 7 - at)
            assert client.stats()["straight_bytes"] - before == 16 * BLOCK, "no copy in the service"
        # Blocks of which some lie here and some there, in pieces.
        half = BLOCK // 2
        scattered = [[(shared.address, half), (copied.address, half)], (shared.address + BLOCK, BLOCK)]
        assert client.load([key(3), key(4)], scattered) == [True, True]
        assert bytes(pool.view[:half]) + own[:half] == block(3) and pool.view[BLOCK : 2 * BLOCK] == block(4)
        for region in (shared, unsealed, copied):
            region.unregister()
            region.unregister()
            with pytest.raises(kvhoist.ArgumentError, match="no registered region"):
                client.load([key(1)], [(region.address, BLOCK)])
        other = mmap.mmap(-1, BLOCK)
        with pytest.raises(kvhoist.ArgumentError, match="no shared mapping"):
            client.register_host(other, fd=fd)
        os.close(fd)


def test_a_client_goes_on_when_its_service_is_back(node):
    with connected(node) as client, kvhoist.connect(node.socket, space="tests", block_bytes=BLOCK) as other:
        pool = kvhoist.SharedMemory(16 * BLOCK)
        region = client.register_host(pool)
        places = [(region.address + at * BLOCK, BLOCK) for at in range(16)]
        keys = [key(n) for n in range(16)]
        for at in range(16):
            pool.view[at * BLOCK : (at + 1) * BLOCK] = block(at)
        assert client.store(keys, places) == [True] * 16
        for _ in range(3):
            node.kill()
            # At once: no deadline is waited for.
            for one in (client, other):
                with pytest.raises(kvhoist.UnavailableError, match="connects again"):
                    while True:
                        one.match_prefix(keys)
                assert not one.connected
            with pytest.raises(kvhoist.UnavailableError):
                client.load(keys, places)
            results = client.load(keys, places, errors="return")
            assert all(isinstance(result, kvhoist.UnavailableError) for result in results)
            assert client.load(keys, places, errors="false") == [False] * 16
            node.start()
            await_(lambda: client.connected and other.connected, "the clients")
            pool.view[:] = bytes(16 * BLOCK)
            assert client.load(keys, places) == [True] * 16
            assert all(pool.view[at * BLOCK : (at + 1) * BLOCK] == block(at) for at in range(16))
            assert other.get(keys[5]) == block(5)
        region.unregister()


def test_a_kill_in_the_middle_ends_every_call(node):
    """Loads of several threads while the service is killed and started: right bytes, a miss or an error."""
    with connected(node, capacity="40MiB") as client:
        keys = [key(n) for n in range(64)]
        assert all(client.store(keys, [block(n) for n in range(64)]))
        wrong, served, stop = [], [0], threading.Event()

        def load(first):
            while not stop.is_set():
                for at in range(first, 64, 8):
                    out = bytearray(BLOCK)
                    (result,) = client.load([keys[at]], [out], errors="return")
                    if result is True:
                        served[0] += 1
                        if out != block(at):
                            wrong.append(at)
                    elif result is not False and not isinstance(result, kvhoist.UnavailableError):
                        wrong.append(result)

        threads = [threading.Thread(target=load, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            before = served[0]
            await_(lambda before=before: served[0] > before + 20, "hits")
            node.kill()
            node.start()
        before = served[0]
        await_(lambda: served[0] > before + 20, "hits after the last start")
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a call hangs"
        assert wrong == []


def test_queue_and_asyncio(node):
    with connected(node) as client:
        keys = [key(n) for n in range(32)]
        client.store(keys, [block(n) for n in range(32)])
        queue = client.queue(40)
        out = [bytearray(BLOCK) for _ in keys]
        tickets = {queue.submit_load([k], [o]): at for at, (k, o) in enumerate(zip(keys, out))}
        assert len(tickets) == queue.outstanding == 32
        while queue.outstanding:
            assert select.select([queue.event_fd], [], [], PATIENCE_S)[0]
            for ticket, results in queue.drain():
                at = tickets.pop(ticket)
                assert results == [True] and out[at] == block(at)
        assert not tickets and all(out[n] == block(n) for n in range(32))
        assert not select.select([queue.event_fd], [], [], 0)[0] and queue.drain() == []
        small = client.queue(1)
        small.submit_store(["new"], [block(77)])
        with pytest.raises(kvhoist.BusyError, match="depth"):
            small.submit_load(["new"], [bytearray(BLOCK)])

        async def many():
            found = await asyncio.gather(*(client.fetch(k) for k in keys + ["no"]))
            assert found == [block(n) for n in range(32)] + [None]
            assert await client.store_async(["a"], [block(1)]) == [True]
            assert await client.remove_async("a") is True

        asyncio.run(many())
    with pytest.raises(kvhoist.ClosedError):
        queue.submit_load([keys[0]], [out[0]])


def test_wrong_arguments_are_named(node, tmp_path):
    with pytest.raises(kvhoist.UnavailableError, match="kvhoist serve"):
        kvhoist.connect(tmp_path / "none", space="a", block_bytes=4096)
    for name, value in [("space", ""), ("block_bytes", 0), ("block_bytes", True), ("deadline_ms", 0), ("bounce_bytes", "x")]:
        with pytest.raises(kvhoist.ConfigError, match=name):
            kvhoist.connect(node.socket, **{"space": "a", "block_bytes": 4096, name: value})
    with pytest.raises(kvhoist.StoreError, match="bytes of disk"):
        connected(node, capacity="1TiB")
    with connected(node) as client:
        for errors in ["raise", "return", "false"]:
            with pytest.raises(kvhoist.ArgumentError, match="one block"):
                client.load([key(0)], [bytearray(10)], errors=errors)
            with pytest.raises(kvhoist.ArgumentError):
                client.store([], [block(0)], errors=errors)
        with pytest.raises(kvhoist.ArgumentError, match="is registered"):
            pool = kvhoist.SharedMemory(BLOCK)
            client.register_host(pool), client.register_host(pool)
        with pytest.raises(kvhoist.ArgumentError):
            client.register_host(b"read-only")
    client.close()
    assert client.closed and repr(client).endswith("closed>")
    with pytest.raises(kvhoist.ClosedError):
        client.load([key(0)], [bytearray(BLOCK)], errors="false")


def test_a_device_that_there_is_not_is_refused_by_name(node):
    for name, value in [("device", "gpu"), ("device_ordinal", -1), ("device_ordinal", True)]:
        with pytest.raises(kvhoist.ConfigError, match=f"^{name}: found"):
            connected(node, **{"device": "cuda", name: value})
    # No machine has so many.
    with pytest.raises(kvhoist.UnavailableError, match="device"):
        connected(node, device="cuda", device_ordinal=1000)
    with connected(node) as client:
        assert client.device is None
        with pytest.raises(kvhoist.ArgumentError, match="without a device"):
            client.register_device(4096, 4096)


def test_a_forked_child_cannot_use_its_parents_client(node):
    with connected(node) as client:
        client.store([key(1)], [block(1)])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 2 if repr(client).endswith("away>") else 3
                client.get(key(1))
            except kvhoist.ForkError:
                status += 5
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.get(key(1)) == block(1)


def test_shared_memory_is_registered_though_nobody_else_has_it(node):
    with connected(node) as client:
        region = client.register_host(kvhoist.SharedMemory(4 * BLOCK))
        assert not region.copied
        assert client.store([key(1)], [(region.address, BLOCK)]) == [True]
        assert client.load([key(1)], [(region.address + BLOCK, BLOCK)]) == [True]
        region.unregister()


def test_nothing_and_0_mean_all_that_is_left(node):
    with connected(node, capacity=0, host_bytes="0") as client:
        tiers = client.stats()["tiers"]
        assert tiers["host"]["slots"] == (8 << 20) // BLOCK and tiers["disk"]["slots"] > 900, "all of the service's"
    for wrong in (-1, False, "", "none"):
        with pytest.raises(kvhoist.ConfigError, match="^capacity: found"):
            connected(node, space="c", capacity=wrong)


def test_a_space_without_room_is_refused_in_the_words_of_its_client(node):
    with pytest.raises(kvhoist.Error) as refused:
        connected(node, space="small", capacity=4096)
    assert "capacity: found 4096" in str(refused.value) and "disks" not in str(refused.value)
    with pytest.raises(kvhoist.Error) as refused:
        connected(node, space="small", capacity="8MiB", host_bytes=4096)
    assert "host_bytes: found 4096" in str(refused.value) and "host_blocks" not in str(refused.value)


def settings_of(store_dir, **more):
    return service.ServiceSettings((str(store_dir),), 64 << 20, 8 << 20, direct_io="prefer", **more)


def test_of_many_that_start_a_service_one_wins(store_dir):
    """It is found by the others, outlives them all, and ends by itself."""
    code = (
        "import sys\nfrom kvhoist import service\n"
        f"print(service.find_or_start(service.ServiceSettings(({str(store_dir)!r},), 64 << 20, 8 << 20,"
        f" linger_s={LINGER_S}, direct_io='prefer')), flush=True)\nsys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    sockets = {starter.stdout.readline().strip() for starter in starters}
    assert sockets == {str(store_dir / "kvhoist.sock")}
    with kvhoist.connect(*sockets, space="a", block_bytes=BLOCK) as client:
        assert len(service_pids(store_dir)) == 1
        assert client.store([key(1)], [block(1)]) == [True]
        for starter in starters:
            starter.kill()
            starter.wait()
            starter.stdin.close()
            starter.stdout.close()
        # A process that starts one and one that has the client are not the same.
        assert client.get(key(1)) == block(1) and len(service_pids(store_dir)) == 1
    await_(lambda: not service_pids(store_dir), "the end of a service without clients")
    # The next one has what it stored.
    path = service.find_or_start(settings_of(store_dir, linger_s=LINGER_S))
    with kvhoist.connect(path, space="a", block_bytes=BLOCK) as client:
        assert client.get(key(1)) == block(1)
    end_services(store_dir)


def descendants(pid):
    """Processes below this one, as an engine finds those that it kills: by their parents."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_a_service_outlives_an_engine_that_kills_its_descendants(store_dir):
    code = (
        "import subprocess, sys\nif sys.argv[1:]:\n    subprocess.run([sys.executable, '-c', sys.argv[1]])\nelse:\n"
        "    from kvhoist import service\n"
        f"    print(service.find_or_start(service.ServiceSettings(({str(store_dir)!r},), 64 << 20, 8 << 20,"
        f" linger_s={LINGER_S}, direct_io='prefer')), flush=True)\n    sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(kvhoist.__file__).parents[1])}
    engine = subprocess.Popen(
        [sys.executable, "-c", code, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    path = engine.stdout.readline().strip()
    with kvhoist.connect(path, space="a", block_bytes=BLOCK) as client:
        (pid,) = service_pids(store_dir)
        ranks = descendants(engine.pid)
        assert len(ranks) == 1 and pid not in ranks
        for rank in [*ranks, engine.pid]:
            os.kill(rank, signal.SIGKILL)
        engine.communicate()
        assert service.listens(path) and client.store([key(1)], [block(1)]) == [True]
        assert os.getsid(pid) == pid, "the end of a terminal ends it too"
    end_services(store_dir)


def test_a_service_has_all_gpus_and_processors_whatever_its_starter_has(store_dir, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("NOTIFY_SOCKET", str(store_dir / "manager"))
    monkeypatch.setenv("KVHOIST_TEST", "kept")
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        path = service.find_or_start(settings_of(store_dir, linger_s=LINGER_S))
    finally:
        os.sched_setaffinity(0, processors)
    with kvhoist.connect(path, space="a", block_bytes=BLOCK):
        (pid,) = service_pids(store_dir)
        assert os.sched_getaffinity(pid) >= processors
        names = {one.partition(b"=")[0] for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    assert b"KVHOIST_TEST" in names and not names & {b"CUDA_VISIBLE_DEVICES", b"NOTIFY_SOCKET"}


def test_a_service_that_accepts_nothing_listens(tmp_path):
    path = str(tmp_path / "s")
    assert not service.listens(path)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(path)
        assert not service.listens(path)
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(path)
        # A thread: without a bound it would wait for ever.
        found = []
        threading.Thread(target=lambda: found.append(service.listens(path)), daemon=True).start()
        await_(lambda: found, "an answer")
        assert found == [True]
    assert not service.listens(path)


def test_a_socket_that_cannot_be_connected_with_is_no_missing_service(tmp_path):
    """As one that this user may not open, which root cannot show: the connection says what is wrong."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        assert service.listens(path)
        assert not service.listens(path + "/below")
        with pytest.raises(kvhoist.UnavailableError, match="wrong type"):
            kvhoist.connect(path, space="a", block_bytes=BLOCK)


@pytest.mark.parametrize("killed", [False, True])
def test_the_end_of_a_service_is_logged_with_what_it_said(store_dir, caplog, killed):
    with caplog.at_level("INFO", logger="kvhoist"):
        service.find_or_start(settings_of(store_dir, linger_s=600))
        (pid,) = service_pids(store_dir)
        os.kill(pid, signal.SIGKILL if killed else signal.SIGTERM)
        await_(lambda: f"process {pid}, ended; " in caplog.text, "the log of its end")
    (level,) = (record.levelname for record in caplog.records if "ended; " in record.getMessage())
    assert level == ("WARNING" if killed else "INFO")
    assert killed or "ended; " + str(store_dir) in caplog.text and "the service has ended" in caplog.text


def test_a_service_that_is_killed_before_it_listens_says_nothing_of_another(store_dir, monkeypatch):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(service.ServiceSettings, "command", lambda _settings: command)
    log = store_dir / "kvhoist-service.log"
    log.touch(mode=0o600)
    log.write_text("the service has ended\n")
    with pytest.raises(kvhoist.UnavailableError, match="ended before it listened at .* says: nothing, as of a process"):
        service.find_or_start(settings_of(store_dir))


def test_a_service_that_cannot_start_says_why(store_dir):
    settings = service.ServiceSettings((str(store_dir),), 64 << 20, 8 << 20, linger_s=0, direct_io="prefer")
    with pytest.raises(kvhoist.UnavailableError, match="linger"):
        service.find_or_start(settings)
    assert service_pids(store_dir) == []


@pytest.mark.parametrize("name", ["kvhoist-start.lock", "kvhoist-service.log"])
def test_a_file_that_others_may_use_holds_up_no_start(store_dir, name):
    path, victim = store_dir / name, store_dir / "victim"
    victim.touch(mode=0o600)
    victim.write_text("mine")
    makers = {
        "found a link": lambda: path.symlink_to(victim),
        "with 2 names": lambda: os.link(victim, path),
        "found mode prw-------": lambda: os.mkfifo(path, 0o600),
    }
    for found, make in makers.items():
        make()
        with pytest.raises(kvhoist.StoreError, match=f"{name}: .*{found}.*expected a file that is .*remove it"):
            service.find_or_start(settings_of(store_dir))
        path.unlink()
    assert victim.read_text() == "mine"


def test_a_start_waits_for_another_no_longer_than_one_takes(store_dir, monkeypatch, caplog):
    monkeypatch.setattr(service.launch, "_LOCK_PATIENCE_S", 0)
    path = store_dir / "kvhoist-start.lock"
    path.touch(mode=0o600)
    with open(path) as lock, caplog.at_level("INFO", logger="kvhoist"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(kvhoist.UnavailableError, match="start.lock locked by other processes.*end the one"):
            service.find_or_start(settings_of(store_dir))
    assert "waiting for the process" in caplog.text


def test_the_files_of_a_start_are_for_its_user_alone(store_dir):
    # As earlier versions made it.
    (store_dir / "kvhoist-start.lock").touch(mode=0o644)
    service.find_or_start(settings_of(store_dir, linger_s=LINGER_S))
    for name in ["kvhoist-start.lock", "kvhoist-service.log"]:
        assert (store_dir / name).stat().st_mode & 0o777 == 0o600
    end_services(store_dir)


def test_a_drain_answers_and_a_second_signal_ends_at_once(node):
    with connected(node) as client:
        client.store([key(1)], [block(1)])
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(PATIENCE_S) == 0
        with pytest.raises(kvhoist.UnavailableError):
            client.get(key(1))


def test_an_address_is_found_in_the_file_that_it_is_mapped_from():
    from kvhoist.client import mapped_from

    fd = os.memfd_create("x")
    os.ftruncate(fd, 4 << 20)
    first, second = mmap.mmap(fd, 1 << 20, offset=1 << 20), mmap.mmap(fd, 1 << 20, flags=mmap.MAP_PRIVATE)
    at = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (first, second)]
    assert mapped_from(at[0], 1 << 20, fd) == 1 << 20
    assert mapped_from(at[0] + 5000, 4096, fd) == (1 << 20) + 5000
    assert mapped_from(at[1], 4096, fd) is None, "nobody else sees what is written there"
    assert mapped_from(at[0], 512 << 20, fd) is None
    os.close(fd)


def test_shared_memory_cannot_shrink():
    """Its view would end the program where it is read."""
    pool = kvhoist.SharedMemory(BLOCK)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 0)
    assert bytes(pool.view) == bytes(BLOCK)


def test_memory_of_a_client_that_was_closed_while_its_service_hung_may_still_be_in_use(node):
    # The space is there: to make one may take longer than the deadline, also on a busy machine.
    patient = connected(node)
    client = connected(node, deadline_ms=10_000, give_up_ms=100)
    region = client.register_host(kvhoist.SharedMemory(BLOCK))
    patient.close()
    with node.hanging():
        for call in [client.close, region.unregister, client.close, region.unregister]:
            with pytest.raises(kvhoist.DeadlineError):
                call()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_a_service_starts_does_not_keep_the_lock(store_dir, monkeypatch):
    """As by a data loader's thread."""
    ended, end = os.pipe()
    children = []

    def start(*_given):
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        children.append(child)

    monkeypatch.setattr(service.launch, "_start", start)
    service.find_or_start(settings_of(store_dir))
    with open(store_dir / "kvhoist-start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(end)
    for child in children:
        os.waitpid(child, 0)
    os.close(ended)


@pytest.mark.parametrize("what", ["its folder", "what is in it"])
def test_a_service_whose_folder_was_deleted_ends_and_leaves_its_successor_alone(store_dir, what):
    first = store_dir / "kv"
    path = service.find_or_start(settings_of(first, linger_s=600))
    (old,) = service_pids(first)
    if what == "its folder":
        shutil.rmtree(first)
    else:
        for file in first.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    # At once, before the other has seen it.
    os.kill(old, signal.SIGSTOP)
    assert service.find_or_start(settings_of(first, linger_s=600)) == path
    (new,) = set(service_pids(first)) - {old}
    os.kill(old, signal.SIGCONT)
    await_(lambda: old not in service_pids(first), "the end of a service that nobody can find")
    with kvhoist.connect(path, space="a", block_bytes=BLOCK) as client:
        assert client.store([key(1)], [block(1)]) == [True], "its successor's socket is there"
    os.kill(new, signal.SIGTERM)
    await_(lambda: new not in service_pids(first), "the end of its successor")
