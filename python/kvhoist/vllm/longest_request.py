"""Models whose KV depends on the longest request that vLLM takes, `max_model_len`. LongRoPE (Phi-3, Phi-4-mini) has two
sets of factors, of which it chooses one. In Llama 4 it decides whether queries at late positions are scaled. Needs no
engine."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from .._ropes import LONG_ROPE, settings_of

logger = logging.getLogger(__name__)

#: Of what configurations call LongRoPE, and Llama 4.
_SETTINGS = {"rope_type": LONG_ROPE, "type": LONG_ROPE, "model_type": frozenset({"llama4", "llama4_text"})}


def depends_on_longest_request(config: Any) -> bool:
    """Whether a model's configuration, as JSON has it, says so."""
    return any(
        isinstance(value, str) and name in _SETTINGS and value in _SETTINGS[name] for name, value in settings_of(config)
    )


def is_independent_of_longest_request(model: str) -> bool:
    """Whether a model's configuration was found, and says that its KV does not depend on it. Of a model that is loaded
    at a commit, from another hub or from another format, none is found."""
    config = configuration_of(model)
    return isinstance(config, dict) and not depends_on_longest_request(config)


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
