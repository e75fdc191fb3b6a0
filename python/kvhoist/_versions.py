"""Versions of an engine that an adapter supports. Needs no engine."""

from __future__ import annotations

import logging
import re
from typing import Any

logger = logging.getLogger(__name__)

#: The first and the last version of each engine that its adapter supports. The tests drive both, but of transformers
#: the first only; `docs/generate.py` puts them into the pages.
VERSIONS = {
    "sglang": ("0.5.17", "0.5.23"),
    "vllm": ("0.28.0", "0.33.0"),
    "lmcache": ("0.5.0", "0.5.6"),
    "transformers": ("5.17.0", "5.24.0"),
}

#: What a build from source calls itself: a development version, or a commit behind any number.
_FROM_SOURCE = re.compile(r"dev|\+g[0-9a-f]{6,40}\b")


def _number(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def words(engine: str) -> str:
    """The versions of an engine, for people: `0.28 to 0.33`."""
    return " to ".join(version.removesuffix(".0") for version in VERSIONS[engine])


def supported(engine: Any, what: str) -> "Supported":
    """The versions of an engine, given as its package."""
    first, last = (_number(version) for version in VERSIONS[engine.__name__])
    return Supported(engine, (first[0], first[1]), (last[0], last[1]), what)


class Supported:
    """The first and the last version of an engine that an adapter supports, as (major, minor).

    The number of a build from source says little: it is tried, with a warning.
    """

    def __init__(self, package: Any, first: tuple[int, int], last: tuple[int, int], what: str) -> None:
        self._package, self._first, self._last, self._what = package, first, last, what

    @property
    def found(self) -> str:
        """The version, as the engine has it."""
        return str(getattr(self._package, "__version__", None) or "unknown")

    @property
    def _number(self) -> tuple[int, ...]:
        return _number(self.found)

    @property
    def is_from_source(self) -> bool:
        """Whether its number says little of its interfaces."""
        return not self._number or bool(_FROM_SOURCE.search(self.found))

    def is_before(self, version: tuple[int, int]) -> bool:
        """Whether its number is that of an earlier version. Of a build from source nobody knows."""
        return not self.is_from_source and self._number < version

    def layout(self) -> str:
        """What the layout of stored bytes depends on: major and minor, or all that is known of a build from source."""
        return self.found if self.is_from_source else ".".join(map(str, self._number))

    def refusal(self) -> str:
        """What is supported, and what to do."""
        first, last = (".".join(map(str, version)) for version in (self._first, self._last))
        known = first if first == last else f"{first} to {last}"
        return (
            f"{self._package.__name__}: found version {self.found}, expected {known}, whose {self._what} supports; "
            "install one of these, or a kvhoist that supports yours"
        )

    def check(self) -> None:
        """Raises ImportError for a version before the first."""
        if not self.is_from_source and self._number < self._first:
            raise ImportError(self.refusal())

    def warn(self) -> None:
        """Logs a warning for a version after the last, and for a build from source."""
        if self.is_from_source or self._number > self._last:
            logger.warning("kvhoist: %s; trying", self.refusal())
