"""Values of settings: how they are read, and the errors that name what was found and what is expected."""

from __future__ import annotations

import difflib
import json
import logging
import re
from typing import Any, Iterable

from . import _native
from .errors import ConfigError

logger = logging.getLogger(__name__)

_WHOLE = re.compile(r"\s*\d{1,40}\s*", re.ASCII)

#: The engine's bound.
BLOCK_BYTES_MAX = 1 << 30


def shown(value: object) -> str:
    """A value for a message: its `repr`, cut to a line, with whatever a terminal would act on escaped."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to show"
    return printable(text if len(text) <= 200 else text[:200] + "...")


def printable(text: str) -> str:
    """Text with whatever a terminal would act on, or cannot show, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def config_error(field: str, found: object, expected: str) -> ConfigError:
    """A ConfigError in the engine's words, with its `field` set."""
    error = ConfigError(f"{field}: found {'nothing' if found is None else shown(found)}, expected {expected}")
    error.field = field
    return error


def parse_json(text: str) -> Any:
    """What JSON says, where each name stands once: of a name that stands twice one value would be ignored."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name, value in pairs:
            if name in given:
                raise config_error(name, f"{given[name]!r} and {value!r}", "each name once")
            given[name] = value
        return given

    return json.loads(text, object_pairs_hook=once)


def nearest(name: str, known: Iterable[str]) -> str:
    """What is expected instead of an unknown name: the known one that is most like it, or all."""
    names = sorted(known)
    likely = difflib.get_close_matches(name, names, n=1)
    return f"no such name; did you mean {likely[0]}?" if likely else "one of " + ", ".join(names)


#: Keywords that were warned of, each with the class that got it.
_warned: set[tuple[str, str]] = set()


def warn_of_keywords(what: str, names: Iterable[str]) -> None:
    """Logs, once each, that an engine has passed keywords of which a class makes no use."""
    new = sorted({(what, str(name)) for name in names} - _warned)
    _warned.update(new)
    if new:
        logger.warning("kvhoist: %s makes no use of %s, which the engine passes", what, ", ".join(n for _, n in new))


def parse_block_bytes(size: int | str) -> int:
    """Bytes of a block, of a number or of text as in `parse_bytes`. ConfigError for what no block has."""
    try:
        count = parse_bytes(size, "block_bytes")
    except ConfigError:
        count = 0
    if not 0 < count <= BLOCK_BYTES_MAX:
        raise config_error("block_bytes", size, f"1 to {BLOCK_BYTES_MAX} bytes, such as 65536 or '64KiB'")
    return count


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes of a number, or of a string with a unit: ``"64KiB"``, ``"1.5 MiB"``, ``"200Gi"``, ``"10GB"``.

    ``K``, ``Ki`` and ``KiB`` are 1024 bytes and ``KB`` is 1000; ``M``, ``G`` and ``T`` likewise; in any case. The
    command ``kvhoist`` and the environment's ``KVHOIST_CAPACITY`` read sizes in the same way.

    Raises ConfigError, with ``name`` as its field, for all else and for sizes that are not from 1 to 2^63 - 1.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    count: int | None = None
    if isinstance(size, str):
        # No size is longer, and half of a surrogate pair is no text for the engine.
        count = _native.parse_bytes(size) if len(size) <= 100 and size.isascii() else None
    elif isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 63:
        count = size
    if count is None:
        raise config_error(name, size, _native.BYTES_EXPECTED)
    return count


def whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise config_error(name, value, f"a whole number from {low} to {high}")
    return value
