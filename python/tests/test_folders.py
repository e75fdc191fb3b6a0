"""Folders of stores: a drive that is not mounted, the root file system, huge pages of a pool."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace

import pytest

import kvhoist
from kvhoist import _folders, _native
from kvhoist._store_settings import StoreSettings
from kvhoist._stores import Place, open_store, tier_settings
from kvhoist.service import ServiceSettings, find_or_start
from kvhoist.service.supervisor import service_settings
from kvhoist.sglang.refusals import warn_of_copies, warn_of_small_pages

PLACE = Place("model", "replica", {"dtype": "bf16"})


def openers(path: str) -> list:
    """Every way in which an adapter comes to make the folder of its setting."""
    given = {"path": path, "capacity": "64MiB", "direct_io": "prefer"}
    return [
        lambda: open_store(tier_settings(given), PLACE, 4096),
        lambda: service_settings(StoreSettings.load(given)),
        lambda: find_or_start(ServiceSettings((path,), 64 << 20, 8 << 20)),
    ]


@pytest.mark.parametrize("at", range(3))
def test_an_unmounted_drive_does_not_fill_the_root_file_system(at):
    with pytest.raises(kvhoist.StoreError, match="^/nonexistent/kv: found no folder /nonexistent.*mount the missing drive"):
        openers("/nonexistent/kv")[at]()
    assert not os.path.exists("/nonexistent")


@pytest.mark.parametrize("at", range(2))
def test_a_file_is_no_folder_for_stores(store_dir, at):
    (store_dir / "file").write_text("mine")
    for path in (store_dir / "file", store_dir / "file" / "kv"):
        with pytest.raises(kvhoist.StoreError, match="expected a folder"):
            openers(str(path))[at]()


def test_the_last_part_of_a_path_is_made_for_its_user_alone(store_dir):
    openers(str(store_dir / "kv"))[0]().close()
    assert (store_dir / "kv").stat().st_mode & 0o777 == 0o700


def test_a_path_on_the_root_file_system_is_warned_of_with_its_bytes(store_dir, monkeypatch, caplog):
    assert _native.is_on_root("/") and not _native.is_on_root("/proc")
    monkeypatch.setattr(_folders, "_warned", set())
    for is_on_root, told in ((True, 1), (False, 0)):
        caplog.clear()
        monkeypatch.setattr(_native, "is_on_root", lambda path, is_on_root=is_on_root: is_on_root)
        for _ in range(2):
            _folders.make_folder(str(store_dir / str(is_on_root)), 3 << 30)
        (*warnings,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == told, warnings
        assert all("root file system" in text and "3.0 GiB" in text for text in warnings)


def test_the_machine_is_as_large_as_it_is(store_dir):
    disk, memory = _native.machine_sizes([str(store_dir)])
    system = os.statvfs(store_dir)
    assert disk == system.f_blocks * system.f_frsize
    assert 0 < memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Two paths on one file system have its room together, and the service of both starts.
    (store_dir / "a").mkdir()
    (store_dir / "b").mkdir()
    config = StoreSettings.load({"path": [str(store_dir / "a"), str(store_dir / "b")], "capacity": "64MiB"})
    assert service_settings(config).capacity == disk // 2 * 2


@pytest.mark.parametrize(
    "version, advice",
    [
        ("0.5.23", "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=8"),
        ("0.0.0.dev1+g0123abc", "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=8"),
        ("", "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS=8"),
        ("0.5.17", "SGLANG_HUGEPAGE_SIZE=2MB"),
    ],
)
def test_a_pool_in_small_pages_is_warned_of_with_the_advice_for_this_version(version, advice, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__=version))
    for share, pool_bytes in ((0.99, 1 << 30), (None, 1 << 30), (0.0, 1 << 20)):
        warn_of_small_pages("kv", pool_bytes, share)
    assert not caplog.records
    warn_of_small_pages("kv", 1 << 30, 0.0)
    (record,) = caplog.records
    text = record.getMessage()
    assert "found 0% of pool kv in huge pages" in text and f"; start {f'SGLang {version}'.strip()} with SGLANG_" in text
    assert advice in text and "GLIBC_TUNABLES" not in text


def test_settings_by_which_sglang_copies_each_page_are_warned_of(caplog):
    whole = {"class_name": "HiCacheKvhoist", "interface_v1": 1}
    warn_of_copies(whole)
    warn_of_copies({"path": "/a"})
    warn_of_copies(None)
    assert not caplog.records
    warn_of_copies({"class_name": "HiCacheKvhoist"})
    assert "interface_v1: found nothing, expected 1" in caplog.text
