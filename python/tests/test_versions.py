"""Which versions of an engine are taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvhoist._versions import Supported


def supported(version):
    return Supported(SimpleNamespace(__name__="engine", __version__=version), (0, 28), (0, 33), "parts this")


@pytest.mark.parametrize("version", ["0.28.0", "0.33.1", "0.30.0rc1", "0.30.0+cu129", "0.28"])
def test_a_supported_version_is_taken_without_a_word(version, caplog):
    supported(version).check()
    supported(version).warn()
    assert not caplog.text and supported(version).layout() == version[:4]


@pytest.mark.parametrize("version, before", [("0.28.0", True), ("0.28.9", True), ("0.29.0rc1", False), ("0.33", False)])
def test_a_version_is_before_a_later_one(version, before):
    assert supported(version).is_before((0, 29)) == before
    assert not supported(f"{version}.dev7").is_before((0, 29)), "a build from source"


@pytest.mark.parametrize("version", ["0.27.9", "0.27.0+cu129", "0.1.0"])
def test_an_older_version_is_refused(version):
    with pytest.raises(ImportError, match="expected 0.28 to 0.33"):
        supported(version).check()


@pytest.mark.parametrize("version", ["0.1.dev1+gabcdef123", "0.1.dev1+g0123456.d20261123", "dev", "0.34.1.dev7", None])
def test_a_build_from_source_is_tried_with_a_warning(version, caplog):
    supported(version).check()
    supported(version).warn()
    assert "trying" in caplog.text
    assert supported(version).layout() == (version or "unknown"), "two builds of one number may differ in their layout"
