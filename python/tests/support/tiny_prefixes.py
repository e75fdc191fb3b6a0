"""A prefix cache over a tiny model, and what the model answers with it and without."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache, StaticCache

from kvhoist.transformers import PrefixCache

BLOCK = 16


def opened(model, folder, **more):
    sizes = {} if folder is None else {"capacity": "64MiB"}
    return PrefixCache(
        model, folder, **{**sizes, "host_bytes": "8MiB", "block_tokens": BLOCK, "direct_io": "prefer", **more}
    )


@torch.no_grad()
def answer(model, prefixes, ids, max_length=None):
    """The logits of a plain forward over what was not loaded, and how much was."""
    past = prefixes(ids, max_length=max_length)
    return model(ids[:, past.prefix_length :], past_key_values=past).logits, past.prefix_length


@torch.no_grad()
def computed(model, ids, at=0, max_length=None):
    """The logits from a token on, without kvhoist: the tokens before it are computed in a forward of their own."""
    past = (
        DynamicCache(config=model.config) if max_length is None else StaticCache(model.config, max_cache_len=max_length)
    )
    if at:
        model(ids[:, :at], past_key_values=past)
    return model(ids[:, at:], past_key_values=past).logits


def generated(model, inputs, past=None, **more):
    more = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    return model.generate(**inputs, past_key_values=past, **more)


def blocks(folder):
    """All files of a store."""
    return [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size > 1 << 16]
