"""Setups of SGLang that the backend refuses, or warns of, when it is attached."""

from __future__ import annotations

import logging
import sys
from typing import Any, Iterable

from .. import _native
from .._ropes import LONG_ROPE, settings_of
from .._values import config_error, nearest

logger = logging.getLogger(__name__)

#: Pools below this are too small for their pages to matter.
_POOL_BYTES_MIN = 64 << 20


def server_args() -> Any:
    """SGLang's arguments of this server, or `None` without a server, as in tests."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        get = getattr(sys.modules.get(module), name, None)
        try:
            if get is not None and (args := get()) is not None:
                return args
        except Exception as error:
            logger.debug("kvhoist: %s.%s gave no arguments: %s", module, name, error)
    return None


def refuse_adapters_without_keys(args: Any) -> None:
    """Refuses LoRA on older versions of SGLang: pages of all adapters have the same keys there."""
    enabled = getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None)
    utils = sys.modules.get("sglang.srt.mem_cache.utils")
    if enabled and not hasattr(utils, "storage_namespace_seed"):
        raise config_error(
            "enable_lora", enabled, "no LoRA: this version of SGLang gives pages of every adapter the same keys"
        )


def warn_of_salts() -> None:
    """Warns of versions of SGLang whose keys do not tell `cache_salt` apart, and which say of no request what it had."""
    utils = sys.modules.get("sglang.srt.mem_cache.utils")
    if utils is not None and not hasattr(utils, "storage_namespace_seed"):
        logger.warning(
            "kvhoist: this version of SGLang leaves `cache_salt` and `extra_key` of a request out of the keys of its "
            "pages: requests with different salts share pages. Where salts separate tenants, give each a server with "
            "a `revision` of its own, or use SGLang 0.5.23"
        )


def warn_of_images(args: Any) -> None:
    """Warns of multimodal models on versions of SGLang whose keys have 30 bits of an image."""
    # Before 0.5.23 a number stands for all tokens of an image; then there are several, of 62 bits each.
    schedule = sys.modules.get("sglang.srt.managers.schedule_batch")
    if hasattr(schedule, "_compute_pad_value") and _is_multimodal(args):
        logger.warning(
            "kvhoist: this version of SGLang has 30 bits of an image, video or sound in the keys of its pages: of "
            "40,000 behind one prefix two share pages more likely than not, and a request gets the other's; use "
            "SGLang 0.5.23"
        )


def _is_multimodal(args: Any) -> bool:
    """Whether a server's model takes images, videos or sounds."""
    try:
        return bool(_model_config(args).is_multimodal)
    except Exception as error:
        logger.debug("kvhoist: the server's arguments do not say whether its model is multimodal: %s", error)
        return False


def _model_config(args: Any) -> Any:
    """SGLang's configuration of a server's model: of the arguments, or where these have none, as 0.5.23 finds it."""
    if hasattr(args, "get_model_config"):
        return args.get_model_config()
    return sys.modules["sglang.srt.arg_groups.model_override_base"].model_config_of(args)


def warn_of_long_rope(args: Any) -> None:
    """Warns of models with LongRoPE, whose factors SGLang chooses for all tokens of a batch together."""
    if args is None:
        return
    try:
        model = _model_config(args)
        settings = list(settings_of(model.hf_config.to_dict()))
    except Exception as error:
        logger.debug("kvhoist: the server's arguments do not say the rope of its model: %s", error)
        return
    kinds = {value for name, value in settings if name in ("rope_type", "type") and isinstance(value, str)}
    found = sorted(kinds & LONG_ROPE)
    short = [value for name, value in settings if name == "original_max_position_embeddings" and isinstance(value, int)]
    longest = getattr(model, "context_len", None)
    # No request is so long that any would get the long factors.
    if not found or (short and longest and longest <= min(short)):
        return
    logger.warning(
        "kvhoist: found rope_scaling of type %r, expected a rope whose angles depend on a token's position only: where "
        "one request of a batch is longer than original_max_position_embeddings (%s), SGLang computes all of the batch "
        "with the long factors, and later requests get these pages; set --context-length to that number, or use "
        "neither storage backend nor linker",
        found[0], min(short, default="not said"),
    )  # fmt: skip


