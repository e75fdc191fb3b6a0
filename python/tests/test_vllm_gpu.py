"""GPU memory to NVMe under vLLM's real connector, scheduler and worker: bytes, failures, order, limits."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

from vgpu import TOKENS, Gpu, Served, connectors, names_of, on_gpu, settings, vllm_config  # noqa: E402

import kvhoist.vllm  # noqa: E402
from kvhoist import ConfigError, device_chunks, device_settings, vllm_gpu  # noqa: E402
from kvhoist.__main__ import main  # noqa: E402
from kvhoist.chunks import Place  # noqa: E402
from kvhoist.config import HiCacheConfig  # noqa: E402

NEW = vtier.version() >= (0, 33)


def files(folder):
    return sorted(folder.rglob("kvhoist.store"))


def damage(folder, served, name: bytes):
    """Overwrites what is stored of one block, in every place that has it, and forgets what is in host memory."""
    gpu = served.gpu
    block = served.take(1)[0][0]
    gpu.fill(block, name + b"\0")
    data = b"".join(tensor[block].cpu().numpy().tobytes() for tensor in gpu.tensors)
    (path,) = files(folder)
    found = path.read_bytes()
    assert data in found, "the block is not on disk"
    with open(path, "r+b") as file:
        file.seek(found.index(data))
        file.write(bytes(len(data)))


def serve_again(served, names) -> None:
    """Has blocks stored again that were lost: 0.28 does not offer them for the request that failed to load them."""
    if not NEW:
        served.serve(names)


class Gate:
    """What the GPU is doing: an event that happens when `open` is set, or somebody waits for it."""

    def __init__(self) -> None:
        self.open, self.waited = False, 0

    def query(self) -> bool:
        return self.open

    def synchronize(self) -> None:
        self.waited += 1
        self.open = True


@pytest.mark.parametrize("layout", ["layers", "packed"])
@pytest.mark.parametrize("per_chunk", [1, 4])
def test_blocks_come_back_to_the_gpu_over_restarts(store_dir, layout, per_chunk):
    given, prompts = settings(store_dir, blocks_per_chunk=per_chunk), [names_of(n, 8) for n in range(3)]
    with Served(given, Gpu(layout)) as served:
        assert [served.serve(prompt) for prompt in prompts] == [0, 0, 0]
        assert [served.serve(prompt) for prompt in prompts] == [8, 8, 8]
    with Served(given, Gpu(layout)) as served:
        assert [served.serve(prompt) for prompt in prompts] == [8, 8, 8]
        assert served.serve(prompts[0][:4] + names_of("else", 4)) == 4
        served.store.cache.validate()


@pytest.mark.skipif(not NEW, reason="before 0.33 a failed load of such a model could not be told")
@pytest.mark.parametrize("per_chunk", [1, 2])
def test_every_group_of_the_kv_cache_comes_back(store_dir, per_chunk):
    with Served(settings(store_dir, blocks_per_chunk=per_chunk), Gpu(groups=3, blocks=256)) as served:
        names = names_of("a", 6)
        assert (served.serve(names), served.serve(names)) == (0, 6)


def test_groups_of_different_bytes_share_a_store(store_dir):
    import torch

    memory, spare = torch.zeros(1 << 20, dtype=torch.int8), []

    def allocate(nbytes):
        spare.append(torch.zeros(nbytes, dtype=torch.int8))
        return spare[-1]

    base = memory.data_ptr()
    groups = [
        device_chunks.Group((device_chunks.Page(base, 512, 512), device_chunks.Page(base + 65_536, 512, 512)), 2),
        device_chunks.Group((device_chunks.Page(base + 131_072, 512, 300),), 2),
    ]
    given = device_settings.DeviceSettings.load({**settings(store_dir), "device": "simulated"})
    place = Place("m", "dp0", {"test": 1})
    regions = [(base, len(memory))]
    store = device_chunks.DeviceChunks(given, place, groups, regions, None, allocate)
    keys = [[bytes([group, n]) * 16 + group.to_bytes(4, "big") for n in range(3)] for group in range(2)]
    memory.random_(-128, 128)
    before = memory.clone()
    parts = [device_chunks.Part(group, keys[group], range(6)) for group in range(2)]
    store.submit_store(1, parts)
    store.wait([1])
    (ended,) = store.finished()
    assert len(ended.good) == 6 and not ended.failed
    memory.zero_()
    # The second group is entered in the middle of its first chunk, and left in the middle of its last.
    store.submit_load(2, [parts[0], device_chunks.Part(1, keys[1], range(1, 5), skip=1)])
    store.wait([2])
    (ended,) = store.finished()
    assert len(ended.good) == 6 and not ended.failed
    for page, blocks in [(0, range(6)), (65_536, range(6)), (131_072, range(1, 5))]:
        for block in range(6):
            size = 300 if page == 131_072 else 512
            at = slice(page + block * 512, page + block * 512 + size)
            assert torch.equal(memory[at], before[at] if block in blocks else torch.zeros(size, dtype=torch.int8))
    # Blocks that do not fit their chunks are refused, and the job ends with every key failed.
    store.submit_load(3, [device_chunks.Part(0, keys[0], range(9))])
    (ended,) = store.finished()
    assert set(ended.failed) == set(keys[0])
    store.close()


def test_a_chunk_is_entered_where_the_gpu_has_its_beginning(store_dir):
    with Served(settings(store_dir, blocks_per_chunk=4)) as served:
        names = names_of("a", 8)
        served.serve(names)
        request, ids = served.request(names), served.take(9)
        for at, block in enumerate(ids[0]):
            served.gpu.fill(block, b"mine" if at < 2 else b"not yet")
        computed = 2 * TOKENS
        tokens = served.matched(request, computed)
        assert tokens == 6 * TOKENS
        assert served.load(request, ids, tokens, computed) == (set(), set())
        assert all(served.gpu.holds(block, b"mine") for block in ids[0][:2]), "a block that was not asked for"
        served.check([ids[0][2:]], names[2:])


def test_a_damaged_block_is_computed_and_never_served(store_dir):
    given, names = settings(store_dir), names_of("a", 6)
    with Served(given) as served:
        served.serve(names)
    with Served(given) as served:
        damage(store_dir, served, names[3])
        request, ids = served.request(names), served.take(7)
        tokens = served.matched(request)
        assert tokens == 6 * TOKENS, "nobody knows yet"
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


def test_no_block_is_visible_before_all_its_layers_are_stored(store_dir, monkeypatch):
    with Served(settings(store_dir)) as served:
        worker, gate = served.worker.connector_worker.worker, Gate()
        names = names_of("a", 4)
        monkeypatch.setattr(worker, "_now", lambda: gate)
        request, ids = served.request(names), served.take(5)
        assert served.matched(request) == 0
        served.compute(request, ids, names, settle=False)
        served.step()
        # The GPU still computes: nothing was read of its memory, and another request waits instead of computing.
        assert served.store.cache.stats()["stores"] == 0
        other = served.request(names)
        assert served.scheduler.get_num_new_matched_tokens(other, 0)[0] is None
        gate.open = True
        assert served.matched(other) == 4 * TOKENS
        assert gate.waited == 0


def test_reuse_of_a_block_waits_for_its_store(store_dir, monkeypatch):
    with Served(settings(store_dir)) as served:
        worker, gate = served.worker.connector_worker.worker, Gate()
        names = names_of("a", 4)
        monkeypatch.setattr(worker, "_now", lambda: gate)
        request, ids = served.request(names), served.take(5)
        served.matched(request)
        served.compute(request, ids, names, settle=False)
        served.step()
        assert served.store.under_way == 1
        # A new request gets the blocks of the one that has ended.
        monkeypatch.setattr(worker, "_now", lambda: None)
        new = served.request(names_of("b", 4))
        served.matched(new)
        scheduled = SimpleNamespace(req_id=new.request_id, block_ids=(ids[0],))
        served.step([scheduled], {new.request_id: new.num_tokens})
        assert gate.waited == 1 and served.store.under_way == 0, "vLLM writes to the blocks from here on"
        served.gpu.fill(ids[0][0], b"others")
        served.settle()
        assert served.serve(names) == 4


@pytest.mark.skipif(not on_gpu(), reason="no CUDA device")
def test_a_store_and_a_load_come_after_what_the_gpu_was_given(store_dir):
    import torch

    with Served(settings(store_dir)) as served:
        names, late = names_of("a", 4), torch.cuda.Stream()
        request, ids = served.request(names), served.take(5)
        served.matched(request)
        for name in (*(name + b"\0" for name in names), b"the last of others"):
            served.gpu.data(name)
        with torch.cuda.stream(late):
            # The GPU is busy for a while before it computes the blocks, and the store is asked for meanwhile.
            torch.cuda._sleep(1_000_000_000)
            served.compute(request, ids, names, settle=False)
            served.step()
            assert served.store.under_way, "the GPU was not busy for long enough"
            served.settle()
        for block in ids[0]:
            served.gpu.fill(block, b"others")
        torch.cuda.synchronize()
        again = served.request(names)
        tokens = served.matched(again)
        with torch.cuda.stream(late):
            # Whoever had the blocks before still writes to them.
            torch.cuda._sleep(1_000_000_000)
            for block in ids[0]:
                served.gpu.fill(block, b"the last of others")
            assert served.load(again, ids, tokens) == (set(), set())
        torch.cuda.synchronize()
        served.check(ids, names)


def test_a_device_that_says_nothing_fails_the_job(store_dir, monkeypatch):
    class Dead:
        def query(self):
            raise RuntimeError("an illegal memory access was encountered")

    with Served(settings(store_dir)) as served:
        names = names_of("a", 4)
        served.serve(names)
        with monkeypatch.context() as patch:
            patch.setattr(served.worker.connector_worker.worker, "_now", Dead)
            request, ids = served.request(names), served.take(5)
            failed, blocks = served.load(request, ids, served.matched(request))
            assert failed or blocks


def test_what_is_offered_past_the_limit_is_not_stored(store_dir, monkeypatch):
    with Served(settings(store_dir, store_bytes_queued_max=5 * Gpu().block_bytes)) as served:
        worker, gate = served.worker.connector_worker.worker, Gate()
        monkeypatch.setattr(worker, "_now", lambda: gate)
        names = [names_of(prompt, 4) for prompt in range(2)]
        for prompt in names:
            served.compute(request := served.request(prompt), served.take(5), prompt, settle=False)
            del request
        assert served.manager._dropped == 3
        gate.open = True
        served.settle()
        # The beginnings of prefixes were kept.
        assert [served.serve(prompt) for prompt in names] == [4, 1]


def test_a_reset_hides_what_was_stored_until_the_restart(store_dir):
    given, names = settings(store_dir), names_of("a", 4)
    with Served(given) as served:
        served.serve(names)
        assert served.scheduler.reset_cache()
        assert served.serve(names) == 0, "the weights may be others"
        assert served.serve(names) == 4
    with Served(given) as served:
        assert served.serve(names) == 4, "what was stored under the first weights"


def test_the_disk_holds_its_capacity_and_no_more(store_dir):
    with Served(settings(store_dir, capacity="2MiB", host_bytes="1MiB")) as served:
        slots = served.store.cache.stats()["tiers"]["disk"]["slots"]
        prompts = [names_of(n, 8) for n in range(3 * slots // 8)]
        for prompt in prompts:
            served.serve(prompt)
        (path,) = files(store_dir)
        assert path.stat().st_blocks * 512 <= 2 << 20
        assert 0 < served.store.cache.stats()["tiers"]["disk"]["resident"] <= slots
        assert served.serve(prompts[-1]) == 8
        served.store.cache.validate()


def test_replicas_have_a_folder_each(store_dir):
    with Served(settings(store_dir)) as first, Served(settings(store_dir), replica=1) as second:
        names = names_of("a", 4)
        first.serve(names)
        assert (first.serve(names), second.serve(names)) == (4, 0)


def test_another_cut_of_the_kv_cache_is_another_store(store_dir):
    names = names_of("a", 4)
    with Served(settings(store_dir)) as served:
        served.serve(names)
    for gpu, more in [(Gpu(layers=5), {}), (Gpu("packed"), {}), (Gpu(), {"revision": "2"})]:
        with Served(settings(store_dir, **more), gpu) as served:
            assert served.serve(names) == 0


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
def test_several_groups_are_refused_where_their_failures_cannot_be_told(store_dir):
    with pytest.raises(ConfigError, match="several KV cache groups"):
        Served(settings(store_dir), Gpu(groups=2))


def test_the_end_waits_for_jobs_under_way(store_dir, monkeypatch):
    given, names, gate = settings(store_dir), names_of("a", 6), Gate()
    served = Served(given)
    monkeypatch.setattr(served.worker.connector_worker.worker, "_now", lambda: gate)
    served.compute(served.request(names), served.take(7), names, settle=False)
    served.step()
    served.close()
    assert gate.waited == 1
    served.close()
    assert not vllm_gpu.Opened.all
    with Served(given) as served:
        assert served.serve(names) == 6


def test_all_of_the_tiers_settings_are_settings_of_the_spec():
    own = device_settings.OWN_KEYS
    assert own >= set(HiCacheConfig.__dataclass_fields__) - {"pool_shares", "capacity_total"}
    assert not own & device_settings.VLLM_KEYS


def test_doctor_reads_the_configuration_as_vllm_would(store_dir, capsys):
    def doctor(given) -> int:
        return main(["doctor", "--engine", "vllm", "--config", json.dumps(given)])

    extra = {"path": str(store_dir), "capacity": "64MiB", "host_bytes": "32MiB", "blocks_per_chunk": 4}
    whole = {
        "kv_connector": "KvhoistConnector", "kv_connector_module_path": "kvhoist.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip
    doctor(whole)
    assert "capacity 67108864" in capsys.readouterr().out
    doctor({**extra, "spec_name": "KvhoistOffloadingSpec"})
    assert "capacity 67108864" in capsys.readouterr().out
    for name, value in [("kv_load_failure_policy", "fail"), ("kv_connector_module_path", "kvhoist")]:
        assert doctor({**whole, name: value}) == 2
        assert name in capsys.readouterr().err
    assert doctor({**whole, "kv_connector_extra_config": {**extra, "route": "direct"}}) == 2
    assert "route" in capsys.readouterr().err
