"""A rank of a server under the linker: what separates its pages from those of others, and what it shares with them."""

from __future__ import annotations

import secrets
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from .._values import config_error
from .identity import Identity
from .linker_settings import LinkerSettings


def _ranks_of(params: Any) -> Any:
    """The group of ranks that share a prefix tree."""
    return getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)


def secret_of(params: Any, shared: bool) -> bytes:
    """Random bytes that keys are derived from; `shared`: the same ones on all ranks of the group."""
    secret = [secrets.token_bytes(32)]
    if shared:
        torch.distributed.broadcast_object_list(secret, group=_ranks_of(params), group_src=0)
    return secret[0]


def identity_of(server_args: Any, params: Any, group: Any, settings: LinkerSettings) -> Identity:
    """What a page's bytes depend on beside its key. The ranks are those of the group that shares a prefix tree."""
    tensor = _ranks_of(params)
    rank, size = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=tensor), torch.distributed.get_world_size(group=tensor)
    parallel = get_parallel()
    if getattr(parallel, "attn_dcp_size", 1) > 1:
        raise config_error("attn_dcp_size", parallel.attn_dcp_size, "1: pages that are spread over ranks are not kept")
    config = SimpleNamespace(
        model_name=getattr(server_args, "model_path", None), tp_rank=rank, tp_size=size,
        is_mla_model=group.rank_replicated, pp_rank=params.pp_rank, pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank, attn_cp_size=params.attn_cp_size,
        dp_rank=getattr(parallel, "attn_dp_rank", 0) or 0,
    )  # fmt: skip
    return Identity.of(config, server_args, settings.store.revision)
