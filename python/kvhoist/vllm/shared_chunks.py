"""Chunks kept by a node's service: one space for all replicas of a model on the node. Needs no engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Callable, Collection

from .._native import chunk_keys
from .._store_settings import StoreSettings
from .._stores import Place
from .._values import config_error
from ..cache import slot_bytes
from ..service.space import ServiceSpace
from .chunks import HostChunks

logger = logging.getLogger(__name__)


class SharedChunkStore(HostChunks):
    """As `ChunkStore`, with the chunks in a service's space, which replicas with the same `Place.identity` share."""

    def __init__(self, config: StoreSettings, place: Place, chunk_bytes: int, memory: Any) -> None:
        """Connects, and lends the service the memory. `memory` is a writable buffer object, kept until `close`."""
        if config.host_bytes < slot_bytes(chunk_bytes):
            expected = f"room for one chunk of {slot_bytes(chunk_bytes)} bytes"
            raise config_error("host_bytes", config.host_bytes, expected)
        space = ServiceSpace(config, replace(place, replica="shared").namespace(), chunk_bytes)
        self.directories = [space.socket]
        self._step: StepAnswers | None = None
        try:
            self.region = space.register_host(memory, pin=True)
            super().__init__(space, chunk_bytes)
        except BaseException:
            space.close()
            raise
        if self.region.copied:
            logger.warning("kvhoist: the service cannot map the engine's memory: each chunk is copied once more")

    def goes_straight(self) -> bool:
        """Whether chunks go between drive and memory without a copy."""
        return not self.region.copied

    def answers(
        self,
        resident: Any,
        absent: Any,
        known: dict[bytes, Any],
        prefix: Callable[[Any], Collection[bytes]] | None = None,
    ) -> Callable[[bytes, Any], Any]:
        """As `ChunkJobs.answers`: one question for all keys of a request in a step, which `prefix` names."""
        self._step = StepAnswers(self.cache, resident, absent, known, prefix or (lambda _context: ()))
        return self._step.answer

    def step_ended(self) -> None:
        """Forgets the answers of this step: replicas store chunks, too."""
        if self._step is not None:
            self._step.forget()

    def description(self) -> str:
        """Where chunks are, for the line in the log at the start."""
        disk = self.cache.stats()["tiers"]["disk"]
        return (
            f"by the service at {self.cache.socket}, space {self.cache.namespace}: {disk['slots']} slots of "
            f"{self.chunk_bytes}-byte chunks, {disk['resident']} resident"
        )


class StepAnswers:
    """Answers of one step of the scheduler, from one question a request."""

    def __init__(
        self,
        space: ServiceSpace,
        resident: Any,
        absent: Any,
        known: dict[bytes, Any],
        prefix: Callable[[Any], Collection[bytes]],
    ) -> None:
        self._space, self._resident, self._absent, self._known, self._prefix = space, resident, absent, known, prefix
        self._found: dict[bytes, Any] = {}

    def answer(self, key: bytes, context: Any = None) -> Any:
        """The answer for one chunk. Never raises."""
        answer = self._known.get(key)
        if answer is None:
            answer = self._found.get(key)
        return self._look_up(key, context) if answer is None else answer

    def _look_up(self, key: bytes, context: Any) -> Any:
        names = [key]
        if context is not None:
            names += [name for name in self._prefix(context) if name != key and name not in self._found]
        for name, there in zip(names, self._space.contains_each(chunk_keys(names))):
            self._found[name] = self._resident if there else self._absent
        return self._found[key]

    def forget(self) -> None:
        """Begins a new step."""
        self._found.clear()