def warn_of_copies(extra_config: Any) -> None:
    """Warns of settings by which SGLang hands the backend copies of pages, and not their places in its pool."""
    named = isinstance(extra_config, dict) and "class_name" in extra_config
    if named and extra_config.get("interface_v1") != 1:
        logger.warning(
            "kvhoist: %s: without it SGLang copies each page once more",
            config_error("interface_v1", extra_config.get("interface_v1"), "1"),
        )


def refuse_copies_of_chunks(extra_config: Any) -> None:
    """Refuses settings by which SGLang hands the backend copies of pages beside unified keys, which cut it in place."""
    named = isinstance(extra_config, dict) and "class_name" in extra_config
    if named and not extra_config.get("interface_v1"):
        expected = "1 beside key_scheme 'unified': without it SGLang copies pages, which cannot be cut into chunks"
        raise config_error("interface_v1", extra_config.get("interface_v1"), expected)


def refuse_what_is_not_kept(config: Any, in_service: bool) -> None:
    """Refuses layouts of ranks whose pages the backend cannot keep."""
    if config.is_mla_model and config.tp_size > 1 and not in_service:
        raise config_error(
            "service",
            "off",
            f"'auto', or the socket of a service: the {config.tp_size} ranks of an MLA model keep the same pages, one "
            "of them writes them and all read them, for which the store must be shared by processes",
        )
    if getattr(config, "dcp_size", 1) > 1:
        raise config_error("dcp_size", config.dcp_size, "1: pages that are spread over ranks are not supported yet")
    if getattr(config, "should_split_heads", False):
        raise config_error("tp_lcm_size", config.tp_lcm_size, "none: pages that are split by heads are not supported")


def replicas(args: Any) -> int:
    """How many times a server has the whole model: --dp-size, without data-parallel attention."""
    size = getattr(args, "dp_size", None) or 1
    return 1 if getattr(args, "enable_dp_attention", False) else size


def refuse_replicas(args: Any, in_service: bool) -> None:
    """Refuses replicas that would each need the one store of their pages."""
    if not in_service and (count := replicas(args)) > 1:
        expected = f"'auto' or the socket of a service: the {count} replicas of --dp-size share one store"
        raise config_error("service", "off", expected)


def refuse_memory_saver(args: Any) -> None:
    """Refuses, for the linker, what unmaps the KV cache before the tree is reset, while pages of it are offloaded."""
    if getattr(args, "enable_memory_saver", False):
        expected = "False: SGLang unmaps the KV cache while pages of it are offloaded; use the storage backend beside it"
        raise config_error("enable_memory_saver", True, expected)


def refuse_stages(count: int) -> None:
    """Refuses, for the linker, stages that each go by what their own ranks have found, and have loaded."""
    if count > 1:
        expected = (
            "1: SGLang tells no other pipeline stage what one has found or could not load; use the storage backend "
            "beside it"
        )
        raise config_error("pp_size", count, expected)


def refuse_empty_pages(name: str, pool: Any, page_bytes: int) -> None:
    """Refuses pools that only number their pages, whose bytes lie in other pools: which are there cannot be told."""
    if not page_bytes:
        expected = (
            "a pool with bytes: the storage backend does not keep DeepSeek V4, whose pages lie in pools beside this "
            "one; use KvhoistLinker (SGLang 0.5.23), or no storage backend"
        )
        raise config_error("model", f"{type(pool).__name__} for pool {name}, with pages of 0 bytes", expected)


def refuse_unknown_shares(shares: Iterable[str], pools: Iterable[str]) -> None:
    """Refuses a share for a pool that does not exist: its part of the capacity would be in no store."""
    known = set(pools)
    for name in sorted(set(shares) - known):
        raise config_error("pool_shares", name, f"the name of a pool: {nearest(name, known)}")


def warn_of_small_pages(pool: str, pool_bytes: int, share: float | None) -> None:
    """Warns of a pool that does not lie in huge pages, with what helps for this version of SGLang."""
    if share is None or share >= 0.5 or pool_bytes < _POOL_BYTES_MIN:
        return
    version = str(getattr(sys.modules.get("sglang"), "__version__", ""))
    logger.warning(
        "kvhoist: found %.0f%% of pool %s in huge pages, expected nearly all of it: in small ones a drive's requests are split, "
        "and pages move at about half of the speed; start %s with %s",
        100 * share, pool, f"SGLang {version}".rstrip(), _native.huge_pool_advice("sglang", version),
    )  # fmt: skip
