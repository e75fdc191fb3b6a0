"""Random conversations of two ranks that share pages in a node's service, which is killed and started again amid them:
what it has acknowledged comes back, with right bytes, and nothing of a request is left in it."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager

import pytest
import sgl

why = sgl.missing()
if why:
    pytest.skip(why, allow_module_level=True)
if sgl.version() < (0, 5, 23):
    pytest.skip(f"sglang {sgl.version()} has no external linker, expected 0.5.23 or later", allow_module_level=True)

torch = pytest.importorskip("torch")

from nodes import Node, await_  # noqa: E402
from sgl_linker import broadcast, extra_config  # noqa: E402
from sgl_models import MODELS  # noqa: E402
from sgl_pages import same  # noqa: E402
from sgl_serving import Serving  # noqa: E402
from sgl_talks import Talks  # noqa: E402

STEPS = 16
#: Conversations of each kind of model; more of them by hand.
CONVERSATIONS = int(os.environ.get("KVHOIST_CONVERSATIONS", 1))

#: Host memory of each kind of model: so little that the pins of a request or two are all that the service gives.
HOST_BYTES = {"mha": 768, "mla": 1344, "dsa": 1920, "swa": 192, "mamba": 192, "mamba_swa": 288}


class Shared:
    """The service, and what it must have."""

    def __init__(self, node: Node, dice) -> None:
        self.node, self.dice, self.talks = node, dice, []
        self.alive, self.troubles = True, 0
        #: Pages that the service has acknowledged and nobody has removed, by space.
        self.acknowledged: dict[str, set[str]] = {}

    def watch(self, rank) -> Serving:
        """Notes what the service acknowledges to a rank."""
        for pages in rank.linker._pages.values():
            pages.store = lambda keys, rows, pages=pages: self._stored(pages, keys, rows)
        return rank

    def _stored(self, pages, keys, rows) -> list:
        results = type(pages).store(pages, keys, rows)
        known = self.acknowledged.setdefault(pages.cache.namespace, set())
        known.update(key for key, result in zip(keys, results) if result is True)
        return results

    def kill(self) -> None:
        self.troubles, self.alive = self.troubles + 1, False
        self.node.kill()

    @contextmanager
    def killed_amid(self):
        """The service is killed, and has answered nothing meanwhile."""
        self.troubles, self.alive = self.troubles + 1, False
        with self.node.hanging():
            yield
            self.node.process.kill()
        self.node.kill()

    def start(self) -> None:
        """Starts the service again, and waits until its clients have found it."""
        self.node.start()
        self.alive = True
        for pages in self._all_pages():
            await_(lambda pages=pages: pages.cache.connected, "a client to connect again")
            pages.cache._pause.end()
        self.check()

    def perhaps(self) -> None:
        """Between any two steps of requests."""
        if not self.alive and self.dice.random() < 0.5:
            self.start()
        elif self.alive and self.dice.random() < 0.03:
            self.kill()

    def check(self) -> None:
        """What was acknowledged is there."""
        for pages in self._all_pages():
            keys = sorted(self.acknowledged.get(pages.cache.namespace, ()))
            assert all(pages.cache.contains_each(keys)), f"component {pages.name}"

    def removing(self) -> None:
        """No store is under way, so that what is removed is not acknowledged behind it."""
        self.troubles += 1
        for talks in self.talks:
            talks.rank.linker._offloads.join()

    def pins_are_free(self) -> None:
        """A client is given all the pins of each space."""
        for pages in self.talks[0].rank.linker._pages.values():
            keys = self.acknowledged.get(pages.cache.namespace, set())
            in_host = [key for key in sorted(keys) if pages.cache.tiers([key]) == ["host"]]
            held = pages.cache.hold(in_host, len(in_host))
            assert len(held) == min(len(in_host), pages.held_max), f"component {pages.name}: others hold pages"
            held.release()

    def _all_pages(self) -> list:
        return [pages for talks in self.talks for pages in talks.rank.linker._pages.values()]


class SharedTalks(Talks):
    """Conversations of a rank whose pages the service has."""

    def __init__(self, make, dice, shared: Shared) -> None:
        self.shared = shared
        super().__init__(lambda: shared.watch(make()), dice)
        shared.talks.append(self)

    def troubles(self) -> int:
        return self.shared.troubles

    def beginning(self):
        shared = self.shared
        kills = shared.alive and self.dice.random() < 0.1
        return shared.killed_amid() if kills else super().beginning()

    def between(self) -> None:
        if not self.shared.alive:
            self.shared.start()
        super().between()

    def remove(self, pages, key: str) -> None:
        self.shared.removing()
        self.shared.acknowledged.get(pages.cache.namespace, set()).discard(key)
        pages.cache.remove(key)

    def all_there(self) -> None:
        """Every prompt comes back as far as its pages were acknowledged."""
        self.rank.evict()
        for tokens in self.prompts:
            length = self.restorable(self.keys(tokens)) * self.rank.page
            found = self.rank.restored(tokens[:length]) if length else None
            assert not length or (found and same(found, self.rank.expected(tokens[:length])))


def maker(model: str, rank: int, extra: dict):
    """Starts one of two ranks: of a model whose pools are replicated, the first one stores."""
    replicated = model in ("mla", "dsa")

    def make():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: replicated)
            patch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
            patch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
            patch.setattr(torch.distributed, "broadcast_object_list", broadcast)
            return Serving(MODELS[model], extra)

    return make


def take_turns(talks: list, shared: Shared, what: str) -> None:
    """A request of each rank, both at once."""
    running = {one: one.step(f"{what}, rank {at}") for at, one in enumerate(talks)}
    while running:
        one = shared.dice.choice(list(running))
        if next(running[one], one) is one:
            del running[one]
            one.between()
            one.check()
        shared.perhaps()


@pytest.mark.parametrize("number", range(CONVERSATIONS))
@pytest.mark.parametrize("model", MODELS)
def test_what_a_service_has_acknowledged_comes_back_whatever_happens(store_dir, model, number):
    dice = random.Random(f"service {model} {number}")
    with Node(store_dir, capacity="512MiB", host_bytes="32MiB") as node:
        shared = Shared(node, dice)
        extra = extra_config(store_dir, service=node.socket, host_bytes=HOST_BYTES[model] << 10)
        try:
            talks = [SharedTalks(maker(model, rank, extra), dice, shared) for rank in range(2)]
            for step in range(STEPS):
                take_turns(talks, shared, f"number {number}, step {step}")
            if not shared.alive:
                shared.start()
            shared.check()
            for one in talks:
                one.ended(f"number {number}")
                one.all_there()
                one.ended(f"number {number}")
            shared.pins_are_free()
        finally:
            for one in shared.talks:
                one.rank.close()
