"""Random conversations of a server's rank under the linker, against what each component's store has."""

from __future__ import annotations

from contextlib import nullcontext

import sgl
import torch
from sgl_linker import tokens_of
from sgl_models import WINDOW
from sgl_pages import same
from sgl_serving import Serving

PAGES = 5


class Talks:
    """A rank, and requests that come, go on, and end in any way."""

    def __init__(self, make, dice) -> None:
        """`make` starts the server's rank, at first and again."""
        self.dice, self._make = dice, make
        self.rank: Serving = make()
        geometry = self.rank.geometry
        self.prompts = [tokens_of(geometry, PAGES, 10_000 * (n + 1)) for n in range(3)]
        # One that begins as the first does.
        self.prompts.append(self.prompts[0][: 2 * geometry.page_tokens] + tokens_of(geometry, PAGES - 2, 77_000))

    def troubles(self) -> int:
        """Counts what may end a load that is under way: none of a store that is the rank's own."""
        return 0

    def beginning(self):
        """What happens while a load begins."""
        return nullcontext()

    def keys(self, tokens) -> list[str]:
        return self.rank.linker._named(sgl.page_keys(tokens, self.rank.page))

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

    def step(self, what: str):
        """One request. Yields where others of the node have their turn."""
        rank, dice, page = self.rank, self.dice, self.rank.page
        whole = dice.choice(self.prompts)
        tokens = whole[: dice.randint(1, PAGES) * page]
        least = self.restorable(self.keys(tokens))
        troubles = self.troubles()
        req, result = rank.match(tokens)
        unlock = rank.lock(result)
        there = result.device_prefix_len // page
        found, most = result.host_hit_length // page, self.restorable(self.keys(tokens)[there:])
        # Others may store meanwhile.
        assert (least - there if there < least else 0) <= found <= most, f"{what}: {least}, {there}, {found}, {most}"
        yield
        if found and dice.random() < 0.8:
            yield from self.load(req, result, tokens[: (there + found) * page], there, troubles, what)
        elif not found and there * page < len(tokens):
            self.compute(result, tokens)
        yield
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

    def load(self, req, result, tokens, there: int, troubles: int, what: str):
        """Admitted, and ended in a way that the dice choose."""
        rank, dice = self.rank, self.dice
        if rank.admit(req, result) == 0:
            # There is no place for it on the device.
            return
        places, way = rank.taken(req), dice.random()
        yield
        if way < 0.15:
            rank.tree.release_aborted_request(rank.modules.base.CacheRequestHandle(req.rid, 0))
            rank.given_back(*places)
            return
        with self.beginning():
            rank.begin()
        for layer in rank.layers()[: dice.randint(0, len(rank.layers()))]:
            rank.linker.layer_done_counter.wait_until(layer)
            yield
        if rank.finish(req):
            assert self.troubles() != troubles, f"{what}: aborted, and nothing has happened"
            rank.given_back(*places)
            return
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
            self.remove(pages, dice.choice(self.keys(dice.choice(self.prompts))))
        if dice.random() < 0.05:
            rank.cleared()
        if dice.random() < 0.05:
            rank.close()
            self.rank = self._make()

    def remove(self, pages, key: str) -> None:
        pages.cache.remove(key)

    def check(self) -> None:
        """What holds between requests."""
        linker = self.rank.linker
        assert self.troubles() or not linker.stats()["failed"]
        assert all(pages.held <= pages.held_max for pages in linker._pages.values())

    def ended(self, what: str) -> None:
        """Nothing is left of any request."""
        self.rank.let_go()
        self.rank.settled(what)
