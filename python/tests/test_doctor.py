"""The doctor, as operators of engines run it: what it says, its verdict, and its exit status."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvhoist import doctor
from kvhoist.__main__ import main


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """Every engine is installed, in the version that a test says."""
    versions = {"sglang": "0.5.23", "vllm": "0.33.0", "lmcache": "0.5.6"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    return versions


def verdict(said: str) -> str:
    """The last line of a report, which has at most a screen."""
    lines = said.splitlines()
    assert len(lines) <= 24 and lines[-1].startswith("verdict: "), said
    return lines[-1].removeprefix("verdict: ")


def sound(store_dir, **more) -> dict:
    return {"path": str(store_dir), "capacity": "64MiB", "host_bytes": "1MiB", "direct_io": "prefer", **more}


def test_a_good_configuration_is_well_on_one_screen(store_dir, capfd):
    status = main(["doctor", "--want", "direct-io", "--config", json.dumps(sound(store_dir))])
    said = capfd.readouterr().out
    assert "MiB/s written" in said and "io_uring" in said and "sglang         0.5.23" in said, said
    assert "THREADS=8" in said, "the advice for this version"
    if status == 0:
        assert verdict(said) == "no problems found"
    assert status == (0 if verdict(said) == "no problems found" else 1) and "cuFile" not in said, said
    assert list(store_dir.iterdir()) == []


def test_an_engine_that_is_not_there_is_a_problem(store_dir, engines, capfd):
    del engines["sglang"]
    assert main(["doctor", "--config", json.dumps(sound(store_dir))]) == 1
    said = capfd.readouterr().out
    assert "! sglang         not installed in" in said and "sglang" in verdict(said)
    # Without a configuration nobody has said that there is an engine.
    main(["doctor", "--path", str(store_dir)])
    assert "sglang" not in capfd.readouterr().out
    assert main(["doctor", "--engine", "sglang", "--path", str(store_dir)]) == 1


def test_a_configuration_that_cannot_be_read_is_called_that(store_dir, capfd):
    binary = store_dir / "binary"
    binary.write_bytes(b"\xff\xfe")
    broken = store_dir / "broken.json"
    broken.write_text('{"path": ')
    for config, said in (
        ("nowhere.json", "doctor: --config: found no file nowhere.json (No such file or directory), expected JSON"),
        ("{broken", "doctor: --config: found text that is no JSON (Expecting property name"),
        (f"@{broken}", f"doctor: --config: found text in {broken} that is no JSON ("),
        (str(binary), f"doctor: --config: found text in {binary} that is no JSON ("),
    ):
        assert main(["doctor", "--config", config]) == 2
        assert capfd.readouterr().err.startswith(said)
    # Another engine's connector is no setting of ours.
    assert main(["doctor", "--engine", "vllm", "--config", '{"kv_connector": "LMCacheConnector"}']) == 2
    expected = "found 'LMCacheConnector', expected 'OffloadingConnector' or 'KvhoistConnector'"
    assert capfd.readouterr().err == f"doctor: kv_connector: {expected}\n"


def test_the_doctor_logs_nothing_that_its_report_says():
    script = (
        "import logging; from kvhoist import __main__, doctor; doctor.run = lambda arguments: 0; "
        "__main__.main(['doctor']); print(logging.getLogger('kvhoist.engine').getEffectiveLevel())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KVHOIST_LOG"}
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert int(said.stdout) == logging.ERROR


def test_a_file_is_no_path(store_dir, capfd):
    file = store_dir / "file"
    file.write_text("mine")
    for arguments in (["--path", str(file)], ["--config", json.dumps(sound(file))]):
        assert main(["doctor", *arguments]) == 1
        said = capfd.readouterr().out
        assert f"! path           {file}: no directory" in said and "MiB/s" not in said, said
        # The feature that failed, and not those that nobody has looked at.
        assert verdict(said) == "found 1 problem (path)"


WHOLE = {"backend_name": "kvhoist", "module_path": "kvhoist.sglang", "class_name": "HiCacheKvhoist", "interface_v1": 1}


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"capacity": "4096"}, "capacity"),
        ({"path": "relative/kv"}, "path"),
        ({"path": ["/tmp", "/tmp/"]}, "path"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"write_budget": "1TiB"}, "write_budget"),
        ({**WHOLE, "module_path": "kvhoist"}, "module_path"),
        ({**WHOLE, "class_name": "Kvhoist"}, "class_name"),
        ({**WHOLE, "interface_v1": 0}, "interface_v1"),
        ({name: value for name, value in WHOLE.items() if name != "interface_v1"}, "interface_v1"),
        ({"metrics_port": 70_000}, "metrics_port"),
        ({"capasity": 1}, "capasity"),
    ],
)
def test_what_sglang_or_the_store_would_refuse_is_named(store_dir, wrong, named, capfd):
    assert main(["doctor", "--config", json.dumps(sound(store_dir, **wrong))]) == 2
    assert f": {named}: found" in capfd.readouterr().err
    main(["doctor", "--config", json.dumps(sound(store_dir, **WHOLE))])
    assert "found" not in capfd.readouterr().err


def test_sglangs_own_limits_on_prefetches_are_computed(store_dir, capfd):
    def said(*flags, **own) -> str:
        # Whole, where keys of SGLang's own are among the settings.
        main(["doctor", *flags, "--config", json.dumps({**(WHOLE if own else {}), **sound(store_dir, **own)})])
        found = capfd.readouterr()
        return " ".join((found.out + found.err).split())

    assert "none of fewer than 256 tokens" in said() and "timeout 9 s for 32768 tokens" in said()
    own = {"prefetch_threshold": 1024, "prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.5}
    assert "none of fewer than 1024 tokens" in (found := said(**own)) and "timeout 18 s for 32768 tokens" in found
    # 4 GiB of KV in 9 s.
    for size in ("131072", "128KiB"):
        assert "less than 0.48 GB/s for each such prompt" in said("--token-bytes", size)
    found = said(prefetch_timeout_base=0, prefetch_timeout_per_ki_token=0)
    assert "set prefetch_timeout_base to 1" in found and "found 1 problem (prefetches)" in found, found
    for name, wrong in (("prefetch_threshold", 1.5), ("prefetch_timeout_base", "1"), ("prefetch_timeout_per_ki_token", True)):
        assert f"{name}: found {wrong!r}, expected" in said(**{name: wrong})
    assert "--token-bytes: found 'much'" in said("--token-bytes", "much")


def test_a_service_is_looked_for_where_the_settings_say(capfd, monkeypatch):
    place = Path(tempfile.mkdtemp(prefix="kvhoist-"))
    config = json.dumps({"service": str(place / "s"), "capacity": "1GiB"})
    assert main(["doctor", "--config", config]) == 1
    assert verdict(capfd.readouterr().out) == "found 1 problem (service)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        main(["doctor", "--config", config])
        said = capfd.readouterr().out
        # As root it is never refused.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert main(["doctor", "--config", config]) == 1
        refused = capfd.readouterr().out
        assert "may not connect at" in refused and verdict(refused) == "found 1 problem (service)"
    assert "a service listens at" in said and "MiB/s" not in said, "the drives are the service's"
    shutil.rmtree(place)


def test_doctor_names_what_is_wrong_with_a_config(store_dir, capfd):
    assert main(["doctor", "--config", json.dumps({"path": str(store_dir), "capacity": "much"})]) == 2
    assert "capacity: found 'much'" in capfd.readouterr().err
    assert main(["doctor", "--config", json.dumps({"path": str(store_dir), "capacity": "900TiB"})]) == 1
    said = capfd.readouterr().out
    assert "! space" in said and "-> lower capacity to " in said and "space" in verdict(said)
    # Each rank takes its own, of one file system and one memory.
    free = shutil.disk_usage(store_dir).free
    plenty = {"path": str(store_dir), "capacity": free // 8, "host_bytes": "1MiB"}
    main(["doctor", "--config", json.dumps(plenty)])
    assert "! space" not in capfd.readouterr().out
    assert main(["doctor", "--ranks", "16", "--config", json.dumps(plenty)]) == 1
    assert "! space" in (said := capfd.readouterr().out) and "16 rank(s)" in said
    assert main(["doctor", "--ranks", "0", "--path", str(store_dir)]) == 2
    twice = '{"path": "%s", "capacity": "1GiB", "capacity": "2GiB"}' % store_dir
    assert main(["doctor", "--config", twice]) == 2
    assert "capacity: found" in (said := capfd.readouterr().err) and "each name once" in said, said
    assert main(["doctor", "--config", "@/no/such/file"]) == 2
    assert main(["doctor", "--config", "/no/such/file"]) == 2
    file = store_dir / "config.json"
    file.write_text(json.dumps({"path": str(store_dir), "capacity_total": "900TiB"}))
    for config in (str(file), f"@{file}"):
        assert main(["doctor", "--ranks", "2", "--config", config]) == 1
        assert "capacity 450TiB" in capfd.readouterr().out


def test_doctor_reads_the_configuration_of_sglangs_linker(store_dir, capfd):
    own = {"path": str(store_dir), "capacity": "900TiB", "host_bytes": "1MiB", "offer": "host"}
    linker = {"linker": "KvhoistLinker", "linker_module_path": "kvhoist.sglang", "linker_extra_config": own}
    assert main(["doctor", "--config", json.dumps(linker)]) == 1
    assert "-> lower capacity to " in capfd.readouterr().out
    for wrong, name in (({"offer": "all of it"}, "offer"), ({"keep_in_host": True}, "keep_in_host")):
        assert main(["doctor", "--config", json.dumps({**linker, "linker_extra_config": {**own, **wrong}})]) == 2
        assert f"{name}: found" in capfd.readouterr().err
    assert main(["doctor", "--config", json.dumps({**linker, "linker_module_path": "kvhoist"})]) == 2
    assert "linker_module_path: found 'kvhoist'" in capfd.readouterr().err
    del own["host_bytes"]
    assert main(["doctor", "--config", json.dumps(linker)]) == 2
    assert "host_bytes: found nothing" in capfd.readouterr().err


def test_doctor_looks_nowhere_else_where_a_path_is_missing(store_dir, capfd):
    missing = store_dir / "mnt" / "nvme"
    assert main(["doctor", "--path", str(missing)]) == 1
    said = capfd.readouterr().out
    assert f"{missing}: not there" in said and f"-> mkdir -p -m 700 '{missing}'" in said
    assert "MiB/s" not in said and list(store_dir.iterdir()) == []


def test_doctor_shows_no_terminal_escapes(store_dir, capfd):
    evil = store_dir / "\x1b]0;owned\x07\x1b[2J\udc80"
    main(["doctor", "--path", str(evil)])
    evil.mkdir()
    main(["doctor", "--path", str(evil)])
    main(["doctor", "--config", json.dumps({"path": str(evil), "capacity": "\x1b[2J"})])
    main(["doctor", "--config", "@" + str(evil)])
    main(["doctor", "--config", "[" * 100_000])
    said = capfd.readouterr()
    assert "owned" in said.out and "owned" in said.err
    assert all(line.isprintable() or "\ufffd" in line for line in (said.out + said.err).splitlines())


def vllm_config(**tier):
    """vLLM's kv-transfer-config, as the page has it."""
    tier = {"type": "KvhoistTier", "module_path": "kvhoist.vllm", **tier}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_doctor_reads_a_configuration_as_vllm_does(store_dir, capfd):
    config = vllm_config(path=str(store_dir), capacity="64MiB", locality="LOCAL")
    extra = config["kv_connector_extra_config"]
    for given in (config, extra, extra["secondary_tiers"][0]):
        assert main(["doctor", "--engine", "vllm", "--config", json.dumps(given)]) in (0, 1)
        assert "settings" in capfd.readouterr().out


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"capacity": "1MiB"}, "path"),
        ({"path": "/x", "capacity": "1MiB", "threads": 2}, "threads"),
        ({"path": "/x", "capacity": "1MiB", "pool_shares": {"a": 0.5}}, "pool_shares"),
        ({"path": "/x", "capacity": "1MiB", "module_path": "kvhoist"}, "module_path"),
        ({"type": "fs", "root_dir": "/x"}, "secondary_tiers"),
    ],
)
def test_doctor_names_what_vllm_would_refuse(wrong, named, capfd):
    assert main(["doctor", "--engine", "vllm", "--config", json.dumps(vllm_config(**wrong))]) == 2
    assert f"doctor: {named}: found" in capfd.readouterr().err


