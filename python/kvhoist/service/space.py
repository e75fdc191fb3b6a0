"""A space of a node's service with the calls of `Cache` that adapters make. Needs no engine."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Sequence

from .._store_settings import StoreSettings
from .._stores import close_all
from ..client import Client, SharedMemory, address_of, connect, file_of
from ..errors import DeadlineError, Error, UnavailableError
from .pause import Pause
from .supervisor import ServiceSupervisor

logger = logging.getLogger(__name__)

#: An engine's thread waits no longer for the connection of its questions, and for a removal.
_INDEX_MS = 1000

_BOUNCE_BYTES_MAX = 256 << 20


class _NothingHeld:
    """What is held of a service that is away."""

    def __len__(self) -> int:
        return 0

    def release(self) -> None:
        """Nothing is let go."""


NOTHING_HELD = _NothingHeld()


class ServiceSpace:
    """One space, found by its name. While the service is away nothing is there, and what is submitted fails.

    Moves and questions have a connection each. A service that is back answers questions before it has the memory again:
    until the moves' connection is up nothing is there, either.
    """

    def __init__(
        self, config: StoreSettings, space: str, block_bytes: int, device: str | None = None, device_ordinal: int = 0
    ) -> None:
        """Connects to the service of the settings, or starts it. `device`: whose memory is registered, too.

        Raises UnavailableError where none answers, DeadlineError where it accepts no connection in time."""
        self._keeper = ServiceSupervisor(config)
        self._options: dict[str, Any] = dict(
            space=space, block_bytes=block_bytes, capacity=config.capacity, host_bytes=config.host_bytes,
            bounce_bytes=max(block_bytes, min(config.host_bytes, _BOUNCE_BYTES_MAX)), device=device,
            device_ordinal=device_ordinal,
        )  # fmt: skip
        self._client = self._connect(config.deadline_ms)
        try:
            self._index = self._connect(_INDEX_MS, config.lookup_ms)
        except BaseException:
            self._client.close()
            raise
        self._pause = Pause()
        #: The last figures that the service gave.
        try:
            self._stats: dict[str, Any] = self._client.stats()
        except BaseException:
            self.close()
            raise

    def _connect(self, deadline_ms: int, ask_ms: int | None = None) -> Client:
        # The engine computes into the memory of a load that has failed.
        return connect(self._keeper.socket, **self._options, deadline_ms=deadline_ms, ask_ms=ask_ms, give_up_ms=None)

    @property
    def socket(self) -> str:
        """Where the service listens."""
        return self._keeper.socket

    @property
    def namespace(self) -> str:
        """The space's name."""
        return self._client.namespace

    @property
    def connected(self) -> bool:
        """True while the service can be reached."""
        return self._client.connected and self._index.connected

    # Memory and moves

    def register_host(self, memory: Any, nbytes: int | None = None, *, pin: bool = False) -> Any:
        """As `Cache.register_host`. The service maps shared memory; blocks of other memory are copied once more."""
        if isinstance(memory, SharedMemory):
            return self._client.register_host(memory, pin=pin)
        address, size = (memory, nbytes) if nbytes is not None else address_of(memory)
        fd = file_of(address, size)
        try:
            region = self._client.register_host(memory, nbytes, pin=pin, fd=fd)
        finally:
            if fd is not None:
                os.close(fd)
        return region

    def register_device(self, address: int, nbytes: int) -> Any:
        """As `Client.register_device`."""
        return self._client.register_device(address, nbytes)

    def queue(self, depth: int) -> Any:
        """As `Cache.queue`."""
        return self._client.queue(depth)

    def load_layers(self, keys: Sequence[Any], addresses: Any, sizes: Sequence[int], layer_of: Sequence[int]) -> Any:
        """As `Cache.load_layers`. Raises UnavailableError while the service is away."""
        return self._client.load_layers(keys, addresses, sizes, layer_of)

    # The index

    def contains(self, key: str | bytes) -> bool:
        """Whether a key is there; False while the service is away."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str | bytes]) -> list[bool]:
        """Which keys are there; none while the service is away."""
        return self._found(lambda: self._index.contains_each(keys), [False] * len(keys))

    def tiers(self, keys: Sequence[Any]) -> list[str]:
        """The fastest tier of each leading block; none while the service is away."""
        return self._found(lambda: self._index.tiers(keys), [])

    def hold(self, keys: Sequence[Any], most: int) -> Any:
        """As `Client.hold`; nothing is held while the service is away."""
        return self._found(lambda: self._index.hold(keys, most), NOTHING_HELD)

    def touch(self, keys: Sequence[str | bytes]) -> None:
        """Counts a use of a chain."""
        self._asked(lambda: self._index.touch(keys), None)

    def release(self, keys: Sequence[str | bytes]) -> int:
        """Releases a chain for all clients of the space; 0 while the service does not answer."""
        return self._asked(lambda: self._index.release(keys), 0)

    def keep(self, keys: Sequence[str | bytes], seconds: float) -> int:
        """Keeps a chain for all clients of the space; 0 while the service does not answer."""
        return self._asked(lambda: self._index.keep(keys, seconds), 0)

    def remove(self, key: str | bytes) -> bool:
        """Forgets a block, for all clients of the space. Raises while the service is away."""
        if self._pause.is_on():
            raise UnavailableError("the service has not answered a moment ago")
        try:
            return self._index.remove(key)
        except (DeadlineError, UnavailableError) as error:
            self._failed(error)
            raise

    def stats(self) -> dict[str, Any]:
        """The space's figures, of all clients; the last ones while the service is away."""
        self._stats = self._asked(lambda: self._index.stats(briefly=True), self._stats)
        trouble = self._stats["disk_trouble"]
        return {
            **self._stats, "disk_retired": trouble, "disk_read_only": None, "storage": "service",
            "direct_io": "as the service has it",
        }  # fmt: skip

    def _found(self, ask: Callable[[], Any], nothing: Any) -> Any:
        """As `_asked`, of blocks to be loaded. Asks in any case: who finds the service away has it started again."""
        found = self._asked(ask, nothing)
        return found if self._client.connected else nothing

    def _asked(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        if self._pause.is_on():
            return otherwise
        try:
            return ask()
        except Error as error:
            self._failed(error)
            return otherwise

    def _failed(self, error: Error) -> None:
        self._pause.begin(error)
        self._keeper.missed()
        logger.warning("kvhoist: the service does not answer: %s", error)

    def close(self) -> None:
        """Hangs up, and returns when the service uses none of this memory."""
        close_all([self._index, self._client])
