"""Ranks of a server that have found different prefixes under the linker: SGLang loads the longest one that all have,
and each rank still has what it needs of that one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from nodes import Node  # noqa: E402
from sgl_linker import boot, extra_config, tokens_of  # noqa: E402
from sgl_models import MODELS  # noqa: E402
from sgl_pages import same  # noqa: E402
from sgl_serving import Serving  # noqa: E402

from kvhoist.errors import ConfigError  # noqa: E402

#: Models where a prefix needs more than its pages.
ENDING = ("swa", "mamba", "mamba_swa")

#: Pages of a conversation at the ends of its turns.
TURNS = (3, 5)


@pytest.fixture(params=["own", "service"])
def serving(request, store_dir):
    """Makes a rank whose caches are its own, or a service's, and soon full."""
    made: list = []

    def make(model):
        seat = {"capacity": "4MiB", "host_bytes": "384KiB"}
        if request.param == "service":
            made.append(Node(store_dir, capacity="512MiB", host_bytes="32MiB"))
            seat["service"] = made[0].socket
        made.append(Serving(MODELS[model], extra_config(store_dir, **seat)))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def talk(rank) -> list[int]:
    """Stores the turns of a conversation, each in a node of its own."""
    tokens = tokens_of(rank.geometry, TURNS[-1])
    for at, pages in enumerate(TURNS):
        req, result = rank.match(tokens[: pages * rank.page])
        head = rank.tree.path_device_indices(result.last_device_node)[: result.device_prefix_len]
        assert len(head) == (TURNS[at - 1] * rank.page if at else 0)
        rank.compute(tokens[: pages * rank.page], head)
        rank.offloaded()
    rank.evict()
    return tokens


def others_lack(rank, pages: int, monkeypatch) -> None:
    """Another rank of the server has no prefix of more pages."""

    def reduce(mask, _op) -> None:
        if len(mask) > 1:
            mask[pages + 1 :] = 0

    monkeypatch.setattr(rank.tree, "_all_reduce_attn_groups", reduce)


def turn_over(rank) -> None:
    """Stores other prompts until nothing is left of what was stored before, where nothing holds it."""
    marks = sgl.page_keys(tokens_of(rank.geometry, 2, 90_000), rank.page)
    rank.stored(tokens_of(rank.geometry, 2, 90_000))
    number = 0
    while any(pages.cache.contains(marks[-1]) for pages in rank.linker._pages.values()):
        number += 1
        assert number < 1000
        rank.stored(tokens_of(rank.geometry, 5, 100_000 + 1000 * number))


@pytest.mark.parametrize("model", ENDING)
def test_a_rank_that_has_found_more_has_what_the_others_load(serving, model, monkeypatch):
    rank = serving(model)
    tokens = talk(rank)
    found = rank.linker.lookup("before", lookups(rank, tokens))
    assert {*TURNS} <= set(found)
    rank.let_go()
    others_lack(rank, TURNS[0], monkeypatch)
    req, result = rank.match(tokens)
    assert result.host_hit_length == TURNS[0] * rank.page
    assert not any(pages["released"] for pages in rank.linker.stats()["components"].values())
    turn_over(rank)
    assert rank.admit(req, result) == TURNS[0] * rank.page
    places = rank.taken(req)
    rank.begin()
    assert rank.finish(req) == [], rank.linker.stats()["failed"]
    assert same(rank.bytes_of(*places), rank.expected(tokens[: TURNS[0] * rank.page]))
    rank.given_back(*places)
    rank.settled("at the end")


@pytest.mark.parametrize("model", ENDING)
def test_a_load_of_the_longest_lets_go_of_what_shorter_ones_need(serving, model):
    rank = serving(model)
    tokens = talk(rank)
    req, result = rank.match(tokens)
    before = rank.held()
    assert rank.admit(req, result) == len(tokens)
    assert rank.held() < before
    rank.begin()
    assert rank.finish(req) == []
    rank.given_back(*rank.taken(req))


@pytest.mark.parametrize("model", ENDING)
def test_a_rank_that_cannot_keep_what_it_loads_loads_it_as_the_others_do(serving, model, monkeypatch):
    rank = serving(model)
    tokens = talk(rank)
    req, result = rank.match(tokens)

    def fails(*_given):
        raise OSError("on purpose")

    monkeypatch.setattr(type(rank.linker._pages["kv"].cache), "keep", fails)
    assert rank.admit(req, result) == len(tokens)
    places = rank.taken(req)
    rank.begin()
    assert rank.finish(req) == []
    assert same(rank.bytes_of(*places), rank.expected(tokens))
    assert rank.linker.stats()["failed"] == {"keep": 1, "pages": 0}
    rank.given_back(*places)
    rank.settled("at the end")


def test_pipeline_stages_are_refused(store_dir):
    """SGLang loads in each stage what its own ranks have found, and aborts there alone what has not come."""
    boot()
    from kvhoist.sglang.linker import KvhoistLinker

    with pytest.raises(ConfigError, match="^pp_size: found 2, expected 1: "):
        KvhoistLinker(
            SimpleNamespace(), SimpleNamespace(pp_size=2), components=set(), extra_config=extra_config(store_dir)
        )


def lookups(rank, tokens) -> list:
    """The transfers of a lookup, of SGLang's own components."""
    from sglang.srt.mem_cache.unified_cache.components import LinkerTransferPhase

    keys = sgl.page_keys(tokens, rank.page)
    components = rank.tree._components_tuple
    return [one.build_external_linker_transfer(LinkerTransferPhase.LOOKUP, None, keys) for one in components]


def test_the_total_is_divided_by_all_ranks_of_the_server(store_dir, monkeypatch):
    """Under data-parallel attention a rank's group, whose prefix tree it shares, is a part of them."""
    from kvhoist._store_settings import StoreSettings

    divided, divide = [], StoreSettings.for_ranks
    monkeypatch.setattr(StoreSettings, "for_ranks", lambda self, ranks: (divided.append(ranks), divide(self, ranks))[1])
    extra = extra_config(store_dir, capacity_total="64MiB")
    del extra["capacity"]
    server = dict(tp_size=8, pp_size=1, dp_size=8, enable_dp_attention=True)
    Serving(MODELS["mha"], extra, **server).close()
    assert divided == [8]
