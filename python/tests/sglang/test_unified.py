"""SGLang's unified keys under the HiCache backend: servers of other topologies find each other's pages, where SGLang's
plan names them alike, and nowhere else."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_pages import filled, keys_for, noise, pages_of, same  # noqa: E402
from sgl_topology import LAYERS, PAGE, PAGES, Model, Rank, Server, extra_config  # noqa: E402

from kvhoist import ConfigError  # noqa: E402
from kvhoist.sglang.settings import backend_settings, key_scheme  # noqa: E402

has_keys = pytest.mark.skipif(sgl.version() < (0, 5, 23), reason="this version has no unified keys")


@pytest.fixture
def servers(store_dir):
    """Makes servers that are closed at the end, whatever happens."""
    made = []

    def make(*given, **more):
        made.append(Server(store_dir, *given, **more))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def node(store_dir):
    from nodes import Node

    with Node(store_dir / "node", host_bytes="64MiB", capacity="256MiB") as made:
        yield made


@has_keys
@pytest.mark.parametrize("reader", [1, 2, 4])
@pytest.mark.parametrize("writer", [1, 2, 4])
def test_any_number_of_ranks_finds_the_pages_of_any_other(servers, writer, reader):
    model, server = Model(), servers(writer)
    server.store(model)
    server.close()
    server = servers(reader)
    assert server.found(model) == [PAGES] * reader
    assert server.loads(model)


LAYOUTS = [("layer_first", None), ("page_first", None), ("page_first_direct", None), ("page_unified", None)]


@has_keys
@pytest.mark.parametrize("layout,pool", [*LAYOUTS, ("page_unified", {"head_group_num": 2})])
def test_bytes_are_the_same_in_every_layout(servers, layout, pool):
    """Written by a rank of another layout, and read by one: heads are cut on this side only."""
    model, server = Model(), servers(4)
    server.store(model)
    server.close()
    server = servers(2, layout=layout, pool=pool)
    assert server.found(model) == [PAGES] * 2 and server.loads(model)
    other = Model(2)
    other.keys = [key[::-1] for key in other.keys]
    server.store(other)
    server.close()
    assert servers(4).loads(other)


@has_keys
def test_a_chunk_is_what_sglangs_layout_says_it_is(servers):
    """The bytes on disk of one chunk are one span of a page in SGLang's own layout."""
    model, server = Model(), servers(2, layout="page_unified", pool={"head_group_num": 2})
    server.store(model)
    rank = server.ranks[1]
    layout = rank.pool.page_unified_layout
    page = rank.pool.kv_buffer[int(rank.places[3 * PAGE]) // PAGE].contiguous().view(torch.uint8).flatten()
    for group, chunk in enumerate(rank.backend._stores["kv"].parts()):
        start, nbytes = layout.chunk_span((0, LAYERS), group)
        assert chunk.cache.get(model.keys[3]) == page[start : start + nbytes].numpy().tobytes()


@has_keys
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_unified"])
def test_a_chunk_of_mla_is_its_layers_tokens_in_every_layout(store_dir, layout):
    pool = filled(sgl.MLA, layout)
    extra = extra_config(store_dir, layer_partition=2)
    backend = sgl.backend(sgl.MLA, pool, extra)
    keys, places = keys_for(sgl.MLA, 2), pool.alloc(3 * PAGE)[PAGE:]
    assert backend.batch_set_v1(keys, places) == [True, True]
    tokens = slice(int(places[PAGE]), int(places[PAGE]) + PAGE)
    buffer = pool.kv_buffer
    page = {
        "layer_first": lambda: buffer[:, tokens],
        "page_first": lambda: buffer[tokens].transpose(0, 1),
        "page_first_direct": lambda: buffer[tokens.start // PAGE],
        "page_unified": lambda: buffer[tokens.start // PAGE],
    }[layout]()
    chunks = backend._stores["kv"].parts()
    assert [part.name.partition("_")[2] for part in chunks] == ["L0-2", "L2-3"]
    for part, layers in zip(chunks, (slice(0, 2), slice(2, 3))):
        assert part.cache.get(keys[1]) == page[layers].contiguous().view(torch.uint8).numpy().tobytes()
    backend.close()


@has_keys
def test_stages_share_what_a_partition_of_layers_names_alike(servers):
    model, server = Model(), servers(2, 2, settings={"layer_partition": 1})
    server.store(model)
    server.close()
    server = servers(4, 1, settings={"layer_partition": 1})
    assert server.found(model) == [PAGES] * 4 and server.loads(model)
    server.close()
    # Without it each stage's own layers are a chunk, which another split has not.
    assert servers(4, 1).found(model) == [0] * 4


@has_keys
def test_what_one_rank_has_stored_is_no_page_of_a_rank_with_more_heads(servers):
    model, server = Model(), servers(4)
    assert all(server.ranks[0].store(model))
    server.close()
    server = servers(4)
    assert server.found(model) == [PAGES, 0, 0, 0]
    server.close()
    server = servers(2)
    assert server.found(model) == [0, 0]
    first = server.ranks[0]
    assert first.backend._stores["kv"].contains(model.keys) == [False] * PAGES
    assert first.backend.batch_get_v1(model.keys, first.places) == [False] * PAGES


@has_keys
def test_a_damaged_chunk_is_a_miss_where_it_is_read(servers, store_dir):
    model, server = Model(), servers(4)
    server.store(model)
    server.close()
    found = list(store_dir.rglob("*_H1/kvhoist.store"))
    assert len(found) == 1
    data = bytearray(found[0].read_bytes())
    # Page 2 of layer 0, K of head 1.
    at = data.find(model.whole[0, 0, 2 * PAGE, 1].contiguous().view(torch.uint8).numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    found[0].write_bytes(data)
    first, second = servers(2).ranks
    assert first.load(model) == [True, True, False, True, True] and second.load(model) == [True] * PAGES
    assert first.found(model) == 2 and second.found(model) == PAGES


DIFFERENT = {
    "head_group": dict(settings={"head_group": 2}),
    "model": dict(model_name="other"),
    "dtype": dict(dtype=torch.float16),
    "revision": dict(settings={"revision": "another"}),
    "ranks": dict(settings={"key_scheme": "ranks", "head_group": None}),
}


@has_keys
@pytest.mark.parametrize("change", DIFFERENT)
def test_nothing_else_is_shared(servers, change):
    model, server = Model(), servers(2)
    server.store(model)
    server.close()
    other = servers(2, **DIFFERENT[change])
    assert other.found(model) == [0, 0]
    other.close()
    assert servers(2).found(model) == [PAGES] * 2


@has_keys
def test_pools_of_bytes_are_told_apart_by_the_name_of_their_dtype(store_dir, monkeypatch):
    """All 8-bit floats are kept as bytes, and a byte is another number in each."""
    import sglang.srt.runtime_context as context

    model, found = Model(), {}
    for name in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"):
        args = SimpleNamespace(model_path="meta/tiny", kv_cache_dtype=name)
        monkeypatch.setattr(context, "get_server_args", lambda args=args: args, raising=False)
        for scheme in ("unified", "ranks"):
            extra = extra_config(store_dir, key_scheme=scheme, head_group=1 if scheme == "unified" else None)
            rank = Rank(extra, (0, 1), (0, 1), "page_first_direct", torch.float8_e5m2)
            assert rank.pool.dtype == torch.uint8
            found[scheme, name] = rank.found(model), all(rank.backend.batch_set_v1(model.keys, rank.places))
            rank.close()
    assert found == {
        (scheme, name): (PAGES if name == "fp8_e4m3" else 0, True)
        for scheme in ("unified", "ranks")
        for name in ("fp8_e4m3", "fp8_e5m2")
    }
    args = SimpleNamespace(model_path="meta/tiny", kv_cache_dtype="auto")
    monkeypatch.setattr(context, "get_server_args", lambda: args)
    with pytest.raises(ConfigError, match="kv_cache_dtype: found .auto., expected fp8_e4m3 or fp8_e5m2"):
        Rank(extra_config(store_dir), (0, 1), (0, 1), "page_first_direct", torch.float8_e5m2)


@has_keys
def test_two_topologies_share_one_service_at_the_same_time(servers, node):
    settings = {"service": node.socket, "capacity_total": "32MiB"}
    model, two, four = Model(), servers(2, settings=settings), servers(4, settings=settings)
    two.store(model)
    assert four.found(model) == [PAGES] * 4 and four.loads(model)
    other = Model(2)
    other.keys = [key[::-1] for key in other.keys]
    four.store(other)
    assert two.loads(other)


def _page_first(layers, page_tokens):
    """A pool of small heads, which a service can map, whose pages lie in as many pieces as those of so many layers."""
    geometry = sgl.Geometry(kind="mha", layers=layers, heads=1, head_dim=16, page_tokens=page_tokens)
    pool = sgl.host_pool(geometry, sgl.device_pool(geometry, 3), "page_first", allocator_type="shm")
    noise(pool, 1)
    return geometry, pool


@has_keys
@pytest.mark.parametrize("layers, pieces", [(36, 4608), (64, 8192)])
def test_pages_of_models_in_page_first_are_kept_by_a_service(store_dir, node, layers, pieces):
    geometry, pool = _page_first(layers, page_tokens=64)
    backend = sgl.backend(geometry, pool, extra_config(store_dir, service=node.socket, capacity_total="32MiB"))
    (chunk,) = backend._stores["kv"].parts()
    assert chunk.geometry.segments == pieces and not any(region.copied for region in chunk.regions)
    keys, places = keys_for(geometry, 2), pool.alloc(3 * 64)[64:]
    stored = pages_of(pool, places)
    assert backend.batch_set_v1(keys, places) == [True, True] and backend.batch_exists(keys) == 2
    noise(pool, 7)
    assert backend.batch_get_v1(keys, places) == [True, True] and same(pages_of(pool, places), stored)
    backend.close()


@has_keys
def test_pages_in_more_pieces_than_a_service_takes_are_refused(store_dir, node):
    geometry, pool = _page_first(layers=64, page_tokens=1024)
    words = "page_size: found 1024, expected a smaller one, or .*page_unified.* in 131072 pieces, .* takes 65536"
    with pytest.raises(ConfigError, match=words):
        sgl.backend(geometry, pool, extra_config(store_dir, service=node.socket, capacity_total="32MiB"))
    sgl.backend(geometry, pool, extra_config(store_dir)).close()


@has_keys
def test_what_sglang_cannot_name_is_refused_in_its_words(store_dir):
    def refused(words, tp=(0, 2), pp=(0, 1), layout="page_first_direct", settings=None, **more):
        with pytest.raises(ConfigError, match=words):
            Rank(extra_config(store_dir, **(settings or {})), tp, pp, layout, **more)

    refused("key_scheme: found .unified.*must divide this rank's 2", settings={"head_group": 4})
    refused("cannot derive a namespace at 1 kv head", tp=(0, 4), settings={"head_group": None})
    refused("context parallelism", attn_cp_size=2)
    refused("off the layer_partition=3 grid", pp=(0, 2), settings={"layer_partition": 3})
    refused("head_group: found 2, expected at most the pool's own groups of 1", layout="page_unified",
            pool={"head_group_num": 2}, settings={"head_group": 2})  # fmt: skip
    refused("hicache_mem_layout: found .page_head.", layout="page_head")
    refused("not in the grid", pool={"draft_buffer_infos": (_draft(),)})
    assert [path for path in store_dir.rglob("*") if path.is_file()] == []


@has_keys
@pytest.mark.parametrize("interface, found", [(None, "nothing"), (0, "0")])
def test_copies_of_pages_are_refused_beside_unified_keys(store_dir, interface, found):
    """SGLang would hand the backend tensors of pages, each of which would fail."""
    extra = extra_config(store_dir, interface_v1=interface)
    if interface is None:
        del extra["interface_v1"]
    with pytest.raises(ConfigError, match=f"^interface_v1: found {found}, expected 1 beside key_scheme"):
        Rank(extra, (0, 2), (0, 1), "page_first_direct")
    assert [path for path in store_dir.rglob("*") if path.is_file()] == []


@has_keys
def test_pages_that_lie_otherwise_on_the_device_are_refused(store_dir, monkeypatch):
    """SGLang copies them to the host as they are: heads and tokens would change places."""
    make = sgl.device_pool

    def hnd(*args):
        pool = make(*args)
        pool.kv_cache_layout, pool.use_hnd = "hnd", True
        return pool

    monkeypatch.setattr(sgl, "device_pool", hnd)
    with pytest.raises(ConfigError, match="found kv_cache_layout 'hnd', expected 'nhd'"):
        Rank(extra_config(store_dir), (0, 2), (0, 1), "page_first_direct")
    assert [path for path in store_dir.rglob("*") if path.is_file()] == []


def _draft():
    """A draft model's layer, behind those of the target."""
    geometry = sgl.Geometry(kind="mha", layers=1, heads=2, head_dim=64, page_tokens=PAGE)
    return sgl.device_pool(geometry, 2 * PAGES)._mha_buffer_info()


@has_keys
def test_other_pools_and_pages_in_tensors_are_refused(store_dir):
    rank = Rank(extra_config(store_dir), (0, 2), (0, 1), "page_first_direct")
    rank.backend.config.pool_shares["mamba"] = 0.2
    with pytest.raises(ConfigError, match="pool .mamba.*not in the grid"):
        rank.backend.register_mem_host_pool_v2(filled(sgl.MHA), "mamba")
    model = Model()
    page = rank.pool.get_dummy_flat_data_page()
    assert rank.backend.batch_set(model.keys[:1], [page]) is False and rank.backend.get(model.keys[0], page) is None
    assert rank.found(model) == 0
    rank.close()


@has_keys
def test_a_version_that_names_chunks_itself_is_followed(store_dir, servers, monkeypatch):
    """Later versions say in the storage's configuration what a rank's chunks are called."""
    import sglang.srt.runtime_context as context

    model, server = Model(), servers(2)
    server.store(model)
    names = [[part.name.removeprefix("kv-") for part in rank.backend._stores["kv"].parts()] for rank in server.ranks]
    assert [len(of_rank) for of_rank in names] == [2, 2] and len(set(sum(names, []))) == 4
    server.close()
    extra = extra_config(store_dir, key_scheme="ranks", head_group=None, capacity_total="64MiB")

    def attached(told, **grid):
        config = sgl.storage_config(sgl.MHA, dict(extra), tp_rank=1, tp_size=2)
        config.unified_suffixes = told
        geometry = sgl.Geometry(kind="mha", layers=LAYERS, heads=2, head_dim=64, page_tokens=PAGE)
        host = sgl.host_pool(geometry, sgl.device_pool(geometry, PAGES), "page_first_direct")
        args = SimpleNamespace(model_path="meta/tiny", **grid)
        monkeypatch.setattr(context, "get_server_args", lambda: args, raising=False)
        backend = sgl.boot().factory.create_backend("dynamic", config, host)
        backend.register_mem_pool_host(host)
        backend.on_host_pools_registered()
        return backend

    backend = attached(names[1], hicache_storage_head_group=1)
    assert backend.batch_exists(model.keys) == PAGES
    backend.close()
    with pytest.raises(ConfigError, match="found chunks .*_H0.*expected .*_H2"):
        attached(names[0], hicache_storage_head_group=1)
    with pytest.raises(ConfigError, match="found chunks"):
        attached(names[1])


def test_settings_of_the_grid(store_dir):
    extra = extra_config(store_dir, layer_partition="2")
    assert key_scheme(extra) == (True, 1, 2) and key_scheme({}) == key_scheme(None) == (False, None, None)
    assert backend_settings(extra, {}).path == [str(store_dir)]
    for wrong, name in (
        ({"key_scheme": "mine"}, "key_scheme"), ({"key_scheme": "ranks"}, "head_group"), ({"head_group": 0}, "head_group"),
        ({"layer_partition": "x"}, "layer_partition"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{name}: found") as raised:
            backend_settings({**extra, **wrong}, {})
        assert raised.value.field == name


@pytest.mark.skipif(sgl.version() >= (0, 5, 23), reason="this version has unified keys")
def test_a_version_without_unified_keys_is_refused_by_its_number(store_dir, monkeypatch):
    sgl.boot()
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.17", raising=False)
    with pytest.raises(ConfigError, match="sglang 0.5.17: it has no unified keys.*0.5.23 has"):
        sgl.backend(sgl.MHA, filled(sgl.MHA), extra_config(store_dir))
