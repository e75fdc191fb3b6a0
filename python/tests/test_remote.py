"""Stores beyond the node: what the wheel opens by a URL."""

from __future__ import annotations

import pytest

from kvhoist import Cache, ConfigError

BLOCK = 4096


@pytest.mark.parametrize(
    "url,word",
    [
        ("redis://:hunter2@127.0.0.1/0", "REDISCLI_AUTH"),
        ("s3://AKIATEST:hunter2@bucket", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket?secret=hunter2", "endpoint"),
        ("ftp://host", "s3://"),
    ],
)
def test_a_wrong_url_is_refused_without_its_secret(url, word):
    with pytest.raises(ConfigError, match="remote") as refused:
        Cache(block_bytes=BLOCK, host_blocks=8, remote=url)
    assert word in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_store_that_nobody_serves_costs_only_its_blocks():
    with Cache(block_bytes=BLOCK, host_blocks=8, remote="redis://127.0.0.1:1/0", remote_policy="stored") as cache:
        assert cache.store(["a"], [b"x" * BLOCK]) == [True]
        assert cache.contains_each(["a", "b"]) == [True, False]
        assert cache.stats()["tiers"]["remote"]["resident"] == 0
