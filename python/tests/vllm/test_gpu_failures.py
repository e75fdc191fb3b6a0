"""The GPU spec under vLLM's real connector: damaged blocks, dead drives, killed processes, failed jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

import vgpu  # noqa: E402
from vgpu import TOKENS, Served, damage, files, names_of, serve_again, settings  # noqa: E402

from kvhoist.vllm import device_chunks  # noqa: E402

NEW = vtier.version() >= (0, 33)


def test_a_damaged_block_is_computed_and_never_served(store_dir):
    given, names = settings(store_dir), names_of("a", 6)
    with Served(given) as served:
        served.serve(names)
    with Served(given) as served:
        damage(store_dir, served, names[3])
        request, ids = served.request(names), served.take(7)
        tokens = served.matched(request)
        assert tokens == 6 * TOKENS, "the damage is not known yet"
        failed, blocks = served.load(request, ids, tokens)
        if NEW:
            assert failed == {request.request_id}
            assert not served.step()[1], "told once"
        else:
            assert blocks == {ids[0][3]}
        # The request begins anew: what is left of the prefix, and no request asks for the lost one for ever.
        assert served.matched(request) == 3 * TOKENS
        failed, blocks = served.load(request, ids, 3 * TOKENS)
        assert not failed and not blocks
        served.check(ids, names[:3])
        served.compute(request, ids, names, 3 * TOKENS)
        assert served.manager.get_stats() is not None
        assert served.store.cache.stats()["checksum_failures"] == 1
        # Stored again, it is there.
        served.serve(names)
        assert served.serve(names) == 6


def test_every_load_of_a_ruined_store_is_computed(store_dir):
    given, names = settings(store_dir, blocks_per_chunk=2), names_of("a", 8)
    with Served(given) as served:
        served.serve(names)
    with Served(given) as served:
        for name in names[::2]:
            damage(store_dir, served, name)
        # `serve` checks every byte that was loaded, and computes the rest.
        assert served.serve(names) == 0
        serve_again(served, names)
        assert served.serve(names) == 8


def test_a_block_that_is_evicted_before_its_load_is_computed(store_dir):
    with Served(settings(store_dir)) as served:
        names = names_of("a", 4)
        served.serve(names)
        request, ids = served.request(names), served.take(5)
        tokens = served.matched(request)
        for name in names:
            served.store.cache.remove(device_chunks.chunk_keys([name + bytes(4)])[0])
        failed, blocks = served.load(request, ids, tokens)
        assert failed == {request.request_id} if NEW else blocks == set(ids[0][:4])
        assert served.matched(request) == 0
        served.compute(request, ids, names)
        serve_again(served, names)
        assert served.serve(names) == 4


def test_a_job_that_cannot_begin_has_failed_and_raises_nothing(store_dir, monkeypatch):
    with Served(settings(store_dir)) as served:
        names = names_of("a", 4)
        served.serve(names)

        def refuse(*_arguments):
            raise RuntimeError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(served.store, "_addresses", refuse)
            request, ids = served.request(names), served.take(5)
            failed, blocks = served.load(request, ids, served.matched(request))
            assert failed == {request.request_id} if NEW else blocks == set(ids[0][:4])
            assert served.matched(request) == 0
            served.compute(request, ids, names)
            assert served.serve(names_of("b", 4)) == 0
        assert served.serve(names_of("b", 4)) == 0, "it was not stored"
        assert served.serve(names_of("b", 4)) == 4
        served.serve(names)
        assert served.serve(names) == 4


def test_a_device_that_says_nothing_fails_the_job(store_dir, monkeypatch):
    class Dead:
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    with Served(settings(store_dir)) as served:
        names = names_of("a", 4)
        served.serve(names)
        with monkeypatch.context() as patch:
            patch.setattr(served.worker.connector_worker.worker, "_now", Dead)
            request, ids = served.request(names), served.take(5)
            failed, blocks = served.load(request, ids, served.matched(request))
            assert failed or blocks


def test_a_drive_that_dies_is_a_drive_without_blocks(store_dir):
    with Served(settings(store_dir)) as served:
        names = names_of("a", 4)
        served.serve(names)
    with Served(settings(store_dir)) as served:
        (path,) = files(store_dir)
        os.truncate(path, 4096)
        # `serve` computes blocks that are not loaded, and compares every byte of the others.
        assert served.serve(names) == 0
        assert served.serve(names_of("b", 4)) == 0
        assert served.manager.get_stats() is not None, "the engine goes on"


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from vgpu import Served, names_of, settings
with Served(settings(sys.argv[2], capacity="64MiB", blocks_per_chunk=2)) as served:
    for prompt in range(10**6):
        served.serve(names_of(prompt, 8))
        print(prompt, flush=True)
"""


def test_a_process_killed_while_it_stores_leaves_whole_chunks(store_dir, seed):
    command = [sys.executable, "-c", KILLED, str(Path(vgpu.__file__).parent), str(store_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        # vLLM's own log goes the same way.
        acknowledged = []
        for line in process.stdout:
            if line.strip().isdigit():
                acknowledged.append(int(line))
            if len(acknowledged) > seed % 8:
                break
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout if line.strip().isdigit()]
    with Served(settings(store_dir, capacity="64MiB", blocks_per_chunk=2)) as served:
        for prompt in range(acknowledged[-1] + 3):
            found = served.serve(names_of(prompt, 8))
            assert found == 8 or prompt not in acknowledged, prompt
        served.store.cache.validate()
