"""Hints that a request brings along: its chain is over, or is to be kept.

vLLM passes two things on from a request's sender: `kv_transfer_params`, which its HTTP API takes too, and since 0.33
`kv_hints`, from an orchestrator. A finished request alone says nothing: its conversation may continue.
"""

from __future__ import annotations

from typing import Any, Callable

from .._values import config_error
from .prefix import positions

#: The key of `kv_transfer_params`, and what the types of actions in `kv_hints` begin with.
NAME = "kvhoist"

#: The version of these actions.
ACTION_VERSION = "1"


def hint_of(context: Any) -> tuple[bool, float]:
    """Whether the request's chain is over, and the seconds for which it is to be kept.

    Raises ConfigError for a hint that cannot be understood.
    """
    given = (getattr(context, "kv_transfer_params", None) or {}).get(NAME) or {}
    if not isinstance(given, dict):
        raise config_error(NAME, given, "an object with release or keep_seconds")
    hint = dict(given)
    envelope = getattr(context, "kv_hints", None)
    for action in envelope.actions if envelope is not None else ():
        if action.action_type in (f"{NAME}.release", f"{NAME}.keep") and action.action_version != ACTION_VERSION:
            raise config_error("action_version", action.action_version, f"{ACTION_VERSION!r} for {action.action_type}")
        if action.action_type == f"{NAME}.release":
            hint["release"] = True
        elif action.action_type == f"{NAME}.keep":
            hint["keep_seconds"] = action.payload.get("seconds")
    release, seconds = hint.pop("release", False), hint.pop("keep_seconds", 0)
    if hint or not isinstance(release, bool):
        raise config_error(NAME, given, "release: true or false, and keep_seconds: a number")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise config_error("keep_seconds", seconds, "a number of seconds, 0 or more")
    return release, seconds


def give_hint(store: Any, context: Any, name: Callable[[bytes], bytes] = bytes) -> None:
    """Releases or keeps the chunks of a request that has finished, each group's in the order of its prefix."""
    release, seconds = hint_of(context)
    if not release and not seconds:
        return
    groups: dict[bytes, list[bytes]] = {}
    places = positions(context)
    for key in sorted(places, key=places.__getitem__):
        groups.setdefault(key[-4:], []).append(name(key))
    for names in groups.values():
        if release:
            store.release(names)
        else:
            store.keep(names, seconds)
