"""Which way chunks go between drive and GPU: what `route` takes, and what the self-test in its own process says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

from vgpu import Gpu, Served, names_of, on_gpu, settings  # noqa: E402

from kvhoist import UnavailableError  # noqa: E402
from kvhoist.vllm import cufile_probe, device_chunks  # noqa: E402


@pytest.mark.skipif(on_gpu(), reason="a CUDA device, where libcufile may work")
def test_cufile_without_a_device_ends_the_start_with_the_reason(store_dir):
    with pytest.raises(UnavailableError, match="cufile = on: there is no CUDA device"):
        Served(settings(store_dir, route="cufile"))


@pytest.mark.skipif(not on_gpu(), reason="no CUDA device")
def test_cufile_brings_the_right_bytes_to_the_gpu(store_dir):
    names = names_of("a", 8)
    given = settings(store_dir, route="cufile", direct_io="require", capacity="64MiB", host_bytes="16MiB")
    try:
        with Served(given, Gpu(heads=8)) as served:
            assert served.serve(names) == 0
            assert served.store.cache.stats()["routes"]["device_to_disk"]["blocks"] == 8
    except UnavailableError as error:
        pytest.skip(str(error))
    with Served(given, Gpu(heads=8)) as served:
        # `serve` compares every byte.
        assert served.serve(names) == 8
        stats = served.store.cache.stats()
        assert stats["routes"]["disk_to_device"]["blocks"] == 8 and not stats["checksum_failures"]
        assert served.store.route().startswith("cufile (")


@pytest.mark.parametrize("direct", [False, True])
def test_auto_takes_cufile_only_where_the_self_test_proves_it(store_dir, monkeypatch, direct):
    opened = []
    monkeypatch.setattr(device_chunks, "probe", lambda folders, device: (direct, f"{folders[0]} {device}"))
    monkeypatch.setattr(device_chunks, "open_store", lambda *_place, **more: opened.append(more))
    store = device_chunks.DeviceChunks.__new__(device_chunks.DeviceChunks)
    given = {**settings(store_dir), "read_bytes_in_flight_max": "2MiB", "write_bytes_in_flight_max": "1MiB"}
    store.settings = device_chunks.DeviceSettings.load(given)
    store.device, store.chunk_bytes = 3, 64 << 10
    store._open(None)
    (more,) = opened
    assert (more["cufile"], more["device_blocks"]) == (("auto", 48) if direct else ("off", 1))
    assert store._why_bounce == f"{store_dir} 3"


def test_the_log_says_why_auto_does_not_take_cufile(store_dir):
    with Served(settings(store_dir)) as served:
        served.store._why_bounce = "compat mode"
        assert "route is auto: compat mode" in served.store.route()
        served.manager._figures._asked_at = 0.0
        values = served.manager.get_stats().data["data"]["vllm:kv_offload_kvhoist_cufile"]
        assert list(values.values()) == [0]


@pytest.mark.skipif(on_gpu(), reason="a CUDA device, which the self-test finds")
def test_the_self_test_says_what_stands_in_the_way(tmp_path):
    direct, reason = cufile_probe.probe([str(tmp_path)], 0)
    assert not direct and "device tier is not available" in reason
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        ("import os; os.abort()", "status -6"),
        ("print('what')", "status 0"),
        ("import time; time.sleep(1000)", "did not end"),
    ],
)
def test_a_self_test_that_dies_or_hangs_is_no_proof(tmp_path, monkeypatch, child, reason):
    real = subprocess.run
    # A child that sleeps exceeds any limit.
    limit = 1 if "sleep" in child else 60
    run = lambda _command, timeout, **more: real([sys.executable, "-c", child], timeout=limit, **more)  # noqa: E731
    monkeypatch.setattr(cufile_probe.subprocess, "run", run)
    direct, found = cufile_probe.probe([str(tmp_path)], 0)
    assert not direct and reason in found
