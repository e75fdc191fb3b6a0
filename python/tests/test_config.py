"""Settings of the backend, without SGLang."""

from __future__ import annotations

import json
import os
import stat

import pytest

from kvhoist import ConfigError, parse_bytes
from kvhoist._folders import make_private_folders
from kvhoist._store_settings import StoreSettings
from kvhoist._stores import tier_settings
from kvhoist.cache import slots_on_each, store_bytes
from kvhoist.sglang.settings import backend_settings


@pytest.mark.parametrize(
    "text,bytes_",
    [
        ("1", 1),
        (7, 7),
        ("200GiB", 200 << 30),
        ("1.5 TiB", 3 << 39),
        ("64M", 64 << 20),
        ("10GB", 10**10),
        (" 4 kib ", 4096),
        ("200Gi", 200 << 30),
        ("1.5MiB", 3 << 19),
    ],
)
def test_sizes(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9", None, 0, -5, True, 1.5, "0", "1" * 30, [1]])
def test_wrong_sizes(text):
    with pytest.raises(ConfigError, match="^capacity: found"):
        parse_bytes(text, "capacity")


HUGE = "9" * 5000


@pytest.mark.parametrize(
    "value",
    [HUGE, HUGE + ".5", "9" * 400 + ".0", 10**5000, -(10**5000), "²", "٣GiB", float("inf")],
    ids=lambda value: type(value).__name__,
)
def test_absurd_numbers_are_wrong_settings(value):
    with pytest.raises(ConfigError, match="^capacity: found") as raised:
        parse_bytes(value, "capacity")
    assert len(str(raised.value)) < 500
    good = {"path": "/a", "capacity": "1GiB"}
    for name in ("capacity", "host_bytes", "deadline_ms", "read_bytes_in_flight_max", "pool_shares", "revision"):
        with pytest.raises(ConfigError, match=f"^{name}: found"):
            StoreSettings.load({**good, name: [value] if name in ("pool_shares", "revision") else value}, {})
    with pytest.raises(ConfigError, match="^pool_shares: found"):
        StoreSettings.load({**good, "pool_shares": {"a": value}}, {})


@pytest.mark.parametrize("path", ["/a\0b", "/\ud800", ["/a", "/b\0"], b"/a", {"a": 1}, [1]])
def test_paths_that_are_none_are_wrong_settings(path):
    with pytest.raises(ConfigError, match="^path: found"):
        StoreSettings.load({"path": path, "capacity": "1GiB"}, {})


@pytest.mark.parametrize("extra", [[], "x", 3, [["path", "/a"]]])
def test_a_config_that_is_no_object_is_a_wrong_setting(extra):
    with pytest.raises(ConfigError, match="^extra_config: found"):
        backend_settings(extra, {})


@pytest.mark.parametrize(
    "field,change",
    [
        ("block_bytes", dict(block_bytes=10**5000)), ("block_bytes", dict(block_bytes=2**31)),
        ("host_bytes", dict(host_bytes=10**5000)), ("host_bytes", dict(host_bytes=HUGE)),
        ("capacity", dict(path="/a", capacity=10**5000)), ("capacity", dict(path="/a", capacity=HUGE + ".1")),
        ("deadline_ms", dict(deadline_ms=10**5000)), ("waiters_max", dict(waiters_max=-1)),
        ("movements_max", dict(movements_max=True)), ("spin_us", dict(spin_us=float("nan"))),
        ("path", dict(path=3, capacity="1GiB")), ("path", dict(path="/a\0", capacity="1GiB")),
        ("path", dict(path=[None], capacity="1GiB")),
    ],
)  # fmt: skip
def test_absurd_settings_of_a_cache_are_named(field, change):
    import kvhoist

    with pytest.raises(ConfigError, match=f"^{field}: found") as raised:
        kvhoist.Cache(**{"block_bytes": 4096, **change})
    assert raised.value.field == field


def test_absurd_numbers_in_a_call_are_wrong_arguments():
    import kvhoist

    with kvhoist.Cache(block_bytes=16) as cache:
        for wrong in (-1, 2**64, 10**5000, 1.5):
            with pytest.raises(kvhoist.ArgumentError, match="^depth: found"):
                cache.queue(wrong)
            with pytest.raises(kvhoist.ArgumentError, match="^segments: found"):
                cache.load(["a"], [[(1, wrong)]])
            with pytest.raises(kvhoist.ArgumentError, match="^segments: found"):
                cache.load_pages(["a"], [wrong], [16])
        for wrong in (-1, 2**64, 10**5000):
            with pytest.raises(kvhoist.ArgumentError, match="^address: found"):
                cache.register_host(wrong, 16)
            with pytest.raises(kvhoist.ArgumentError, match="^nbytes: found"):
                cache.register_host(4096, wrong)


# What separates two stores


def _folder(
    revision="", model_name="meta/tiny", pool="kv", draft_layers=0, draft_states=0, pp_rank=0, pp_size=1, **server_args
):
    """The folder's name of the stores of a server with these arguments."""
    from types import SimpleNamespace

    from kvhoist.sglang.pools import Geometry, Identity, PoolStore

    storage = SimpleNamespace(
        model_name=model_name, tp_rank=0, tp_size=1, is_mla_model=False, dp_rank=0, pp_rank=pp_rank, pp_size=pp_size
    )
    args = SimpleNamespace(**server_args) if server_args else None
    store = PoolStore.__new__(PoolStore)
    store.name, store.geometry = pool, Geometry(4096, 16, 2, "page_first", "torch.bfloat16")
    store.pool = SimpleNamespace(target_layer_num=4, layer_num=4 + draft_layers)
    if pool == "mamba":
        store.pool = SimpleNamespace(mtp_draft_buffer_infos=("of a layer",) * draft_states)
    store.identity = Identity.of(storage, args, revision)
    return store.namespace()


@pytest.mark.parametrize("name", ["remote", "remote_bytes", "recompute_us"])
def test_a_store_beyond_the_node_is_the_service_s(name):
    with pytest.raises(ConfigError, match=f"^{name}: found .*`kvhoist serve --config`.*`service`"):
        StoreSettings.load({"path": "/a", "capacity": "1GiB", name: "redis://cache/0"}, {})


def test_what_is_given_overrules_what_the_environment_says_in_another_way(monkeypatch):
    def loaded(given, **environ):
        return StoreSettings.load({"path": "/a", **given}, {f"KVHOIST_{name}": value for name, value in environ.items()})

    assert loaded({"capacity_total": "8GiB"}, CAPACITY="1GiB").for_ranks(4).capacity == 2 << 30
    assert loaded({"capacity": "1GiB"}, CAPACITY_TOTAL="8GiB").for_ranks(4).capacity == 1 << 30
    kept = loaded({"capacity": 7, "keep_in_host": "16MiB"}, HOST_BYTES="4MiB")
    assert (kept.host_bytes, kept.keep_in_host) == (16 << 20, True)
    assert loaded({"capacity": 7, "keep_in_host": True}, HOST_BYTES="4MiB").host_bytes == 4 << 20
    kept = loaded({"capacity": 7, "host_bytes": "4MiB"}, KEEP_IN_HOST="16MiB")
    assert (kept.host_bytes, kept.keep_in_host) == (4 << 20, False)
    assert loaded({"capacity": 7, "host_bytes": "4MiB"}, KEEP_IN_HOST="true").keep_in_host
    # Two in one place contradict each other.
    for wrong in (dict(CAPACITY="1GiB", CAPACITY_TOTAL="1GiB"), dict(CAPACITY="1", HOST_BYTES="1", KEEP_IN_HOST="2MiB")):
        with pytest.raises(ConfigError):
            loaded({}, **wrong)
    with pytest.raises(ConfigError, match="KVHOIST_KEEP_IN_HOST"):
        loaded({"capacity": 7, "host_bytes": "4MiB"}, KEEP_IN_HOST="ture")
    # The default of a tier is nobody's word.
    monkeypatch.setenv("KVHOIST_KEEP_IN_HOST", "16MiB")
    given = {"path": "/a", "capacity": 7, "service": "auto"}
    assert tier_settings(given).host_bytes == 16 << 20
    # What is not kept needs no more memory than where nothing is said.
    monkeypatch.delenv("KVHOIST_KEEP_IN_HOST")
    least = tier_settings(given).host_bytes
    for no in ({"keep_in_host": False}, {"keep_in_host": "false"}):
        assert tier_settings({**given, **no}).host_bytes == least
    monkeypatch.setenv("KVHOIST_KEEP_IN_HOST", "false")
    assert tier_settings(given).host_bytes == least
    assert tier_settings({**given, "keep_in_host": True}).host_bytes == 1 << 30
    monkeypatch.setenv("KVHOIST_KEEP_IN_HOST", "true")
    assert tier_settings(given).host_bytes == 1 << 30
    assert tier_settings({**given, "keep_in_host": False}).host_bytes == least


def test_pipelines_that_are_split_at_other_layers_have_stores_of_their_own(monkeypatch):
    """The second of four stages has ten layers in both, and not the same."""
    folders, alone = set(), _folder()
    for split in (None, "10,10,12,8", "12,10,10,8"):
        if split is not None:
            monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", split)
        folders.add(_folder(pp_rank=1, pp_size=4))
    assert len(folders) == 3 and _folder() == alone


def test_weights_that_differ_have_stores_of_their_own():
    from types import SimpleNamespace

    def adapter(name, path):
        return SimpleNamespace(lora_id=object(), lora_name=name, lora_path=path)

    servers = [
        dict(),
        dict(revision="2026-11-01"),
        dict(revision="2026-11-02"),
        dict(model_path="/models/a"),
        dict(model_path="/models/b"),
        dict(model_path="meta/tiny", quantization="fp8"),
        dict(model_path="meta/tiny", quantization="awq"),
        dict(model_path="meta/tiny", json_model_override_args='{"rope_theta": 1e6}'),
        dict(model_path="meta/tiny", lora_paths=[adapter("law", "/l/1")]),
        dict(model_path="meta/tiny", lora_paths=[adapter("law", "/l/2")]),
        dict(model_path="meta/tiny", lora_paths=[adapter("law", "/l/1"), adapter("code", "/l/3")]),
    ]
    folders = [_folder(**server) for server in servers]
    assert len(set(folders)) == len(servers)
    # The same at the next start, whatever ids the adapters have, and in whatever order they were given.
    assert folders == [_folder(**server) for server in servers]
    swapped = dict(model_path="meta/tiny", lora_paths=[adapter("code", "/l/3"), adapter("law", "/l/1")])
    assert _folder(**swapped) == folders[-1]


def test_arguments_that_change_kv_have_stores_of_their_own():
    kt = dict(kt_weight_path="/kt/a", kt_method="AMXINT4")
    hook = {"name": "scale", "target_modules": ["model.layers.0"]}
    servers = [
        dict(),
        dict(load_format="dummy"),
        dict(load_format="flash_rl"),
        kt,
        {**kt, "kt_weight_path": "/kt/b"},
        {**kt, "kt_method": "AMXINT8"},
        {**kt, "kt_num_gpu_experts": 8},
        {**kt, "kt_max_deferred_experts_per_token": 2},
        dict(forward_hooks=[hook]),
        dict(forward_hooks=[hook, {**hook, "name": "shift"}]),
        dict(enable_precise_embedding_interpolation=True),
    ]
    folders = [_folder(model_path="meta/tiny", **server) for server in servers]
    assert len(set(folders)) == len(servers)
    assert folders == [_folder(model_path="meta/tiny", **server) for server in servers]
    # What changes nothing: another order of a hook's names, what has no effect without `kt_weight_path`, other formats.
    hooked = folders[servers.index(dict(forward_hooks=[hook]))]
    assert _folder(model_path="meta/tiny", forward_hooks=[dict(reversed(hook.items()))]) == hooked
    unused = dict(kt_method="AMXINT8", kt_num_gpu_experts=8, kt_max_deferred_experts_per_token=2)
    for same in (unused, dict(load_format="auto"), dict(load_format="safetensors")):
        assert _folder(model_path="meta/tiny", **same) == folders[0]


def test_draft_models_that_differ_have_stores_of_their_own():
    target = dict(model_path="meta/tiny", revision="abc", quantization="fp8")
    same = {
        "speculative_draft_model_path": "meta/tiny",
        "speculative_draft_model_revision": "abc",
        "speculative_draft_model_quantization": "fp8",
    }
    drafts = [
        same,
        {**same, "speculative_draft_model_path": "/models/draft-1"},
        {**same, "speculative_draft_model_path": "/models/draft-2"},
        {**same, "speculative_draft_model_revision": "main"},
        {**same, "speculative_draft_model_revision": None},
        {**same, "speculative_draft_model_quantization": None},
        {**same, "speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {**same, "speculative_draft_kv_cache_dtype": "fp8_e5m2"},
        {**same, "speculative_draft_load_format": "dummy"},
        {**same, "speculative_draft_load_format": "flash_rl"},
    ]
    # Pools of the draft's own, and pools of the target with the draft's layers behind its own.
    for pool in (dict(pool="draft"), dict(pool="draft_swa"), dict(draft_layers=1), dict(pool="mamba", draft_states=1)):
        folders = [_folder(**pool, **target, **draft) for draft in drafts]
        assert len(set(folders)) == len(drafts), pool
        assert folders == [_folder(**pool, **target, **draft) for draft in drafts]
    # The others are as they were before drafts were told apart.
    for pool in ("kv", "mamba"):
        assert {_folder(pool=pool, **target, **draft) for draft in drafts} == {_folder(pool=pool, **target)}
    # What says the same of the draft as of its target, and other formats of the same weights.
    as_target = dict(speculative_draft_kv_cache_dtype="auto", speculative_draft_load_format="auto")
    for draft in (as_target, dict(speculative_draft_load_format="safetensors")):
        folder = _folder(draft_layers=1, kv_cache_dtype="auto", load_format="auto", **target, **same, **draft)
        assert folder == _folder(draft_layers=1, **target, **same)


def test_stores_of_earlier_versions_are_found():
    """Where the new settings say nothing, the identity is as it was."""
    plain = _folder()
    assert plain == "meta-tiny/tp0of1-pp0of1-cp0of1-dp0/kv/95dce8752012293fafdc98bb370364a6"
    defaults = dict(quantization=None, json_model_override_args="{}", lora_paths=None)
    assert _folder(model_path="meta/tiny", **defaults) == plain
    unset = dict(kt_weight_path=None, kt_method="AMXINT4", kt_num_gpu_experts=None, load_format="auto")
    unset |= dict(forward_hooks=None, enable_precise_embedding_interpolation=False)
    assert _folder(model_path="meta/tiny", **defaults, **unset) == plain
    random = _folder(model_path="meta/tiny", load_format="dummy")
    assert random == "meta-tiny/tp0of1-pp0of1-cp0of1-dp0/kv/88607bdf78b7dad4f6c0ca7436cf8b94"
    draft = dict(speculative_draft_model_path="meta/tiny", speculative_draft_load_format="dummy")
    random = _folder(model_path="meta/tiny", draft_layers=1, **draft)
    assert random == "meta-tiny/tp0of1-pp0of1-cp0of1-dp0/kv/2b3df83ecfe801dd9beecd0c3f3e3696"
    # A draft in the target's checkpoint.
    bundled = dict(speculative_draft_model_path="meta/tiny", speculative_draft_model_revision=None)
    assert _folder(model_path="meta/tiny", draft_layers=1, **bundled) == plain


def test_sglangs_own_keys_are_left_alone_and_the_environment_stands_in():
    extra = {"backend_name": "kvhoist", "module_path": "m", "class_name": "c", "interface_v1": 1, "capacity": "1GiB"}
    extra["file_storage_path"] = "/of/sglangs/own/backend"
    environ = {
        "KVHOIST_PATH": "/a:/b",
        "KVHOIST_CAPACITY": "9GiB",
        "KVHOIST_DEADLINE_MS": "5000",
        "KVHOIST_WRITE_POLICY": "",
    }
    config = backend_settings(extra, environ)
    assert (config.path, config.capacity, config.deadline_ms) == (["/a", "/b"], 1 << 30, 5000)
    assert config.write_policy == "write_through"


def test_only_the_environment_writes_paths_as_a_search_path(tmp_path):
    """A folder's name may have a colon."""
    for path in ("/a:/b", ["/a:/b"]):
        assert StoreSettings.load({"path": path, "capacity": 7}, {}).path == ["/a:/b"]
    assert StoreSettings.load({"capacity": 7}, {"KVHOIST_PATH": "/a:/b"}).path == ["/a", "/b"]
    with pytest.raises(ConfigError, match="^KVHOIST_PATH: found 'b', expected an absolute path"):
        StoreSettings.load({"capacity": 7}, {"KVHOIST_PATH": "/a:b"})


def test_reads_under_sglang_end_before_its_flush_gives_up():
    """It waits 10 s for the read of an aborted request; a deadline may take a quarter longer."""
    extra = {"path": "/a", "capacity": "1GiB"}
    assert backend_settings(extra, {}).deadline_ms * 1.25 < 10_000
    assert backend_settings({**extra, "deadline_ms": 20_000}, {}).deadline_ms == 20_000
    assert backend_settings(extra, {"KVHOIST_DEADLINE_MS": "20000"}).deadline_ms == 20_000


@pytest.mark.parametrize("missing", ["path", "capacity"])
def test_what_must_be_given(missing):
    extra = {"path": "/a", "capacity": "1GiB"}
    del extra[missing]
    with pytest.raises(ConfigError, match=f"^{missing}: .*KVHOIST_{missing.upper()}"):
        StoreSettings.load(extra, {})


def test_the_total_is_divided_by_the_ranks():
    config = StoreSettings.load({"path": "/a", "capacity_total": "3TiB"}, {})
    assert config.for_ranks(8).capacity == 384 << 30 and config.for_ranks(1).capacity == 3 << 40
    assert StoreSettings.load({"path": "/a"}, {"KVHOIST_CAPACITY_TOTAL": "8GB"}).for_ranks(4).capacity == 2 * 10**9
    assert StoreSettings.load({"path": "/a", "capacity": 7}, {}).for_ranks(8).capacity == 7
    for wrong in ({"capacity_total": "1GiB", "capacity": "1GiB"}, {"capacity_total": "much"}):
        with pytest.raises(ConfigError, match="^capacity_total: found"):
            StoreSettings.load({"path": "/a", **wrong}, {})
    with pytest.raises(ConfigError, match="^capacity_total: found 7, expected bytes for 8 ranks"):
        StoreSettings.load({"path": "/a", "capacity_total": 7}, {}).for_ranks(8)


def test_the_total_is_divided_by_all_ranks_of_a_server_whatever_its_attention_groups_are():
    """And the doctor divides it as the ranks do."""
    from types import SimpleNamespace

    from kvhoist import doctor
    from kvhoist.sglang.identity import Identity

    def parts(in_service, is_mla=False, tp=8, cp=1, **server):
        rank = SimpleNamespace(model_name="m", tp_rank=0, tp_size=tp, attn_cp_size=cp, is_mla_model=is_mla)
        return Identity.of(rank).parts_of_total(SimpleNamespace(**server) if server else None, in_service)

    server = dict(tp_size=8, pp_size=1)
    attention = dict(server, dp_size=8, enable_dp_attention=True)
    assert parts(False) == parts(False, **server) == 8
    assert parts(False, tp=1, **attention) == parts(False, tp=1, is_mla=True, **attention) == 8
    assert parts(False, tp=2, **dict(attention, dp_size=4)) == 8
    assert parts(False, **dict(server, pp_size=2)) == 16
    given = {"path": "/a", "capacity_total": "8GiB", "service": "off"}
    of_doctor, _ = doctor._settings("sglang", given, 8, None)
    of_a_rank = StoreSettings.load(given, {}).for_ranks(parts(False, tp=1, **attention))
    assert of_doctor.capacity == of_a_rank.capacity == 1 << 30
    # Groups of ranks whose pages differ.
    assert (parts(True, **server), parts(True, is_mla=True, **server)) == (8, 1)
    assert (parts(True, tp=2, **attention), parts(True, tp=2, is_mla=True, **attention)) == (2, 1)
    # SGLang's `tp_size` counts the ranks of context parallelism, but under data-parallel attention.
    assert (parts(True, tp=8, cp=2, **server), parts(True, tp=8, cp=2, is_mla=True, **server)) == (8, 2)
    assert parts(True, tp=2, cp=2, **dict(attention, dp_size=2)) == 4


def test_a_write_budget_is_divided_as_the_disk_is():
    given = {"path": "/a", "write_policy": "by_value", "write_budget": "1TiB"}
    config = StoreSettings.load({**given, "capacity_total": "8TiB"}, {})
    assert (config.for_ranks(4).write_budget, config.for_ranks(1).write_budget) == (1 << 38, 1 << 40)
    assert StoreSettings.load({**given, "capacity": "8TiB"}, {}).for_ranks(4).write_budget == 1 << 40
    environ = {"KVHOIST_WRITE_POLICY": "by_value", "KVHOIST_WRITE_BUDGET": "1TiB"}
    assert StoreSettings.load({"path": "/a", "capacity": "8TiB"}, environ).write_budget == 1 << 40
    for wrong in ({"write_policy": "write_back"}, {"write_budget": "much"}):
        with pytest.raises(ConfigError, match="^write_budget: found"):
            StoreSettings.load({**given, "capacity": "8TiB", **wrong}, {})


def test_a_service_has_the_budget_of_all_its_disk(tmp_path):
    from kvhoist.service.supervisor import service_settings

    given = {"path": str(tmp_path), "capacity": "1GiB", "write_policy": "by_value", "write_budget": "1GiB"}
    settings = service_settings(StoreSettings.load(given, {}))
    assert settings.write_policy == "by_value" and settings.write_budget == settings.capacity
    command = settings.command()
    assert command[command.index("--write-budget") + 1] == str(settings.capacity)
    through = service_settings(StoreSettings.load({"path": str(tmp_path), "capacity": "1GiB"}, {}))
    assert "--write-budget" not in through.command()


def test_every_method_says_what_it_does():
    """What `help` shows, down to the native half."""
    import inspect

    import kvhoist

    owners = (kvhoist.Cache, kvhoist.Client, kvhoist.Queue, kvhoist.Region)
    for owner in (*owners, kvhoist.metrics.Server, kvhoist.metrics.Collector):
        public = [name for name in dir(owner) if not name.startswith("_")]
        silent = [name for name in public if not inspect.getdoc(getattr(owner, name))]
        assert inspect.getdoc(owner) and silent == [] and len(public) > 1, f"{owner.__name__}: {silent}"


def test_the_stubs_are_those_of_the_native_half():
    import subprocess
    import sys

    pytest.importorskip("mypy.stubtest", reason="no mypy; install it with: pip install mypy")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "kvhoist._native", "--ignore-disjoint-bases"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_unknown_keys_are_named():
    with pytest.raises(ConfigError, match="^capasity: found '1GiB', expected no such name; did you mean capacity"):
        StoreSettings.load({"path": "/a", "capasity": "1GiB"}, {})


@pytest.mark.parametrize("block", [1, 654, 4096, 70_272, 8 << 20])
@pytest.mark.parametrize("capacity", [1 << 20, (1 << 20) + 4096, 5 << 20, 7_654_321, 1 << 30, (200 << 30) + 17])
def test_as_many_slots_as_fit_and_not_one_more(block, capacity):
    try:
        slots = slots_on_each(capacity, 1, block)
    except ConfigError as error:
        slots = 0
        assert error.field == "capacity"
    assert slots == 0 or store_bytes(slots, block) <= capacity
    assert store_bytes(slots + 1, block) > capacity


@pytest.mark.parametrize("paths", [1, 3])
def test_more_than_a_store_can_have_is_refused_in_words_of_the_capacity(store_dir, paths):
    import kvhoist

    folders = [store_dir / str(n) for n in range(paths)]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(ConfigError, match="^capacity: found .* bytes or less: .* larger blocks") as refused:
        kvhoist.Cache(folders, block_bytes=4096, capacity="9TiB")
    assert refused.value.field == "capacity"
    assert not any(os.listdir(folder) for folder in folders)


def test_the_file_is_as_long_as_was_reckoned(store_dir):
    import kvhoist

    for block, capacity in ((654, 5 << 20), (40_000, 9_999_999)):
        path = store_dir / str(block)
        path.mkdir()
        kvhoist.Cache(path, block_bytes=block, capacity=capacity, host_bytes="1MiB", direct_io="prefer").close()
        (store,) = path.iterdir()
        assert store.stat().st_size == store_bytes(slots_on_each(capacity, 1, block), block) <= capacity


def test_tiers_are_sized_in_blocks_too(store_dir):
    import kvhoist

    (store_dir / "a").mkdir()
    (store_dir / "b").mkdir()
    paths = [store_dir / "a", store_dir / "b"]
    sizes = dict(block_bytes=4096, direct_io="prefer")
    with kvhoist.Cache(paths, host_blocks=3, disk_blocks=7, **sizes) as cache:
        tiers = cache.stats()["tiers"]
        assert (tiers["host"]["slots"], tiers["disk"]["slots"]) == (3, 7)
    # A refusal speaks of settings that this package has.
    with pytest.raises(kvhoist.StoreError, match="4 slots on this path.*set `capacity` to") as refused:
        kvhoist.Cache(paths, capacity="4MiB", **sizes)
    assert "disks" not in str(refused.value)
    wrong = [
        (dict(path=None, disk_blocks=1), "^disk_blocks: found 1, expected none"),
        (dict(path=paths, disk_blocks=1), "^disk_blocks: found 1, expected 2 to"),
        (dict(path=paths, disk_blocks=5, capacity="4MiB"), "^capacity: found '4MiB', expected either"),
        (dict(path=None, host_blocks=5, host_bytes="4MiB"), "^host_bytes: found '4MiB', expected either"),
        (dict(path=None, host_blocks=0), "^host_blocks: found 0, expected 1 to"),
        (dict(path=None, host_blocks=1 << 40), "^host_blocks: found 1099511627776, expected a whole number from 0 to"),
        (dict(path=None, host_bytes="1KiB"), "^host_bytes: found 1024 bytes, expected room for 1 to"),
        (dict(path="/nonexistent/a/b", capacity="4MiB"), "correct `path`"),
    ]
    for settings, said in wrong:
        with pytest.raises(kvhoist.Error, match=said):
            kvhoist.Cache(**settings, **sizes)


def test_a_block_is_sized_in_text_too(store_dir):
    import kvhoist

    with kvhoist.Cache(store_dir, block_bytes="8KiB", capacity="2MiB", direct_io="prefer") as cache:
        assert cache.block_bytes == 8192 and cache.store(["a"], [bytes(8192)]) == [True]
        with pytest.raises(kvhoist.ArgumentError, match="^segments: found 5 bytes in 1 segments, expected one block of 8192"):
            cache.store(["b"], [bytes(5)])
    with kvhoist.Cache(block_bytes="1GiB") as cache:
        assert cache.stats()["tiers"]["host"]["slots"] == 1, "room for one, with defaults"
    for wrong in ("8 apples", "2GiB", 0, -1, 1.5, None, True, b"1"):
        for opens in (kvhoist.Cache, lambda **given: kvhoist.connect("/nowhere", space="a", **given)):
            with pytest.raises(kvhoist.ConfigError, match="^block_bytes: found .*, expected 1 to 1073741824 bytes, such as"):
                opens(block_bytes=wrong)
    for wrong in ("", "a" * 256, 5):
        with pytest.raises(kvhoist.ConfigError, match="^space: found .*, expected a name of 1 to 255 bytes"):
            kvhoist.connect("/nowhere", space=wrong, block_bytes="8KiB")


def test_sizes_are_called_what_their_caller_called_them(store_dir):
    import kvhoist

    sizes = dict(block_bytes=4096, direct_io="prefer")
    with kvhoist.Cache(store_dir, disk_blocks=8, **sizes):
        pass
    with pytest.raises(kvhoist.StoreError, match="by `disk_blocks`; set `disk_blocks` to"):
        kvhoist.Cache(store_dir, disk_blocks=9, **sizes)
    with pytest.raises(kvhoist.StoreError, match="by `capacity`; set `capacity` to"):
        kvhoist.Cache(store_dir, capacity="4MiB", **sizes)
    with kvhoist.Cache(store_dir, disk_blocks=8, host_bytes="8KiB", **sizes) as cache:
        assert [cache.stats()["tiers"][tier]["slots"] for tier in ("host", "disk")] == [2, 8]


def test_the_example_config_is_one(monkeypatch):
    from pathlib import Path

    example = Path(__file__).parents[1] / "example.json"
    config = backend_settings(json.loads(example.read_text()), {})
    assert config.capacity == 400 << 30 and len(config.path) == 2


def test_the_stubs_name_what_there_is():
    """The type stubs and the native classes have the same public names."""
    import ast
    from pathlib import Path

    import kvhoist
    from kvhoist import _native

    stub = ast.parse(Path(kvhoist.__file__).with_name("_native.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            stubbed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {"__new__"}
            real = getattr(_native, node.name)
            public = {name for name in vars(real) if not name.startswith("_")}
            assert {name for name in stubbed if not name.startswith("_")} == public, node.name


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_folders_that_are_made_are_private_at_every_level_whatever_the_umask(tmp_path, umask):
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    before = os.umask(umask)
    try:
        make_private_folders(str(there / "a" / "b" / "c"))
        make_private_folders(str(there / "a" / "b" / "c"))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(os.stat(there / folder).st_mode) for folder in ["a", "a/b", "a/b/c", "."]]
    assert modes == [0o700, 0o700, 0o700, 0o755]


def test_what_the_environment_says_is_refused_by_the_variable_s_name(monkeypatch):
    """The operator of a tier may have written none of the settings that other engines of the node take."""
    from kvhoist.vllm.device_settings import DeviceSettings

    for load in (tier_settings, DeviceSettings.load):
        monkeypatch.setenv("KVHOIST_CAPACITY_TOTAL", "8GiB")
        with pytest.raises(ConfigError, match="^KVHOIST_CAPACITY_TOTAL: found '8GiB', expected nothing, and") as raised:
            load({"path": "/a"})
        assert raised.value.field == "KVHOIST_CAPACITY_TOTAL"
        store = load({"path": "/a", "capacity": "1GiB"})
        assert getattr(store, "store", store).capacity == 1 << 30, "what is given is the engine's own"
        monkeypatch.delenv("KVHOIST_CAPACITY_TOTAL")
    given = {"path": "/a", "capacity": "1GiB"}
    for kept in ("true", "8GiB"):
        monkeypatch.setenv("KVHOIST_KEEP_IN_HOST", kept)
        with pytest.raises(ConfigError, match=f"^KVHOIST_KEEP_IN_HOST: found '{kept}', expected nothing, or a"):
            tier_settings(given)
        assert tier_settings({**given, "service": "auto"}).keep_in_host
        assert not tier_settings({**given, "keep_in_host": False}).keep_in_host


def test_settings_that_would_do_nothing_for_an_engine_are_refused(monkeypatch):
    from kvhoist.vllm.device_settings import DeviceSettings

    given = {"path": "/a", "capacity": "1GiB"}
    for wrong in (True, "8GiB"):
        with pytest.raises(ConfigError, match="^keep_in_host: found .*expected nothing, or a `service`"):
            tier_settings({**given, "keep_in_host": wrong})
    kept = tier_settings({**given, "keep_in_host": "8GiB", "service": "auto"})
    assert (kept.keep_in_host, kept.host_bytes) == (True, 8 << 30)
    assert not tier_settings({**given, "keep_in_host": False}).keep_in_host

    for name, wrong in (("service", "auto"), ("service", "/run/s"), ("keep_in_host", True), ("keep_in_host", "8GiB")):
        with pytest.raises(ConfigError, match=f"^{name}: found"):
            DeviceSettings.load({**given, name: wrong})
    monkeypatch.setenv("KVHOIST_SERVICE", "/run/s")
    assert DeviceSettings.load({**given, "service": "off", "keep_in_host": "false"}).store.service == "off"
    # Not a store at the root of the file system.
    with pytest.raises(ConfigError, match="^path: found nothing"):
        DeviceSettings.load({"capacity": "1GiB"})
