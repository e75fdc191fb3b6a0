"""The LMCache adapter on a node's service: servers share one space, and a service that dies costs misses."""

from __future__ import annotations

import lm
import pytest

why = lm.missing()
if why:
    pytest.skip(why, allow_module_level=True)

lm.boot()

from lm import Server, adapter_config, keys_of  # noqa: E402
from nodes import Node, await_  # noqa: E402


@pytest.fixture
def node(store_dir):
    with Node(store_dir) as node:
        yield node


def config(node, **more) -> dict:
    given = adapter_config("/", capacity="32MiB", service=node.socket, **more)
    del given["adapter_params"]["path"]
    return given


@pytest.mark.parametrize("shared", [False, True])
def test_servers_share_one_space(node, shared, caplog):
    keys, more = keys_of("a", 9), keys_of("b", 9)
    with Server(config(node), shared=shared) as first, Server(config(node)) as second:
        assert first.put(keys)
        assert second.get([*keys, *keys_of("new", 2)]) == "H" * 9 + "MM"
        assert second.put(more)
        assert first.get(more) == "H" * 9
        regions = first.l2.store._regions
        assert regions[-1].copied is False
        assert any(region.copied for region in regions) is not shared, "shared memory goes straight"
        assert "copied once more" in caplog.text
    with Server(config(node)) as third:
        assert third.get(keys) == "H" * 9, "what servers stored outlives them"


def test_servers_of_other_revisions_share_nothing(node):
    """The servers of one vLLM, whose ranks LMCache numbers from 0 at each."""
    keys = keys_of("a", 4)
    with Server(config(node, revision="0")) as first, Server(config(node, revision="1")) as second:
        assert first.put(keys)
        assert second.look_up(keys) == "MMMM"


def test_what_one_server_deletes_is_gone_for_all(node):
    keys = keys_of("a", 4)
    with Server(config(node)) as first, Server(config(node)) as second:
        assert first.put(keys)
        assert second.look_up(keys) == "HHHH"
        first.adapter.delete(keys)
        assert second.look_up(keys) == "MMMM"


def test_a_service_that_dies_costs_misses(node):
    keys = keys_of("a", 4)
    with Server(config(node)) as server:
        assert server.put(keys)
        server.forget()
        node.kill()
        assert server.get(keys) == "MMMM"
        assert not server.put(keys_of("b", 2)), "nothing takes it"
        assert server.l2.report_status()["storage"] == "service"
        node.start()
        space = server.l2.store.cache
        await_(lambda: space.connected, "the client to connect again")
        space._pause.end()
        server.forget()
        assert server.get(keys) == "HHHH"
