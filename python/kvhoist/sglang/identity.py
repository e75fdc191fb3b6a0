"""The identity of a rank's pages: what separates two stores."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from .._values import config_error

#: Pools that differ from rank to rank also where the KV pool is the same on all of them: an MLA model's recurrent states
#: are cut by heads.
_OF_EACH_RANK = frozenset({"mamba"})


@dataclass(frozen=True)
class Identity:
    """What a page's bytes depend on beside its key."""

    model_name: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dp_rank: int
    is_mla_model: bool
    dcp_size: int = 1
    dcp_rank: int = 0
    #: Pairs of a name and a value that differ between weights served under one name.
    weights: tuple[tuple[str, str], ...] = ()
    #: The same of a draft model's weights (speculative decoding). They enter the digest of pools with its pages only.
    draft: tuple[tuple[str, str], ...] = ()
    #: The layers of each pipeline stage, where the operator sets them: ranks of one number have others with other splits.
    stages: str = ""

    @classmethod
    def of(cls, config: Any, server_args: Any = None, revision: str = "") -> "Identity":
        """Reads SGLang's HiCacheStorageConfig. Fields that an older version lacks have that version's only value.

        `server_args` are SGLang's, or `None` without a server; `revision` is the operator's setting.
        """
        return cls(
            model_name=config.model_name or "unnamed",
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=getattr(config, "pp_rank", 0),
            pp_size=getattr(config, "pp_size", 1),
            attn_cp_rank=getattr(config, "attn_cp_rank", 0),
            attn_cp_size=getattr(config, "attn_cp_size", 1),
            dp_rank=getattr(config, "dp_rank", 0),
            is_mla_model=bool(config.is_mla_model),
            dcp_size=getattr(config, "dcp_size", 1),
            dcp_rank=getattr(config, "dcp_rank", 0),
            weights=_weights(config.model_name, server_args, revision) + _interface(config),
            draft=_draft(server_args),
            stages=os.environ.get("SGLANG_PP_LAYER_PARTITION", "") if getattr(config, "pp_size", 1) > 1 else "",
        )

    def digested(self, has_draft: bool = False) -> dict[str, Any]:
        """The fields that enter the digest of a pool; `has_draft` if its pages hold a draft model's KV.

        Empty `weights`, `draft` and `stages` are left out, as versions before them had none.
        """
        fields = asdict(self)
        if not self.stages:
            del fields["stages"]
        if not self.weights:
            del fields["weights"]
        if not self.draft or not has_draft:
            del fields["draft"]
        return fields

    def shared(self, pool: str = "kv") -> "Identity":
        """The identity that ranks with the same bytes of a pool have in common: ranks of an MLA model, data-parallel
        replicas."""
        tensor = dict(tp_rank=0, tp_size=1) if self.is_mla_model and pool not in _OF_EACH_RANK else {}
        return replace(self, dp_rank=0, **tensor)

    def parts(self, pool: str) -> int:
        """The number of ranks that share the KV pool's pages, and of which each has other bytes in this pool."""
        return self.tp_size if self.is_mla_model and pool in _OF_EACH_RANK else 1

    def groups(self) -> int:
        """The number of groups of ranks. Ranks of different groups share no page."""
        return self.tp_size * self.pp_size * self.attn_cp_size

    def parts_of_total(self, server_args: Any, in_service: bool) -> int:
        """Into how many parts `capacity_total` is divided: one for each rank, or in a service one for each group."""
        # Under data-parallel attention the identity's `tp_size` is that of an attention group; 0 without a server.
        ranks = (getattr(server_args, "tp_size", 0) or 0) * (getattr(server_args, "pp_size", 0) or 0)
        if not in_service:
            return ranks or self.tp_size * self.pp_size
        # Without data-parallel attention `tp_size` counts the ranks of context parallelism, as `attn_cp_size` does.
        groups = self.shared().groups()
        return min(groups, ranks or groups)

    def number(self) -> int:
        """The number of this rank among all of the model, from 0. No two ranks have the same."""
        group = (self.dp_rank * self.pp_size + self.pp_rank) * self.attn_cp_size + self.attn_cp_rank
        return group * self.tp_size + self.tp_rank

    def rank_name(self) -> str:
        """A folder's name for this rank."""
        ranks = (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("cp", self.attn_cp_rank, self.attn_cp_size),
        )
        return "-".join(f"{name}{rank}of{size}" for name, rank, size in ranks) + f"-dp{self.dp_rank}"


#: SGLang's server arguments that change the values in a page, but neither its key nor its geometry. Pools of all 8-bit
#: floats have bytes for their dtype, so `kv_cache_dtype` is among them.
_WEIGHTS_ARGS = (
    "revision", "quantization", "json_model_override_args", "kv_cache_dtype", "quantization_param_path", "torchao_config",
    "modelopt_quant", "modelopt_checkpoint_restore_path", "rl_quant_profile", "weight_version", "kt_weight_path",
    "enable_precise_embedding_interpolation",
)  # fmt: skip