def lmcache_config(**params) -> dict:
    """What an operator gives LMCache."""
    return {
        "type": "plugin", "module_path": "kvhoist.lmcache", "class_name": "KvhoistL2", "adapter_params": params
    }  # fmt: skip


def test_doctor_reads_a_configuration_as_lmcache_does(store_dir, capfd):
    config = lmcache_config(path=str(store_dir), capacity="64MiB", block_bytes="1MiB")
    for given in (config, config["adapter_params"]):
        assert main(["doctor", "--engine", "lmcache", "--config", json.dumps(given)]) in (0, 1)
        said = capfd.readouterr().out
        assert "settings" in said and "configured: 1 rank(s)" in said


def test_doctor_asks_for_a_revision_where_lmcaches_keys_leave_something_out(store_dir, capfd):
    def said(config: dict) -> str:
        assert main(["doctor", "--engine", "lmcache", "--config", json.dumps(config)]) in (0, 1)
        return capfd.readouterr().out

    plain = {"path": str(store_dir), "capacity": "64MiB"}
    serde = {"serde": {"type": "fp8", "fp8_dtype": "float8_e5m2"}}
    shared = {**plain, "service": "auto"}
    assert "revision" not in said(lmcache_config(**plain))
    found = said({**lmcache_config(**plain), **serde})
    assert "no revision: objects of another serde" in found and "serde" in verdict(found)
    found = said(lmcache_config(**shared))
    assert "lmcache.mp.server_urls" in found and "servers" not in verdict(found), "a note"
    for config in ({**lmcache_config(**plain, revision="1"), **serde}, lmcache_config(**shared, revision="1")):
        found = said(config)
        assert "another serde" not in found and "server_urls" not in found


@pytest.mark.parametrize(
    "wrong, named",
    [
        (lmcache_config(capacity="1MiB"), "path"),
        (lmcache_config(path="/x", capacity="1MiB", slot_bytes=2), "slot_bytes"),
        (lmcache_config(path="/x", capacity="1MiB", block_bytes=5000), "block_bytes"),
        ({**lmcache_config(path="/x", capacity="1MiB"), "type": "native_plugin"}, "type"),
        ({**lmcache_config(path="/x", capacity="1MiB"), "module_path": "kvhoist"}, "module_path"),
        ({**lmcache_config(path="/x", capacity="1MiB"), "class_name": "KvhoistTier"}, "class_name"),
        ({**lmcache_config(), "adapter_params": None}, "adapter_params"),
        ([], "adapter_params"),
    ],
)
def test_doctor_names_what_lmcache_would_refuse(wrong, named, capfd):
    assert main(["doctor", "--engine", "lmcache", "--config", json.dumps(wrong)]) == 2
    assert f"doctor: {named}: found" in capfd.readouterr().err
