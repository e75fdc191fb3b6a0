"""Models with several components under the linker: full attention, sliding windows and Mamba states in SGLang's own
entries of device pools, over tensors on the CPU."""

from __future__ import annotations

import random
import sys
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

import kvhoist  # noqa: E402
from kvhoist import Cache  # noqa: E402

PAGE, WINDOW, SLOTS = 4, 8, 64
#: Layers 0 and 3 attend to all tokens, 1 to a window, 2 has a state.
LAYERS = 4


class Hybrid:
    """A linker over pools of three components, driven as SGLang's wrapper does."""

    def __init__(self, path, monkeypatch, **settings) -> None:
        sgl_linker.boot()
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup

        import kvhoist.sglang.linker as module

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


def chain(first: int, pages: int) -> list[str]:
    return sgl.page_keys(list(range(first, first + pages * PAGE)), PAGE)


def test_of_a_node_the_last_state_is_stored(hybrid):
    hybrid.fill(0, 6, 1, seed=4)
    transfers = hybrid.transfers(KEYS, (0, 1))
    mamba = transfers[-1]
    mamba.keys, mamba.device_indices = list(KEYS), torch.arange(1, 7)
    assert hybrid.offload(transfers)
    assert [key for key in KEYS if hybrid.linker._pages["mamba"].cache.contains(key)] == KEYS[-1:]
    assert hybrid.linker.lookup("a", hybrid.transfers(KEYS)) == [6]


def small(path, monkeypatch) -> tuple:
    """A linker with few places for states, and how many."""
    made = Hybrid(path, monkeypatch, capacity="42MiB", host_bytes="8MiB", pool_shares={"mamba": 0.03})
    return made, made.linker._pages["mamba"].cache.stats()["tiers"]["disk"]["slots"]


def turns(hybrid, keys, first: int, last: int) -> None:
    """Offloads a node of one page for each turn of a conversation."""
    for at in range(first, last):
        hybrid.fill(0, 1, 1, seed=at)
        assert hybrid.offload(hybrid.transfers(keys[at : at + 1], (0, 1)))


def restore(hybrid, rid: str, keys) -> None:
    """A request that comes for a prefix."""
    assert max(hybrid.linker.lookup(rid, hybrid.transfers(keys))) == len(keys)
    assert hybrid.linker.load(rid, hybrid.transfers(keys, (8, 2)))
    assert hybrid.linker.finish_layer_wise_loading(hybrid.linker.start_layer_wise_loading())


@pytest.mark.parametrize("shared", [False, True])
def test_states_inside_a_conversation_go_before_its_last_and_before_others(store_dir, monkeypatch, shared):
    hybrid, slots = small(store_dir, monkeypatch)
    try:
        assert 4 <= slots <= 8
        # What a lookup keeps for its request alone would protect it as well.
        monkeypatch.setattr(sys.modules["kvhoist.sglang.linker"], "HELD_S", 0.0)
        monkeypatch.setattr(Cache, "keep", lambda *_given: 0)
        other, talk, late = chain(90_000, 1), chain(10_000, slots - 1), chain(50_000, slots - 2)
        turns(hybrid, other, 0, 1)
        turns(hybrid, talk, 0, slots - 1)
        if shared:
            # Another conversation begins with the first turn of this one.
            restore(hybrid, "b", talk[:1])
        restore(hybrid, "a", talk)
        hybrid.linker.reset()
        turns(hybrid, late, 0, slots - 2)
        there = [hybrid.linker._pages["mamba"].cache.contains(key) for key in other + talk]
        inside = list(range(1, slots - 1))
        # With the first turn still wanted, the next to go is what was not used for the longest time.
        gone = [0, *inside[1:]] if shared else inside
        assert [at for at, present in enumerate(there) if not present] == gone
    finally:
        hybrid.linker.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_restore_what_every_component_has(store_dir, monkeypatch, seed):
    """Against a model that asks each component's own cache, while states are evicted, and pages of any component go."""
    dice = random.Random(seed)
    hybrid, slots = small(store_dir, monkeypatch)
    window = WINDOW // PAGE
    try:
        talks = [chain(10_000 * (n + 1), 5) for n in range(3)]
        # One that begins as the first does.
        talks.append(talks[0][:2] + chain(70_000, 3))
        known = dict.fromkeys(range(len(talks)), 0)
        for step in range(60):
            number = dice.randrange(len(talks))
            keys, end = talks[number], known[number]
            if end < len(keys) and dice.random() < 0.6:
                turns(hybrid, keys, end, end + 1)
                known[number] += 1
                continue
            if end and dice.random() < 0.2:
                hybrid.linker._pages[dice.choice(["kv", "swa", "mamba"])].cache.remove(dice.choice(keys[:end]))
            asked = keys[: dice.randint(1, len(keys))]
            has = {name: pages.cache.contains_each(asked) for name, pages in hybrid.linker._pages.items()}
            want = [
                pages
                for pages in range(1, len(asked) + 1)
                if all(has["kv"][:pages])
                and has["mamba"][pages - 1]
                and all(has["swa"][max(0, pages - min(window, len(asked))) : pages])
            ]
            found = hybrid.linker.lookup(f"request {dice.randrange(3)}", hybrid.transfers(asked))
            assert found == want, f"seed {seed}, step {step}"
        hybrid.linker.reset()
        assert len(hybrid.linker._pages["mamba"].cache) <= slots
        assert not hybrid.linker.stats()["failed"]
    finally:
        hybrid.linker.close()


def test_components_share_one_capacity(store_dir, monkeypatch):
    made = Hybrid(store_dir, monkeypatch, pool_shares={"mamba": 0.5})
    try:
        of = {name: pages.cache.stats()["tiers"]["host"]["slots"] for name, pages in made.linker._pages.items()}
        nbytes = {name: slots * made.linker._pages[name].cache.block_bytes for name, slots in of.items()}
        assert 3.6 < nbytes["mamba"] / (1 << 20) <= 4
        assert all(1.6 < nbytes[name] / (1 << 20) <= 2 for name in ("kv", "swa")), "equal parts of the rest"
    finally:
        made.linker.close()


def test_components_share_one_write_budget(store_dir, monkeypatch):
    budget = {"write_policy": "by_value", "write_budget": "1GiB"}
    made = Hybrid(store_dir, monkeypatch, pool_shares={"mamba": 0.5}, **budget)
    try:
        found = {name: written_a_day(pages.cache) for name, pages in made.linker._pages.items()}
        assert found == {"kv": 1 << 28, "swa": 1 << 28, "mamba": 1 << 29}
    finally:
        made.linker.close()


def written_a_day(cache) -> float:
    """The write budget of a cache."""
    samples = dict((metric.name, samples) for metric, samples in kvhoist.metrics.samples([cache]))
    (sample,) = samples["kvhoist_write_budget_bytes"]
    return sample.value
