"""SGLang's extra config: the keys that are SGLang's own, and the settings of the backend."""

from __future__ import annotations

from typing import Any, Mapping

from .._store_settings import StoreSettings
from .._values import config_error

#: Keys of extra_config that are SGLang's own.
SGLANG_KEYS = frozenset(
    "backend_name module_path class_name interface_v1 allocator prefetch_threshold prefetch_timeout_base "
    "prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys tp_lcm_size".split()
)


def backend_settings(extra_config: Any, environ: Mapping[str, str] | None = None) -> StoreSettings:
    """The settings of the HiCache backend, of extra_config and the environment."""
    extra_config = {} if extra_config is None else extra_config
    if not isinstance(extra_config, Mapping):
        raise config_error("extra_config", extra_config, "an object with the settings' names")
    return StoreSettings.load({k: v for k, v in extra_config.items() if k not in SGLANG_KEYS}, environ)
