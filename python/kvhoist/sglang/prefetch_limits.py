"""SGLang's own limits on prefetches from a storage backend, which decide where they are reached before the drives'."""

from __future__ import annotations

from typing import Any, Mapping

from .._values import config_error

#: What SGLang takes where the extra config does not say: tokens, seconds, seconds for each 1,024 tokens.
THRESHOLD, BASE_S, PER_KI_TOKEN_S = 256, 1.0, 0.25

#: A prompt as an example.
_EXAMPLE_TOKENS = 32_768


def prefetch_limits(given: Mapping[str, Any], token_bytes: int | None = None) -> tuple[str, str | None]:
    """The limits in words, and how to mend them where no prefetch can come through; `token_bytes` are those of a rank.

    Raises ConfigError for values that SGLang refuses.
    """
    threshold = given.get("prefetch_threshold", THRESHOLD)
    if not isinstance(threshold, int) or isinstance(threshold, bool):
        raise config_error("prefetch_threshold", threshold, "a whole number of tokens")
    base = _seconds(given, "prefetch_timeout_base", BASE_S)
    per_ki = _seconds(given, "prefetch_timeout_per_ki_token", PER_KI_TOKEN_S)
    limit = base + per_ki * _EXAMPLE_TOKENS / 1024
    words = (
        f"none of fewer than {threshold} tokens, nor while half of the host pool's are being prefetched; with the policy "
        f"timeout {limit:g} s for {_EXAMPLE_TOKENS} tokens"
    )
    if limit <= 0:
        return words, "set prefetch_timeout_base to 1 and prefetch_timeout_per_ki_token to 0.25, or the policy to wait_complete"
    if token_bytes is not None:
        rate = _EXAMPLE_TOKENS * token_bytes / limit / 1e9
        words += f": the limit decides where a rank's share of the drives is less than {rate:.2f} GB/s for each such prompt"
    return words, None


def _seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise config_error(name, value, "a number of seconds")
    return float(value)
