"""Settings of the backend, without SGLang."""

from __future__ import annotations

import pytest

from kvhoist import ConfigError, parse_bytes
from kvhoist.cache import slots_within, store_bytes
from kvhoist.config import HiCacheConfig


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
    ],
)
def test_sizes(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9", None, 0, -5, True, 1.5, "0", "1" * 30, [1]])
def test_wrong_sizes(text):
    with pytest.raises(ConfigError, match="^capacity: found"):
        parse_bytes(text, "capacity")


def test_sglangs_own_keys_are_left_alone_and_the_environment_stands_in():
    extra = {"backend_name": "kvhoist", "module_path": "m", "class_name": "c", "interface_v1": 1, "capacity": "1GiB"}
    environ = {
        "KVHOIST_PATH": "/a:/b",
        "KVHOIST_CAPACITY": "9GiB",
        "KVHOIST_DEADLINE_MS": "5000",
        "KVHOIST_WRITE_POLICY": "",
    }
    config = HiCacheConfig.load(extra, environ)
    assert (config.path, config.capacity, config.deadline_ms) == (["/a", "/b"], 1 << 30, 5000)
    assert config.write_policy == "write_through"


@pytest.mark.parametrize("missing", ["path", "capacity"])
def test_what_must_be_given(missing):
    extra = {"path": "/a", "capacity": "1GiB"}
    del extra[missing]
    with pytest.raises(ConfigError, match=f"^{missing}: .*KVHOIST_{missing.upper()}"):
        HiCacheConfig.load(extra, {})


def test_unknown_keys_are_named():
    with pytest.raises(ConfigError, match="^capasity: found '1GiB', expected one of the keys path, capacity"):
        HiCacheConfig.load({"path": "/a", "capasity": "1GiB"}, {})


@pytest.mark.parametrize("block", [1, 654, 4096, 70_272, 8 << 20])
@pytest.mark.parametrize("capacity", [1 << 20, (1 << 20) + 4096, 5 << 20, 7_654_321, 1 << 30, (200 << 30) + 17])
def test_as_many_slots_as_fit_and_not_one_more(block, capacity):
    slots = slots_within(capacity, block)
    assert slots >= 0 and (slots == 0 or store_bytes(slots, block) <= capacity)
    assert store_bytes(slots + 1, block) > capacity


def test_the_file_is_as_long_as_was_reckoned(store_dir):
    import kvhoist

    for block, capacity in ((654, 5 << 20), (40_000, 9_999_999)):
        path = store_dir / str(block)
        path.mkdir()
        kvhoist.Cache(path, block_bytes=block, capacity=capacity, host_bytes="1MiB", direct_io="prefer").close()
        (store,) = path.iterdir()
        assert store.stat().st_size == store_bytes(slots_within(capacity, block), block) <= capacity


def test_doctor_looks_at_a_drive_and_leaves_nothing(store_dir, capsys):
    from kvhoist.__main__ import main

    status = main(["doctor", "--path", str(store_dir)])
    said = capsys.readouterr().out
    assert "read at" in said and "io_uring" in said
    assert status == (1 if "NO:" in said else 0)
    assert list(store_dir.iterdir()) == []


def test_doctor_names_what_is_wrong_with_a_config(store_dir, capsys):
    import json

    from kvhoist.__main__ import main

    assert main(["doctor", "--config", json.dumps({"path": str(store_dir), "capacity": "much"})]) == 2
    assert "capacity: found 'much'" in capsys.readouterr().err
    assert main(["doctor", "--config", json.dumps({"path": str(store_dir), "capacity": "900TiB"})]) == 1
    assert "space" in capsys.readouterr().out
    assert main(["doctor", "--config", "@/no/such/file"]) == 2


def test_the_example_config_is_one(monkeypatch):
    import json
    from pathlib import Path

    example = Path(__file__).parents[1] / "example.json"
    config = HiCacheConfig.load(json.loads(example.read_text()), {})
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
