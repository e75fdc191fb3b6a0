"""Other versions of SGLang: what they add with defaults is inherited, and what they demand and an adapter lacks is
refused with the version's number."""

from __future__ import annotations

import abc
import importlib
import sys
from contextlib import contextmanager

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

pytest.importorskip("torch")

import kvhoist.sglang  # noqa: E402

NEW = sgl.version() >= (0, 5, 23)


def seats():
    """Of each adapter: its name, its module, and SGLang's interface."""
    if NEW:
        import sgl_linker

        sgl_linker.boot()
        from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

        yield "KvhoistLinker", "kvhoist.sglang.linker", UnifiedCacheLinker
    yield "HiCacheKvhoist", "kvhoist.sglang.backend", sgl.boot().storage.HiCacheStorage


@contextmanager
def changed(module: str, interface, patch):
    """The interface with other methods, and the adapter as it is imported then."""
    try:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(sys.modules["sglang"], "__version__", "0.6.1", raising=False)
            patch(patches)
            abc.update_abstractmethods(interface)
            importlib.reload(importlib.import_module(module))
            yield
    finally:
        abc.update_abstractmethods(interface)
        importlib.reload(sys.modules[module])


def test_a_method_that_a_version_demands_is_named_with_the_version():
    for name, module, interface in seats():
        assert not getattr(kvhoist.sglang, name).__abstractmethods__

        def demands(patches, interface=interface):
            patches.setattr(interface, "lookup_tensors", abc.abstractmethod(lambda self: None), raising=False)

        words = (
            f"found version 0.6.1, with the methods lookup_tensors in its .*; expected 0.5.*, whose .* {name} supports"
        )
        with changed(module, interface, demands), pytest.raises(ImportError, match=words):
            getattr(kvhoist.sglang, name)
        assert not getattr(kvhoist.sglang, name).__abstractmethods__


def test_a_method_that_a_version_adds_with_a_default_is_inherited():
    for name, module, interface in seats():

        def adds(patches, interface=interface):
            patches.setattr(interface, "lookup_tensors", lambda self: "the default", raising=False)

        with changed(module, interface, adds):
            assert getattr(kvhoist.sglang, name).lookup_tensors(None) == "the default"


def test_a_method_that_a_version_has_no_longer_is_no_matter():
    for name, module, interface in seats():
        gone = sorted(interface.__abstractmethods__)[0]
        with changed(module, interface, lambda patches, i=interface, gone=gone: patches.delattr(i, gone)):
            assert callable(getattr(getattr(kvhoist.sglang, name), gone))


def test_other_modules_are_refused_with_the_version(monkeypatch):
    """What an adapter imports has another name, or is not there: 0.5.17 has no linker."""
    sgl.boot()
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.1", raising=False)
    wanted = [("HiCacheKvhoist", "sglang.srt.mem_cache.hicache_storage", "kvhoist.sglang.backend")]
    wanted += [("KvhoistLinker", "sglang.srt.mem_cache.unified_cache.unified_cache_linker", "kvhoist.sglang.linker")]
    for name, theirs, module in wanted:
        monkeypatch.setitem(sys.modules, theirs, None)
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(ImportError, match=f"found version 0.6.1, with no .*; expected 0.5.*{name} supports"):
            getattr(kvhoist.sglang, name)
    assert not hasattr(kvhoist.sglang, "KvhoistLinkers")


@pytest.mark.skipif(NEW, reason="this version has a seat for the linker")
def test_a_version_without_a_seat_for_the_linker_is_refused():
    with pytest.raises(ImportError, match="no external linker.*expected 0.5.23"):
        _ = kvhoist.sglang.KvhoistLinker
