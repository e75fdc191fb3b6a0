"""A space of a node's service with the calls of `Cache` that adapters make. Needs no engine."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Sequence

from .._store_settings import StoreSettings
from ..client import Client, SharedMemory, connect, mapped_from
from ..errors import DeadlineError, Error, UnavailableError
from .pause import Pause
from .supervisor import ServiceSupervisor

logger = logging.getLogger(__name__)

#: An engine's thread waits no longer for the connection of its questions, and for a removal.
_INDEX_MS = 1000

_BOUNCE_BYTES_MAX = 256 << 20


class ServiceSpace:
    """One space, found by its name. While the service is away nothing is there, and what is submitted fails."""

    def __init__(self, config: StoreSettings, space: str, block_bytes: int) -> None:
        """Connects to the service of the settings, or starts it. Raises UnavailableError where none answers."""
        self._keeper = ServiceSupervisor(config)
        self._options: dict[str, Any] = dict(
            space=space, block_bytes=block_bytes, capacity=config.capacity, host_bytes=config.host_bytes,
            bounce_bytes=max(block_bytes, min(config.host_bytes, _BOUNCE_BYTES_MAX)),
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
        address, size = (memory, nbytes) if nbytes is not None else _place_of(memory)
        fd = _file_of(address, size)
        try:
            region = self._client.register_host(memory, nbytes, pin=pin, fd=fd)
        finally:
            if fd is not None:
                os.close(fd)
        return region

    def queue(self, depth: int) -> Any:
        """As `Cache.queue`."""
        return self._client.queue(depth)

    # The index

    def contains(self, key: bytes) -> bool:
        """Whether a key is there; False while the service is away."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there; none while the service is away."""
        return self._asked(lambda: self._index.contains_each(keys), [False] * len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts a use of a chain."""
        self._asked(lambda: self._index.touch(keys), None)

    def release(self, keys: Sequence[bytes]) -> int:
        """Releases a chain for all clients of the space; 0 while the service does not answer."""
        return self._asked(lambda: self._index.release(keys), 0)

    def keep(self, keys: Sequence[bytes], seconds: float) -> int:
        """Keeps a chain for all clients of the space; 0 while the service does not answer."""
        return self._asked(lambda: self._index.keep(keys, seconds), 0)

    def remove(self, key: bytes) -> bool:
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
        self._index.close()
        self._client.close()


def _place_of(memory: Any) -> tuple[int, int]:
    import ctypes

    view = memoryview(memory).cast("B")
    return ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes


def _file_of(address: int, nbytes: int) -> int | None:
    """A descriptor of the file that shared memory is mapped from; None if it cannot be opened."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _offset, _device, _inode, *path = line.split(maxsplit=5)
            start, stop = (int(number, 16) for number in span.split("-"))
            if not start <= address < stop:
                continue
            if access[3] != "s" or not path:
                return None
            try:
                fd = os.open(path[0].rstrip("\n"), os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return None
            if mapped_from(address, nbytes, fd) is not None:
                return fd
            os.close(fd)
            return None
    return None
