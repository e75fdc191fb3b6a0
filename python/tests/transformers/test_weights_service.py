"""Checkpoints through a node's service, and the command that compares loaders."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import torch  # noqa: E402
from nodes import Node, await_  # noqa: E402

import kvhoist  # noqa: E402
from kvhoist import DeadlineError, StoreError, UnavailableError, load_bench  # noqa: E402
from kvhoist.safetensors import held as through_service  # noqa: E402
from kvhoist.safetensors import iterate, load_files, save_file  # noqa: E402


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path / "store", host_bytes="64MiB")
    yield node
    node.kill()


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of three files, and its tensors."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    wanted = {}
    for n in range(3):
        tensors = {f"f{n}.t{i}": torch.arange(10_000, dtype=torch.int32) + n + i for i in range(10)}
        save_file(tensors, folder / f"{n}.safetensors")
        wanted.update(tensors)
    return folder, wanted


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def held(node):
    command = [sys.executable, "-m", "kvhoist", "status", "--json", "--socket", node.socket]
    environment = {**os.environ, "PYTHONPATH": os.fspath(Path(kvhoist.__file__).parents[1])}
    return json.loads(subprocess.check_output(command, env=environment))["files"]


@pytest.mark.parametrize("keep", [False, True])
def test_a_checkpoint_comes_through_the_service(node, checkpoint, keep, caplog):
    folder, wanted = checkpoint
    with caplog.at_level(logging.INFO, logger="kvhoist"):
        assert same(load_files(folder, service=node.socket, keep=keep), wanted)
    assert ", service" in caplog.text, caplog.text
    await_(lambda: held(node) == (3 if keep else 0), "the service to let go")
    assert same(dict(iterate(folder, service=node.socket, keep=keep, window_bytes=100_000)), wanted)
    await_(lambda: held(node) == (3 if keep else 0), "the service to let go")


def test_only_the_files_that_are_being_read_are_held(node, checkpoint):
    folder, wanted = checkpoint
    names = []
    for name, _ in iterate(folder, service=node.socket, window_bytes=1 << 30):
        names.append(name)
        if len(names) % 10 == 5:
            assert held(node) <= 2
    assert names == list(wanted)


def test_without_a_service_and_without_room_there_drives_are_read(tmp_path, checkpoint, caplog):
    folder, wanted = checkpoint
    assert same(load_files(folder, service=tmp_path / "nobody"), wanted)
    assert "by each process" in caplog.text
    small = Node(tmp_path / "store", host_bytes="64KiB")
    try:
        assert same(load_files(folder, service=small.socket), wanted)
        assert "is read from its drive" in caplog.text
    finally:
        small.kill()


@pytest.mark.parametrize("error, asked", [(DeadlineError, 1), (UnavailableError, 1), (StoreError, 3)])
def test_a_service_that_hangs_or_is_gone_is_asked_once_and_one_without_room_for_each_file(
    checkpoint, monkeypatch, error, asked
):
    folder, wanted = checkpoint
    calls = []

    class Service:
        def __init__(self, socket):
            pass

        def hold(self, file, *, keep):
            calls.append(file.path)
            raise error("no")

    monkeypatch.setattr(through_service._files, "Service", Service)
    for load in (load_files, lambda *more, **settings: dict(iterate(*more, **settings))):
        calls.clear()
        assert same(load(folder, service="socket"), wanted)
        assert len(calls) == asked


def test_the_command_compares_loaders(checkpoint, capsys, monkeypatch):
    folder, wanted = checkpoint
    arguments = [os.fspath(folder), "--device", "cpu", "--rounds", "1", "--loaders", "threads of pread,kvhoist,safetensors"]
    assert load_bench.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nbytes"] == sum(path.stat().st_size for path in folder.iterdir())
    for row in found["loaders"]:
        assert {state: len(turns) for state, turns in row["turns"].items()} == {"cold": 1, "warm": 1}, row
    assert load_bench.run(arguments) == 0
    assert "kvhoist" in capsys.readouterr().out

    def wrong(paths, device):
        found = load_files(paths, device)
        found["f1.t3"][77] += 1
        return found

    monkeypatch.setitem(load_bench.LOADERS, "kvhoist", load_bench.Loader(wrong))
    assert load_bench.run(arguments) == 1
    assert "f1.t3 differs" in capsys.readouterr().out
    assert load_bench.run([os.fspath(folder / "nothing")]) == 2
    assert load_bench.run([*arguments, "--loaders", "other"]) == 2


def test_what_the_command_cannot_measure_is_an_error(checkpoint, capsys):
    folder, _ = checkpoint
    path = os.fspath(folder / "1.safetensors")
    for device in ("foo", "cuda:77", "meta"):
        assert load_bench.run([path, "--device", device]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"kvhoist: --device: found {device!r} (") and said.endswith("that is there\n"), said
    data = bytearray((folder / "1.safetensors").read_bytes())
    data[8] = 0
    (folder / "1.safetensors").write_bytes(data)
    assert load_bench.run([os.fspath(folder), "--device", "cpu", "--rounds", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvhoist: FILES: found what the safetensors library does not load (") and said.count("\n") == 1


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "kvhoist: CUDA out of memory"),
        (OSError(5, "Input/output error"), "kvhoist: [Errno 5] Input/output error"),
        (MemoryError(), "kvhoist: found no host memory for the files (MemoryError), expected room"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_machine_that_fails_is_no_fault_of_the_files(checkpoint, capsys, monkeypatch, error, said):
    def fails(paths, device):
        raise error

    monkeypatch.setattr(load_bench, "_by_safetensors", fails)
    assert load_bench.run([os.fspath(checkpoint[0]), "--device", "cpu", "--rounds", "1"]) == 2
    found = capsys.readouterr().err
    assert found.startswith(said) and "library does not load" not in found and found.count("\n") == 1


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), (["file"], 2)])
def test_the_command_without_torch(arguments, status):
    script = (
        "import sys; sys.modules['torch'] = None; from kvhoist.__main__ import main; "
        "sys.exit(main(['load-bench', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert ("found no torch" in done.stderr) == (status == 2)


def test_the_device_that_is_measured_is_waited_for(checkpoint, monkeypatch):
    """And not the current one."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setitem(load_bench.LOADERS, "kvhoist", load_bench.Loader(lambda paths, device: None))
    load_bench.timed("kvhoist", [], "cuda:3")
    assert waited == ["cuda:3"]
