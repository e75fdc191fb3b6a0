"""Models with several components under the linker: full attention, sliding windows and Mamba states in SGLang's own
entries of device pools, over tensors on the CPU."""

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

import sgl_linker  # noqa: E402

PAGE, WINDOW, SLOTS = 4, 8, 64
#: Layers 0 and 3 attend to all tokens, 1 to a window, 2 has a state.
LAYERS = 4


class Hybrid:
    """A linker over pools of three components, driven as SGLang's wrapper does."""

    def __init__(self, path, monkeypatch, **settings) -> None:
        sgl_linker.boot()
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup

        import kvhoist.sglang_linker as module

        self._transfer, self._policy, self.names = PoolTransfer, PoolHitPolicy, PoolName
        tensors = lambda count, width: [torch.zeros(SLOTS, width, dtype=torch.uint8) for _ in range(count)]  # noqa: E731
        self.full, self.indexer, self.windowed = tensors(4, 1024), tensors(2, 512), tensors(2, 512)
        self.states = tensors(1, 40_000)
        entry = lambda name, source, buffers, layers, page, rows: DevicePoolEntry(  # noqa: E731
            name=name, indices_from_pool=source, device_pool=None, components=[buffers], layer_mapping=layers,
            page_size=page, rows_are_pages=rows,
        )  # fmt: skip
        group = DevicePoolGroup(
            [
                entry(PoolName.KV, PoolName.KV, self.full, {0: (0, 2), 3: (1, 3)}, PAGE, False),
                entry(PoolName.INDEXER, PoolName.KV, self.indexer, {0: 0, 3: 1}, PAGE, True),
                entry(PoolName.SWA, PoolName.SWA, self.windowed, {1: (0, 1)}, PAGE, False),
                entry(PoolName.MAMBA, PoolName.MAMBA, self.states, {2: 0}, 1, True),
            ],
            LAYERS, PAGE,
        )  # fmt: skip
        monkeypatch.setattr(module, "pools_of", lambda *_given: group)
        self.counters = []
        params = SimpleNamespace(
            page_size=PAGE, sliding_window_size=WINDOW, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
            req_to_token_pool=SimpleNamespace(register_layer_transfer_counter=self.counters.append),
        )  # fmt: skip
        self.linker = module.KvhoistLinker(
            SimpleNamespace(model_path="hybrid"), params, components=set(),
            extra_config=sgl_linker.extra_config(path, **settings),
        )  # fmt: skip

    def transfers(self, keys, places=None, window=None) -> list:
        """Of a prompt's pages: all of KV, the window, the last state. `places`: first page, and the state's slot."""
        window = WINDOW // PAGE if window is None else window
        tail = keys[-window:]
        named = [(self.names.KV, keys), (self.names.SWA, tail), (self.names.MAMBA, keys[-1:])]
        made = []
        for name, of in named:
            indices = None
            if places is not None and name == self.names.MAMBA:
                indices = torch.tensor([places[1]])
            elif places is not None:
                first = (places[0] + len(keys) - len(of)) * PAGE
                indices = torch.arange(first, first + len(of) * PAGE)
            policy = self._policy.ALL_PAGES if name == self.names.KV else self._policy.TRAILING_PAGES
            made.append(self._transfer(name=name, keys=list(of), device_indices=indices, hit_policy=policy))
        return made

    def fill(self, first: int, pages: int, state: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for pool in (self.full, self.windowed):
            for buffer in pool:
                buffer[first * PAGE : (first + pages) * PAGE].random_(0, 256, generator=generator)
        for buffer in self.indexer:
            buffer[first : first + pages].random_(0, 256, generator=generator)
        self.states[0][state].random_(0, 256, generator=generator)

    def offload(self, transfers) -> bool:
        assert self.linker.offload(transfers)
        self.linker._offloads.join()
        return self.linker.pop_completed_offload()


@pytest.fixture
def hybrid(store_dir, monkeypatch):
    made = Hybrid(store_dir, monkeypatch)
    yield made
    made.linker.close()


KEYS = sgl.page_keys(list(range(6 * PAGE)), PAGE)


def test_a_prefix_is_a_hit_where_every_component_has_what_it_needs(hybrid):
    hybrid.fill(0, 6, 1, seed=1)
    assert hybrid.counters == [hybrid.linker.layer_done_counter]
    # A node of four pages, then one of two.
    assert hybrid.offload(hybrid.transfers(KEYS[:4], (0, 1), window=4))
    assert hybrid.offload(hybrid.transfers(KEYS[4:], (4, 1)))
    pages = hybrid.linker._pages
    assert [len(pages[name].cache) for name in ("kv", "swa", "mamba")] == [6, 4, 2], "two windows, two states"
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == [4, 6]
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS[:5])) == [4]
    # Without its state a boundary is none, and without a page of its window.
    pages["mamba"].cache.remove(KEYS[5])
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == [4]
    pages["swa"].cache.remove(KEYS[2])
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == []
    pages["kv"].cache.remove(KEYS[0])
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == []


def test_layers_of_all_components_come_back_in_order(hybrid):
    hybrid.fill(0, 6, 1, seed=2)
    assert hybrid.offload(hybrid.transfers(KEYS, (0, 1), window=6))
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == [6]
    assert hybrid.linker.load("a", hybrid.transfers(KEYS, (8, 2)))
    counter = hybrid.linker.layer_done_counter
    counter.set_consumer(hybrid.linker.start_layer_wise_loading())
    tokens = slice(0, 6 * PAGE), slice(8 * PAGE, 14 * PAGE)
    window = slice(4 * PAGE, 6 * PAGE), slice(12 * PAGE, 14 * PAGE)
    wanted = {
        0: [(hybrid.full[0], *tokens), (hybrid.full[2], *tokens), (hybrid.indexer[0], slice(0, 6), slice(8, 14))],
        1: [(buffer, *window) for buffer in hybrid.windowed],
        2: [(hybrid.states[0], slice(1, 2), slice(2, 3))],
        3: [(hybrid.full[1], *tokens), (hybrid.full[3], *tokens), (hybrid.indexer[1], slice(0, 6), slice(8, 14))],
    }
    # A wait for a layer is one for all before it: Mamba's pools ask for the last one only.
    counter.wait_until(2)
    for layer in (0, 1, 2):
        for buffer, there, here in wanted[layer]:
            assert torch.equal(buffer[there], buffer[here]), f"layer {layer}"
    counter.wait_until(3)
    for buffer, there, here in wanted[3]:
        assert torch.equal(buffer[there], buffer[here])
    # No page before the window was touched.
    assert not any(buffer[8 * PAGE : 12 * PAGE].any() for buffer in hybrid.windowed)
    assert hybrid.linker.finish_layer_wise_loading(counter.consumer_index)
    assert hybrid.linker.stats()["linker"]["layers_waited_for"] == LAYERS
    assert hybrid.linker.finish_layer_wise_loading(counter.consumer_index), "again: nothing is under way"


def test_a_component_that_is_bad_fails_its_batch(hybrid):
    hybrid.fill(0, 6, 1, seed=3)
    assert hybrid.offload(hybrid.transfers(KEYS, (0, 1)))
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == [6]
    hybrid.linker._pages["mamba"].cache.clear()
    assert hybrid.linker.load("a", hybrid.transfers(KEYS, (8, 2)))
    index = hybrid.linker.start_layer_wise_loading()
    assert not hybrid.linker.finish_layer_wise_loading(index)
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == []


def test_components_share_one_capacity(store_dir, monkeypatch):
    made = Hybrid(store_dir, monkeypatch, pool_shares={"mamba": 0.5})
    try:
        of = {name: pages.cache.stats()["tiers"]["host"]["slots"] for name, pages in made.linker._pages.items()}
        nbytes = {name: slots * made.linker._pages[name].cache.block_bytes for name, slots in of.items()}
        assert 3.6 < nbytes["mamba"] / (1 << 20) <= 4
        assert all(1.6 < nbytes[name] / (1 << 20) <= 2 for name in ("kv", "swa")), "equal parts of the rest"
    finally:
        made.linker.close()
