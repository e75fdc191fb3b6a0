"""SGLang's extra config: the keys that are SGLang's own, and the settings of the backend."""

from __future__ import annotations

import os
from typing import Any, Mapping, NamedTuple

from .._store_settings import StoreSettings
from .._values import config_error, whole

#: Keys of extra_config that are SGLang's own.
SGLANG_KEYS = frozenset(
    "backend_name module_path class_name interface_v1 allocator prefetch_threshold prefetch_timeout_base "
    "prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys tp_lcm_size file_storage_path".split()
)

#: A deadline may take a quarter longer, and a flush of SGLang 0.5.23 raises where the read of an aborted request has
#: not ended after 10 s.
DEADLINE_MS = 7_000

#: Who has the same keys for the same pages: each rank of one topology, or SGLang's unified coordinates.
KEY_SCHEMES = ("ranks", "unified")


class KeyScheme(NamedTuple):
    """How pages are named, and the grid of chunks that servers which share pages have agreed upon."""

    unified: bool = False
    #: Heads and layers of a chunk; None: those of the rank.
    head_group: int | None = None
    layer_partition: int | None = None


def backend_settings(extra_config: Any, environ: Mapping[str, str] | None = None) -> StoreSettings:
    """The settings of the HiCache backend, of extra_config and the environment."""
    key_scheme(extra_config)
    given = _object(extra_config)
    own = SGLANG_KEYS | {"key_scheme", *KeyScheme._fields}
    ours = {k: v for k, v in given.items() if k not in own}
    if not (os.environ if environ is None else environ).get("KVHOIST_DEADLINE_MS"):
        ours.setdefault("deadline_ms", DEADLINE_MS)
    return StoreSettings.load(ours, environ)


def key_scheme(extra_config: Any) -> KeyScheme:
    """The settings of the names of pages."""
    given = _object(extra_config)
    scheme = given.get("key_scheme", "ranks")
    if scheme not in KEY_SCHEMES:
        raise config_error("key_scheme", scheme, "one of " + ", ".join(map(repr, KEY_SCHEMES)))
    grid: dict[str, int | None] = {}
    for name in ("head_group", "layer_partition"):
        if (value := given.get(name)) is not None:
            if scheme != "unified":
                raise config_error(name, value, "nothing, or key_scheme 'unified' beside it")
            grid[name] = whole(name, value, 1, 1 << 16)
    return KeyScheme(scheme == "unified", **grid)


def _object(extra_config: Any) -> Mapping[str, Any]:
    extra_config = {} if extra_config is None else extra_config
    if not isinstance(extra_config, Mapping):
        raise config_error("extra_config", extra_config, "an object with the settings' names")
    return extra_config
