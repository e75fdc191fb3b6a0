"""GPU memory to NVMe under vLLM's real connector, scheduler and worker: bytes, failures, order, limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vtier

why = vtier.missing()
if why:
    pytest.skip(why, allow_module_level=True)

from vgpu import FINISHED, TOKENS, Gate, Gpu, Served, files, names_of, on_gpu, settings  # noqa: E402

from kvhoist import _figures  # noqa: E402
from kvhoist._stores import Place  # noqa: E402
from kvhoist.vllm import device_chunks, device_settings, hash_seed, spec  # noqa: E402

NEW = vtier.version() >= (0, 33)


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


def test_engines_with_other_weights_of_one_name_share_nothing(store_dir):
    def made():
        """A function that is elsewhere in memory each time, as it is in each process."""

        def overrides(config):
            return config

        return overrides

    names = names_of("a", 4)
    for found in (0, 4):
        for weights in (
            {}, {"revision": "abc"}, {"quantization": "fp8"}, {"hf_config_path": "/models/config"},
            {"quantization_config": {"linear": "fp8"}}, {"hf_overrides": {"rope_parameters": {"factor": 2.0}}},
            {"hf_overrides": {"rope_parameters": {"factor": 4.0}}}, {"hf_overrides": made()},
        ):  # fmt: skip
            with Served(settings(store_dir), weights=weights) as served:
                assert served.serve(names) == found, weights
    # What is empty tells no two engines apart.
    with Served(settings(store_dir), weights={"revision": None, "hf_overrides": {}}) as served:
        assert served.serve(names) == 4


def test_engines_with_other_dtypes_or_factors_of_a_rope_share_nothing(store_dir):
    import torch

    rope = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]}})
    plain = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": "default"}})
    llama = SimpleNamespace(to_dict=lambda: {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    names = names_of("a", 4)
    for round_ in range(2):
        for cache, weights, shared in (
            ({}, {}, False),
            ({"cache_dtype": "fp8"}, {"dtype": torch.bfloat16}, False),
            ({"cache_dtype": "fp8"}, {"dtype": torch.float16}, False),
            ({"mamba_cache_dtype": "float16"}, {}, False),
            ({"mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "float32"}, {}, False),
            ({"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "1"]}, {"dtype": torch.bfloat16}, False),
            ({"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "2"]}, {"dtype": torch.bfloat16}, False),
            ({"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["2", "0", "2"]}, {"dtype": torch.bfloat16}, True),
            ({"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": []}, {"dtype": torch.bfloat16}, True),
            ({}, {"hf_config": rope, "max_model_len": 4096}, False),
            ({}, {"hf_config": rope, "max_model_len": 8192}, False),
            ({}, {"hf_config": llama, "max_model_len": 32_768}, False),
            ({}, {"hf_config": llama, "max_model_len": 131_072}, False),
            ({}, {"override_generation_config": {"attn_temperature_tuning": False}}, False),
            ({}, {"override_generation_config": {"temperature": 0.5}}, True),
            # Of other models the longest request changes no value.
            ({"mamba_cache_dtype": "auto"}, {"hf_config": plain, "max_model_len": 8192}, True),
        ):
            with Served(settings(store_dir), weights=weights, cache=cache) as served:
                assert served.serve(names) == (4 if round_ or shared else 0), (cache, weights)


def test_a_seed_that_is_drawn_at_each_start_is_warned_of(store_dir, monkeypatch, caplog):
    monkeypatch.setattr(hash_seed, "_has_warned", False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with Served(settings(store_dir)):
        pass
    said = [record.getMessage() for record in caplog.records if record.name == hash_seed.__name__]
    assert len(said) == (vtier.version() < (0, 29)) and all("set PYTHONHASHSEED=0" in line for line in said)


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
        gate.open()
        assert served.matched(other) == 4 * TOKENS


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
        gate.open_soon()
        served.step([scheduled], {new.request_id: new.num_tokens})
        assert gate.is_open and served.store.under_way == 0, "vLLM writes to the blocks from here on"
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
            # The former owner of the blocks still writes to them.
            torch.cuda._sleep(1_000_000_000)
            for block in ids[0]:
                served.gpu.fill(block, b"the last of others")
            assert served.load(again, ids, tokens) == (set(), set())
        torch.cuda.synchronize()
        served.check(ids, names)


@pytest.mark.parametrize("blocks_max, found", [(5, [4, 1]), (None, [4, 4, 3])], ids=["set", "half of the KV cache"])
def test_what_is_offered_past_the_limit_is_not_stored(store_dir, monkeypatch, blocks_max, found):
    gpu = Gpu(blocks=23)
    limit = {} if blocks_max is None else {"store_bytes_queued_max": blocks_max * gpu.block_bytes}
    with Served(settings(store_dir, **limit), gpu) as served:
        worker, gate = served.worker.connector_worker.worker, Gate()
        monkeypatch.setattr(worker, "_now", lambda: gate)
        names, taken = [names_of(prompt, 4) for prompt in range(len(found))], []
        for prompt in names:
            taken.append(served.take(5))
            served.compute(request := served.request(prompt), taken[-1], prompt, settle=False)
            del request
        assert served.manager._dropped == 4 * len(found) - sum(found)
        gate.open()
        served.settle()
        served._free += [block for ids in taken for group in ids for block in group]
        # The beginnings of prefixes were kept.
        assert [served.serve(prompt) for prompt in names] == found


def test_a_reset_hides_what_was_stored_until_the_restart(store_dir):
    given, names = settings(store_dir), names_of("a", 4)
    with Served(given) as served:
        served.serve(names)
        assert served.scheduler.reset_cache()
        assert served.serve(names) == 0, "the weights may be others"
        assert served.serve(names) == 4
    with Served(given) as served:
        assert served.serve(names) == 4, "what was stored under the first weights"


def test_the_last_token_of_an_answer_is_in_no_chunk(store_dir):
    """It was sampled, and nobody has computed its KV."""
    names = names_of("a", 4)
    with Served(settings(store_dir, blocks_per_chunk=1, offload_prompt_only=False)) as served:
        request, ids = served.request(names, extra_tokens=0), served.take(4)
        request.num_prompt_tokens = 2 * TOKENS
        for block, name in zip(ids[0][:3], names):
            served.gpu.fill(block, name + b"\0")
        new = SimpleNamespace(req_id=request.request_id, block_ids=tuple(ids))
        served.step([new], {request.request_id: 4 * TOKENS - 1})
        request.num_computed_tokens = 4 * TOKENS - 1
        request.status = FINISHED
        served.scheduler.request_finished_all_groups(request, tuple(ids))
        served.step(finished=[request.request_id])
        served.settle()
        assert served.serve(names) == 3


def test_a_chunk_with_a_hole_is_not_stored(store_dir):
    """vLLM 0.33 leaves out blocks of a sliding window that were freed meanwhile, and does not say which."""
    with Served(settings(store_dir, blocks_per_chunk=4)) as served:
        part = device_chunks.Part(0, [b"a"], [1, 2, 3], 0)
        with pytest.raises(ValueError, match="^found 3 blocks from block 0 on, expected those of 1 chunks of 4"):
            served.store._addresses(part, is_load=False)
        served.store._addresses(part, is_load=True)
        served.store._addresses(device_chunks.Part(0, [b"a"], [1, 2, 3], 1), is_load=False)


def test_a_reset_leaves_no_job_that_reads_the_gpu_later(store_dir):
    """vLLM sleeps after a reset: the KV cache is unmapped, and holds anything when it is back."""
    given, begun, waiting = settings(store_dir), names_of("a", 4), names_of("b", 4)
    with Served(given) as served:
        served.compute(served.request(begun), served.take(5), begun, settle=False)
        request, ids = served.request(waiting), served.take(5)
        for block, name in zip(ids[0], waiting):
            served.gpu.fill(block, name + b"\0")
        served.step([SimpleNamespace(req_id=request.request_id, block_ids=tuple(ids))], {request.request_id: request.num_tokens})
        assert served.worker.connector_worker._unsubmitted_store_jobs, "vLLM begins them with the next step"
        assert served.scheduler.reset_cache()
        assert not served.store.under_way
        for block in range(served.gpu.config.num_blocks):
            served.gpu.fill(block, b"what sleep left")
        served.settle()
    with Served(given) as served:
        assert served.serve(begun) == 4
        assert served.serve(waiting) == 0


def test_a_load_that_a_reset_comes_before_is_no_failure(store_dir, monkeypatch):
    with Served(settings(store_dir)) as served:
        names = names_of("a", 4)
        served.serve(names)
        request, ids = served.request(names), served.take(5)
        tokens = served.matched(request)
        with monkeypatch.context() as patch:
            # The plan of the step is made, and its worker has not begun.
            patch.setattr(served.worker, "handle_preemptions", lambda _meta: served.scheduler.reset_cache())
            failed, blocks = served.load(request, ids, tokens)
        assert failed == {request.request_id} if NEW else blocks == set(ids[0][:4]), "the request computes them"
        served.manager._figures._asked_at = 0.0
        figures = served.manager.get_stats().data["data"]
        assert not any(figures["vllm:kv_offload_kvhoist_loads_failed"].values())
        assert not served.manager._opened.known


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


def test_each_replica_serves_its_figures_at_a_port_of_its_own(store_dir, monkeypatch):
    served = []
    monkeypatch.setattr(_figures, "serve", lambda port, rank=0: served.append((port, rank)))
    with Served(settings(store_dir, metrics_port=9400)), Served(settings(store_dir, metrics_port=9400), replica=1):
        assert served == [(9400, 0), (9400, 1)]


def test_another_cut_of_the_kv_cache_is_another_store(store_dir):
    names = names_of("a", 4)
    with Served(settings(store_dir)) as served:
        served.serve(names)
    for gpu, more in [(Gpu(layers=5), {}), (Gpu("packed"), {}), (Gpu(), {"revision": "2"})]:
        with Served(settings(store_dir, **more), gpu) as served:
            assert served.serve(names) == 0


def test_preemption_waits_for_the_stores_of_its_blocks(store_dir, monkeypatch):
    with Served(settings(store_dir)) as served:
        worker, gate = served.worker.connector_worker.worker, Gate()
        names = names_of("a", 4)
        monkeypatch.setattr(worker, "_now", lambda: gate)
        request, ids = served.request(names), served.take(5)
        served.matched(request)
        served.compute(request, ids, names, settle=False)
        served.step()
        assert served.store.under_way == 1 and not gate.is_open
        gate.open_soon()
        served.step(preempted={request.request_id})
        assert gate.is_open and served.store.under_way == 0, "others get the blocks from here on"
        for block in ids[0]:
            served.gpu.fill(block, b"others")
        served.settle()
        assert served.serve(names) == 4


def test_the_end_waits_for_jobs_under_way(store_dir, monkeypatch):
    given, names, gate = settings(store_dir), names_of("a", 6), Gate()
    served = Served(given)
    monkeypatch.setattr(served.worker.connector_worker.worker, "_now", lambda: gate)
    served.compute(served.request(names), served.take(7), names, settle=False)
    served.step()
    gate.open_soon()
    served.close()
    assert gate.is_open
    served.close()
    assert not spec.Opened.all
    with Served(given) as served:
        assert served.serve(names) == 6


def test_an_error_of_the_last_store_does_not_keep_the_next_one_from_opening(store_dir, caplog):
    given, names = settings(store_dir), names_of("a", 4)
    first = Served(given, engine_id="one")
    first.serve(names)
    for file in files(store_dir):
        file.unlink()
    with Served(given, engine_id="one") as second:
        assert "close failed" in caplog.text and "deleted" in caplog.text
        assert second.serve(names) == 0 and second.serve(names) == 4
    first.close()
