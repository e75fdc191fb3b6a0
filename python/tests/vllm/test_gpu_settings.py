"""The GPU spec under vLLM's real connector: settings, what it refuses, log and figures."""

from __future__ import annotations

import importlib
import json

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

from vgpu import TOKENS, Gpu, Served, connectors, names_of, on_gpu, settings, vllm_config  # noqa: E402

import kvhoist.vllm  # noqa: E402
from kvhoist import ConfigError  # noqa: E402
from kvhoist.__main__ import main  # noqa: E402
from kvhoist._store_settings import StoreSettings  # noqa: E402
from kvhoist.vllm import device_settings  # noqa: E402

NEW = vtier.version() >= (0, 33)


def test_the_log_says_that_it_is_active_and_which_way_bytes_go(store_dir, caplog):
    import logging

    with caplog.at_level(logging.INFO), Served(settings(store_dir, gds_mode="read_write")):
        (line,) = [record.getMessage() for record in caplog.records if "active between" in record.getMessage()]
    for text in ("32768 bytes in 4 segments", "route bounce", "gds_mode read_write is auto", "96 MiB of reads"):
        assert text in line, (text, line)


def test_vllm_shows_the_figures(store_dir):
    definitions = kvhoist.vllm.KvhoistOffloadingSpec.build_metric_definitions({})
    with Served(settings(store_dir)) as served:
        served.serve(names_of("a", 4))
        served.manager._figures._asked_at = 0.0
        stats = served.manager.get_stats()
        assert stats is not None and served.manager.get_stats() is None, "once a second"
        ours = {name: values for name, values in stats.data["data"].items() if "kvhoist" in name}
        assert set(ours) == set(definitions)
        assert all(len(labels) == 1 for values in ours.values() for labels in values)
        ((usage,),) = [list(values.values()) for name, values in ours.items() if name.endswith("usage_perc")]
        assert 0 < usage < 1


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"route": "direct"}, "route"),
        ({"gds_mode": "on"}, "gds_mode"),
        ({"gds_mode": "disabled", "route": "auto"}, "gds_mode"),
        ({"shared_storage_path": "/tmp"}, "shared_storage_path"),
        ({"capacityy": "1GiB"}, "capacityy"),
        ({"read_ratio": 1.5}, "read_ratio"),
        ({"read_ratio": 0.5, "read_bytes_in_flight_max": "1MiB"}, "read_bytes_in_flight_max"),
        ({"sync_load_budget_bytes": 1}, "sync_load_budget_bytes"),
        ({"spec_name": "CPUOffloadingSpec"}, "spec_name"),
        ({"copy_blocks_max": 0}, "copy_blocks_max"),
        ({"device": "simulated" if on_gpu() else "auto"}, "device"),
        ({"pool_shares": {}}, "pool_shares"),
        ({"cpu_bytes_to_use": 1 << 30}, "cpu_bytes_to_use"),
        ({"eviction_policy": "lru"}, "eviction_policy"),
        ({"store_threshold": 2}, "store_threshold"),
        ({"max_tracker_size": 64_000}, "max_tracker_size"),
        ({"tier_poll_interval_s": 0.01}, "tier_poll_interval_s"),
        ({"enable_telemetry": True}, "enable_telemetry"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_its_name(store_dir, more, field):
    with pytest.raises(ConfigError) as raised:
        Served(settings(store_dir, **more)).close()
    assert raised.value.field == field


def test_reads_get_their_share_of_the_bytes_in_flight(store_dir):
    given = device_settings.DeviceSettings.load(settings(store_dir, read_ratio=0.25, bytes_in_flight_max="64MiB"))
    assert (given.store.read_bytes_in_flight_max, given.store.write_bytes_in_flight_max) == (16 << 20, 48 << 20)
    given = device_settings.DeviceSettings.load(settings(store_dir))
    assert (given.store.read_bytes_in_flight_max, given.store.write_bytes_in_flight_max) == (96 << 20, 32 << 20)


def test_it_starts_only_where_failed_loads_are_computed(store_dir):
    with pytest.raises(ConfigError, match="'recompute'"):
        Served(settings(store_dir), policy="fail")
    # Under vLLM's own connector a failed load would end the engine.
    plain = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
    config = vllm_config({**settings(store_dir), "spec_name": "KvhoistOffloadingSpec",
                          "spec_module_path": "kvhoist.vllm"})  # fmt: skip
    with pytest.raises(ConfigError, match="KvhoistConnector"):
        plain.OffloadingConnector(config, connectors.KVConnectorRole.WORKER, Gpu().config)


def test_an_engine_of_several_gpus_is_told_what_to_use(store_dir):
    with pytest.raises(ConfigError, match="TieringOffloadingSpec.*KvhoistTier"):
        Served(settings(store_dir), world=2)


def test_a_worker_in_another_process_is_told_what_to_use(store_dir):
    config = vllm_config(settings(store_dir))
    with pytest.raises(ConfigError, match="'uni'"):
        kvhoist.vllm.KvhoistConnector(config, connectors.KVConnectorRole.SCHEDULER, Gpu().config)


@pytest.mark.skipif(NEW, reason="0.33 takes failed requests of any model")
@pytest.mark.parametrize("gpu, found", [({"groups": 2}, "2, of which 0"), ({"window": 2 * TOKENS}, "1, of which 1")])
def test_models_are_refused_that_cannot_go_on_after_a_failed_load(store_dir, gpu, found):
    with pytest.raises(ConfigError, match=f"^kv_cache_groups: found '{found} .*, expected 1 of full attention"):
        Served(settings(store_dir), Gpu(**gpu))


def test_all_of_the_tiers_settings_are_settings_of_the_spec():
    own = device_settings.OWN_KEYS
    assert own >= set(StoreSettings.__dataclass_fields__) - {"pool_shares", "capacity_total"}
    assert not own & device_settings.VLLM_KEYS


def test_doctor_reads_the_configuration_as_vllm_would(store_dir, capfd):
    def doctor(given) -> int:
        return main(["doctor", "--engine", "vllm", "--config", json.dumps(given)])

    extra = {"path": str(store_dir), "capacity": "64MiB", "host_bytes": "32MiB", "blocks_per_chunk": 4}
    whole = {
        "kv_connector": "KvhoistConnector", "kv_connector_module_path": "kvhoist.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip
    doctor(whole)
    assert "capacity 64MiB" in capfd.readouterr().out
    doctor({**extra, "spec_name": "KvhoistOffloadingSpec"})
    assert "capacity 64MiB" in capfd.readouterr().out
    for name, value in [("kv_load_failure_policy", "fail"), ("kv_connector_module_path", "kvhoist")]:
        assert doctor({**whole, name: value}) == 2
        assert name in capfd.readouterr().err
    assert doctor({**whole, "kv_connector_extra_config": {**extra, "route": "direct"}}) == 2
    assert "route" in capfd.readouterr().err
