"""Host pools of SGLang full of noise, their pages and their keys."""

from __future__ import annotations

import sgl
import torch

MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


def filled(geometry, layout="page_first", pages=16, seed=1):
    """A host pool full of noise."""
    pool = sgl.host_pool(geometry, sgl.device_pool(geometry, pages), layout)
    noise(pool, seed)
    return pool


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def noise(pool, seed):
    raw(pool.kv_buffer).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def pages_of(pool, indices):
    return [raw(pool.get_data_page(int(i)).clone()) for i in indices[:: pool.page_size]]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def keys_for(geometry, pages, salt=0):
    count = pages * geometry.page_tokens
    return sgl.page_keys([salt * 1_000_003 + i for i in range(count)], geometry.page_tokens)


def transfer_of(name, keys, indices, policy=None, **more):
    storage = sgl.boot().storage
    policy = policy or storage.PoolHitPolicy.ALL_PAGES
    return storage.PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=policy, **more)
