"""Models whose keys depend on the longest request that vLLM takes: LongRoPE (Phi-3, Phi-3.5, Phi-4-mini) has two sets of
factors, and `max_model_len` chooses one of them when the model is made. Needs no engine."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

#: What configurations call it.
_NAMES = frozenset({"longrope", "su"})


def has_long_rope(config: Any) -> bool:
    """Whether a model's configuration, as JSON has it, says so."""
    if not isinstance(config, dict):
        return False
    return any(
        value in _NAMES if name in ("rope_type", "type") and isinstance(value, str) else has_long_rope(value)
        for name, value in config.items()
    )


def is_without_long_rope(model: str) -> bool:
    """Whether a model's configuration was found, and says that it has no LongRoPE. Of a model that is loaded at a
    commit, from another hub or from another format, none is found."""
    config = configuration_of(model)
    return isinstance(config, dict) and not has_long_rope(config)


def configuration_of(model: str) -> Any:
    """The `config.json` of a model's folder, or the one that was downloaded for its name; `None` where there is neither."""
    path: Any = os.path.join(model, "config.json")
    try:
        if not os.path.isdir(model):
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(model, "config.json")
        if not isinstance(path, str):
            return None
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ImportError, OSError, ValueError) as error:
        logger.debug("kvhoist: no configuration of %s: %s", model, error)
        return None
