"""One rank of a server, in a process of its own: SGLang's factory and host pool over the backend.

Takes commands from a pipe and answers each. What it imports is imported once, by the process that ranks are forked from.
"""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import sgl
import torch

sgl.boot()


def main(pipe, given) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    geometry = sgl.Geometry(**given["geometry"])
    if given["dp_attention"]:
        sys.modules["sglang.srt.layers.dp_attention"].is_dp_attention_enabled = lambda: True
    pool = sgl.host_pool(geometry, sgl.device_pool(geometry, 16), "page_first_direct", allocator_type="shm")
    fields = {"tp_rank": given["tp_rank"], "tp_size": given["tp_size"]}
    backend = sgl.backend(geometry, pool, given["extra"], **fields)
    rank = Rank(SimpleNamespace(**given, pipe=pipe), pool, backend)
    pipe.send("ready")
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(rank, name)(*arguments))


class Rank:
    def __init__(self, given, pool, backend) -> None:
        self.given, self.pool, self.backend = given, pool, backend
        self.keys = sgl.page_keys(list(range(12 * pool.page_size)), pool.page_size)
        self.indices = pool.alloc(12 * pool.page_size)

    def _raw(self, tensor):
        return tensor.reshape(-1).view(torch.uint8)

    def _page(self, n):
        """What page `n` holds: on every rank the same for MLA, its own heads for MHA."""
        own = 0 if self.given.geometry["kind"] == "mla" else 1000 * self.given.tp_rank
        page = self.pool.get_dummy_flat_data_page()
        self._raw(page).random_(0, 256, generator=torch.Generator().manual_seed(1 + own + n))
        return page

    def set(self):
        for n in range(12):
            self.pool.set_from_flat_data_page(int(self.indices[n * self.pool.page_size]), self._page(n))
        return self.backend.batch_set_v1(self.keys, self.indices)

    def exists(self):
        return self.backend.batch_exists(self.keys)

    def get(self):
        """How many pages came; -1 where one has wrong bytes."""
        self._raw(self.pool.kv_buffer).zero_()
        there = self.backend.batch_get_v1(self.keys, self.indices)
        for n in range(12):
            found = self._raw(self.pool.get_data_page(int(self.indices[n * self.pool.page_size])))
            if there[n] and not torch.equal(found, self._raw(self._page(n))):
                return -1
        return sum(there)

    def churn(self, rounds):
        """Gets and sets; what came, least and most."""
        found = []
        for n in range(rounds):
            self.given.pipe.send("next")
            found.append(self.get())
            if n % 3 == 0:
                self.set()
        return [min(found), max(found)]

    def copied(self):
        return [self.backend._stores["kv"].goes_straight(), [r.copied for r in self.backend._stores["kv"].regions]]

    def space(self):
        return self.backend._stores["kv"].namespace()

    def stats(self):
        return self.backend._stores["kv"].cache.stats()

    def close(self):
        self.backend.close()
        return True
