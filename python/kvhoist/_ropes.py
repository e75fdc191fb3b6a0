"""What a model's configuration says of its rope. Needs no engine."""

from __future__ import annotations

from typing import Any, Iterator

#: What configurations call LongRoPE (Phi-3, Phi-4-mini), which has two sets of factors.
LONG_ROPE = frozenset({"longrope", "su"})


def settings_of(config: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of a configuration, and of the objects within it."""
    if isinstance(config, dict):
        for name, inner in config.items():
            if isinstance(inner, dict):
                yield from settings_of(inner)
            else:
                yield name, inner
