"""Random conversations of every kind of model under the linker, against what each component's own cache has: every
prefix that all of them can restore is offered, whatever ended before, and comes back with right bytes."""

from __future__ import annotations

import os
import random

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from sgl_linker import extra_config, tokens_of  # noqa: E402
from sgl_models import MODELS, WINDOW  # noqa: E402
from sgl_pages import same  # noqa: E402
from sgl_serving import Serving  # noqa: E402

PAGES, STEPS = 5, 40
#: Conversations of each kind of model; more of them by hand.
CONVERSATIONS = int(os.environ.get("KVHOIST_CONVERSATIONS", 1))


class Talks:
    """A server, and requests that come, go on, and end in any way."""

    def __init__(self, model: str, store_dir, dice, seat: dict) -> None:
        self.dice, self.geometry = dice, MODELS[model]
        self._make = lambda: Serving(self.geometry, extra_config(store_dir, **seat))
        self.rank = self._make()
        page = self.geometry.page_tokens
        self.prompts = [tokens_of(self.geometry, PAGES, 10_000 * (n + 1)) for n in range(3)]
        # One that begins as the first does.
        self.prompts.append(self.prompts[0][: 2 * page] + tokens_of(self.geometry, PAGES - 2, 77_000))

    def restorable(self, keys: list[str]) -> int:
        """The longest prefix of pages that every component has what it needs of."""
        has = {name: pages.cache.contains_each(keys) for name, pages in self.rank.linker._pages.items()}
        window = min(-(-WINDOW // self.rank.page), len(keys))
        lengths = [
            length
            for length in range(1, len(keys) + 1)
            if all(has["kv"][:length])
            and ("mamba" not in has or has["mamba"][length - 1])
            and ("swa" not in has or all(has["swa"][max(0, length - window) : length]))
        ]
        return max(lengths, default=0)

    def step(self, what: str) -> None:
        rank, dice, page = self.rank, self.dice, self.rank.page
        whole = dice.choice(self.prompts)
        tokens = whole[: dice.randint(1, PAGES) * page]
        req, result = rank.match(tokens)
        unlock = rank.lock(result)
        there = result.device_prefix_len // page
        found = self.restorable(sgl.page_keys(tokens, page)[there:])
        assert result.host_hit_length == found * page, what
        if found and dice.random() < 0.8:
            self.load(req, result, tokens[: (there + found) * page], there, what)
        elif not found and there * page < len(tokens):
            self.compute(result, tokens)
        unlock()
        rank.offloaded()

    def head(self, result):
        return self.rank.tree.path_device_indices(result.last_device_node)[: result.device_prefix_len]

    def compute(self, result, tokens) -> None:
        needs = len(tokens) - result.device_prefix_len
        if min(self.rank.free()[name] for name in self.rank.free() if name != "mamba") < needs:
            return
        if self.rank.free().get("mamba", 1):
            self.rank.compute(tokens, self.head(result))

    def load(self, req, result, tokens, there: int, what: str) -> None:
        """Admitted, and ended in a way that the dice choose."""
        rank, dice = self.rank, self.dice
        if rank.admit(req, result) == 0:
            # There is no place for it on the device.
            return
        places, way = rank.taken(req), dice.random()
        if way < 0.15:
            rank.tree.release_aborted_request(rank.modules.base.CacheRequestHandle(req.rid, 0))
            rank.given_back(*places)
            return
        rank.begin()
        for layer in rank.layers()[: dice.randint(0, len(rank.layers()))]:
            rank.linker.layer_done_counter.wait_until(layer)
        assert rank.finish(req) == [], what
        assert same(rank.bytes_of(*places), rank.expected(tokens, there)), what
        if way < 0.4:
            rank.given_back(*places)
            return
        head = self.head(result)
        rank.inserted(tokens, torch.cat((head, places[0])), len(head), places[1], req)

    def between(self) -> None:
        """What happens beside requests."""
        dice, rank = self.dice, self.rank
        if dice.random() < 0.35:
            rank.evict()
        if dice.random() < 0.15:
            pages = rank.linker._pages[dice.choice(list(rank.linker._pages))]
            pages.cache.remove(dice.choice(sgl.page_keys(dice.choice(self.prompts), rank.page)))
        if dice.random() < 0.05:
            rank.cleared()
        if dice.random() < 0.05:
            rank.close()
            self.rank = self._make()


@pytest.mark.parametrize("seat", [{}], ids=["own"])
@pytest.mark.parametrize("number", range(CONVERSATIONS))
@pytest.mark.parametrize("model", MODELS)
def test_whatever_happens_what_all_components_have_comes_back(store_dir, model, number, seat):
    talks = Talks(model, store_dir, random.Random(f"{model} {number}"), seat)
    try:
        for step in range(STEPS):
            talks.step(f"number {number}, step {step}")
            talks.between()
            assert not talks.rank.linker.stats()["failed"]
            assert all(pages.held <= pages.held_max for pages in talks.rank.linker._pages.values())
        talks.rank.linker.reset()
        talks.rank.settled(f"number {number}")
    finally:
        talks.rank.close()
