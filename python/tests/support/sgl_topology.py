"""Servers of one model with other numbers of ranks: each rank has its layers and heads, in pools of SGLang's own."""

from __future__ import annotations

import sgl
import torch
from sgl_pages import noise

PAGE, HEADS, LAYERS, DIM, PAGES = 16, 4, 4, 64, 5


class Model:
    """What the pages of a prompt hold, of all layers and heads: K and V, layer, token, head, dim."""

    def __init__(self, seed: int = 1) -> None:
        shape = (2, LAYERS, PAGES * PAGE, HEADS, DIM)
        whole = torch.empty(shape, dtype=torch.bfloat16)
        whole.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
        self.whole, self.keys = whole, sgl.page_keys(list(range(PAGES * PAGE)), PAGE)


class Rank:
    """One rank of a server: its host pool, with the backend attached."""

    def __init__(
        self, extra: dict, tp: tuple, pp: tuple, layout: str, dtype=torch.bfloat16, pool=None, **fields
    ) -> None:
        (tp_rank, tp_size), (pp_rank, pp_size) = tp, pp
        heads, layers = HEADS // tp_size, LAYERS // pp_size
        self.layers = slice(pp_rank * layers, (pp_rank + 1) * layers)
        self.heads = slice(tp_rank * heads, (tp_rank + 1) * heads)
        geometry = sgl.Geometry(
            kind="mha", layers=layers, heads=heads, head_dim=DIM, page_tokens=PAGE, first=self.layers.start
        )
        self.device = sgl.device_pool(geometry, 2 * PAGES, dtype)
        self.pool = sgl.host_pool(geometry, self.device, layout, **(pool or {}))
        noise(self.pool, 99)
        # Not the first pages of the pool.
        self.pool.alloc(2 * PAGE)
        self.places = self.pool.alloc(PAGES * PAGE)
        ranks = dict(tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)
        self.backend = sgl.backend(geometry, self.pool, extra, **{**ranks, **fields})

    def store(self, model: Model) -> list[bool]:
        self._to_pool(model.whole[:, self.layers, :, self.heads])
        return self.backend.batch_set_v1(model.keys, self.places)

    def found(self, model: Model) -> int:
        return self.backend.batch_exists(model.keys)

    def load(self, model: Model) -> list[bool]:
        """Which pages came, all with the right bytes."""
        noise(self.pool, 7)
        there = self.backend.batch_get_v1(model.keys, self.places)
        got, want = self._from_pool(), model.whole[:, self.layers, :, self.heads]
        for page, came in enumerate(there):
            at = slice(page * PAGE, (page + 1) * PAGE)
            same = torch.equal(
                got[:, :, at].contiguous().view(torch.uint8), want[:, :, at].contiguous().view(torch.uint8)
            )
            assert same or not came, f"page {page} came with other bytes"
        return there

    # By SGLang's own copies and definitions of its layouts.

    def _to_pool(self, values) -> None:
        layout, pool, tokens = self.pool.layout, self.pool, torch.arange(PAGES * PAGE) + PAGE
        if layout in ("layer_first", "page_first_direct"):
            for layer in range(values.shape[1]):
                self.device.k_buffer[layer][tokens] = values[0, layer]
                self.device.v_buffer[layer][tokens] = values[1, layer]
            pool.backup_from_device_all_layer(self.device, self.places, tokens, "direct")
            return
        for page in range(PAGES):
            pages = values[:, :, page * PAGE : (page + 1) * PAGE]
            at = int(self.places[page * PAGE])
            if layout == "page_first":
                pool.set_from_flat_data_page(at, pages.transpose(1, 2).contiguous().flatten())
            else:
                pool.kv_buffer[at // PAGE] = self._grouped(pages)

    def _from_pool(self):
        layout, pool, tokens = self.pool.layout, self.pool, torch.arange(PAGES * PAGE) + PAGE
        if layout in ("layer_first", "page_first_direct"):
            layers = range(self.layers.stop - self.layers.start)
            for layer in layers:
                pool.load_to_device_per_layer(self.device, self.places, tokens, layer, "direct")
            buffers = self.device.k_buffer, self.device.v_buffer
            return torch.stack([torch.stack([of[layer][tokens] for layer in layers]) for of in buffers])
        found = []
        for at in map(int, self.places[::PAGE]):
            if layout == "page_first":
                found.append(pool.get_data_page(at, flat=False).transpose(1, 2))
            else:
                # head group, layer, K or V, token, head, dim
                found.append(pool.kv_buffer[at // PAGE].permute(2, 1, 3, 0, 4, 5).flatten(3, 4))
        return torch.cat(found, dim=2)

    def _grouped(self, pages):
        """A page in the order that PageUnifiedLayout documents."""
        dims = self.pool.page_unified_layout
        grouped = pages.unflatten(3, (dims.head_group_num, dims.heads_per_group)).permute(3, 1, 0, 2, 4, 5).contiguous()
        assert grouped.shape == dims.page_dims(1)[1:]
        return grouped

    def close(self) -> None:
        self.backend.close()


def extra_config(path, **more) -> dict:
    extra = sgl.extra_config(path, **{"key_scheme": "unified", "head_group": 1, **more})
    if "capacity_total" in more:
        del extra["capacity"]
    return extra


class Server:
    """All ranks of a server."""

    def __init__(self, path, tp: int, pp: int = 1, layout: str = "page_first_direct", settings=None, **more) -> None:
        extra = extra_config(path, **{"capacity_total": "64MiB", **(settings or {})})
        self.ranks: list[Rank] = []
        try:
            for pp_rank in range(pp):
                for tp_rank in range(tp):
                    self.ranks.append(Rank(dict(extra), (tp_rank, tp), (pp_rank, pp), layout, **more))
        except BaseException:
            self.close()
            raise

    def store(self, model: Model) -> None:
        assert all(all(rank.store(model)) for rank in self.ranks)

    def found(self, model: Model) -> list[int]:
        return [rank.found(model) for rank in self.ranks]

    def loads(self, model: Model) -> bool:
        return all(all(rank.load(model)) for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