#: Those of ktransformers that change values only beside `kt_weight_path`, without which they have defaults too.
_KT_ARGS = ("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token")

#: Dtypes by the names of `kv_cache_dtype`, where a pool's own dtype does not tell.
_STORED_AS_BYTES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


#: The arguments that name a draft model's weights, each with the one of the target that the digest has already.
_DRAFT_ARGS = {
    "speculative_draft_model_path": "model_path",
    "speculative_draft_model_revision": "revision",
    "speculative_draft_model_quantization": "quantization",
    "speculative_draft_kv_cache_dtype": "kv_cache_dtype",
    "speculative_draft_load_format": "load_format",
}

#: Those that are the target's where they are not given.
_DRAFT_AS_TARGET = frozenset({"speculative_draft_kv_cache_dtype", "speculative_draft_load_format"})


def logical_dtype(dtype: Any, server_args: Any) -> str:
    """What the numbers in a pool are. Raises ConfigError where its dtype is bytes, and nobody says of what."""
    if str(dtype) != "torch.uint8":
        return str(dtype)
    told = getattr(server_args, "kv_cache_dtype", None)
    if told not in _STORED_AS_BYTES:
        raise config_error("kv_cache_dtype", told, f"{' or '.join(_STORED_AS_BYTES)} for pools whose dtype is {dtype}")
    return _STORED_AS_BYTES[told]


def holds_draft(name: str, pool: Any) -> bool:
    """Whether the pages of a host pool hold a draft model's KV: in a pool of its own, or behind the target's layers.

    SGLang's pools of recurrent states have no number of layers, but a list of the draft's.
    """
    layers, of_target = getattr(pool, "layer_num", None), getattr(pool, "target_layer_num", None)
    behind = (of_target is not None and layers != of_target) or bool(getattr(pool, "mtp_draft_buffer_infos", ()))
    return name.startswith("draft") or behind


def _draft(server_args: Any) -> tuple[tuple[str, str], ...]:
    """The arguments in which a draft model differs from its target; none for a draft in the target's checkpoint."""
    found = []
    for name, target in _DRAFT_ARGS.items():
        value, of_target = getattr(server_args, name, None), getattr(server_args, target, None)
        if name in _DRAFT_AS_TARGET and value is None:
            continue
        if target == "load_format":
            value, of_target = _loaded_as(value), _loaded_as(of_target)
        if value != of_target:
            found.append((name, str(value)))
    return tuple(found)


def _loaded_as(load_format: Any) -> str | bool:
    """What the weights of a format are: True for random ones, the format's name where it quantizes them to 8 bits, and
    False for all formats that load the files' own."""
    return "flash_rl" if load_format == "flash_rl" else load_format == "dummy"


def _weights(model_name: str | None, server_args: Any, revision: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, Any] = {"kvhoist_revision": revision}
    path = getattr(server_args, "model_path", None)
    if path != model_name:
        found["model_path"] = path
    found.update((name, getattr(server_args, name, None)) for name in _WEIGHTS_ARGS)
    defaults = (("json_model_override_args", "{}"), ("kv_cache_dtype", "auto"), ("weight_version", "default"))
    for name, default in defaults:
        if found[name] == default:
            del found[name]
    load_format = getattr(server_args, "load_format", None)
    found["load_format"] = load_format if _loaded_as(load_format) else None
    if found["kt_weight_path"]:
        found.update((name, getattr(server_args, name, None)) for name in _KT_ARGS)
    hooks = getattr(server_args, "forward_hooks", None)
    found["forward_hooks"] = json.dumps(hooks, sort_keys=True, default=str) if hooks else None
    found["quantization_params"] = _file_digest(found["quantization_param_path"])
    adapters = getattr(server_args, "lora_paths", None) or ()
    if isinstance(adapters, dict):
        adapters = adapters.items()
    found["lora"] = json.dumps(sorted(map(_adapter, adapters))) if adapters else None
    return tuple((name, str(value)) for name, value in sorted(found.items()) if value)


def _interface(config: Any) -> tuple[tuple[str, str], ...]:
    """That SGLang copies pages for the backend: in pools of one layer after the other, keys come before values then."""
    extra = getattr(config, "extra_config", None)
    copies = isinstance(extra, dict) and "class_name" in extra and not extra.get("interface_v1")
    return (("interface", "flat"),) if copies and not config.is_mla_model else ()


def _file_digest(path: str | None) -> str | None:
    """The digest of a file's bytes; `None` without a file that can be read, of which SGLang itself complains."""
    try:
        with open(path or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, ValueError):
        return None


def _adapter(adapter: Any) -> str:
    """An adapter's name and path. Its id is left out: of `--lora-paths` SGLang derives it from these two (`uuid5`)."""
    name, path = getattr(adapter, "lora_name", None), getattr(adapter, "lora_path", None)
    return str(adapter) if name is None and path is None else f"{name}={path}"
