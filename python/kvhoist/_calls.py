"""The calls that `Cache` and `Client` have in common."""

from __future__ import annotations

import asyncio
import functools
import weakref
from typing import TYPE_CHECKING, Any, Sequence

from . import _logs
from ._event_loops import LOOP_DEPTH, LoopQueue, ended

if TYPE_CHECKING:
    from typing_extensions import Self

    class _Native:
        """What both native halves have."""

        def __new__(cls, *settings: Any) -> Self: ...
        @property
        def block_bytes(self) -> int: ...
        def contains(self, key: str | bytes) -> bool: ...
        def load(self, keys: Any, blocks: Any, errors: str) -> list: ...
        def store(self, keys: Any, blocks: Any, parent: Any, errors: str) -> list: ...
        def load_pages(self, keys: Any, addresses: Any, sizes: Any, errors: str) -> list: ...
        def store_pages(self, keys: Any, addresses: Any, sizes: Any, parent: Any, errors: str) -> list: ...
        def remove(self, key: str | bytes, durable: bool) -> bool: ...
        def release(self, keys: Sequence[str | bytes]) -> int: ...
        def keep(self, keys: Sequence[str | bytes], seconds: float) -> int: ...
        def queue(self, depth: int) -> Any: ...
        def close(self) -> None: ...

else:
    _Native = object


def _happened(events: Sequence[Any]) -> None:
    """Waits for events of a device's streams."""
    for event in events:
        event.synchronize()


class Calls(_Native):
    """Keywords for what the native halves take by position, and coroutines. The next base is a native half."""

    _loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopQueue]

    def __new__(cls, *settings: Any) -> Self:
        _logs.start()
        self = super().__new__(cls, *settings)
        self._loops = weakref.WeakKeyDictionary()
        return self

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        super().__init__()

    def __enter__(self) -> Self:
        """Returns this, which the end of the ``with`` block closes."""
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __contains__(self, key: str | bytes) -> bool:
        """Whether a key is resident. No I/O, no use counted."""
        return self.contains(key)

    def load(self, keys: Sequence[str | bytes], blocks: Sequence[Any], *, errors: str = "raise") -> list:
        """Copies blocks into memory: True for each that is there, False for one that was nowhere.

        ``blocks`` has one entry per key: a writable buffer object, a pair ``(address, bytes)`` in registered memory, or
        a list or tuple of either (the segments of the block, in the order of its bytes). All reads are under way at
        once.
        ``errors`` says what becomes of a block that could not be read: ``"raise"`` its exception when all have ended,
        ``"return"`` it in the list, or ``"false"``.

        Raises ArgumentError before anything moved: other lengths than a block's, memory that is not registered.
        Interrupted by a signal (Ctrl-C), the loads go on: a buffer object is kept until they have ended; other memory
        must stay mapped until ``Region.unregister`` or ``close`` has returned.
        """
        return super().load(keys, blocks, errors)

    def store(
        self,
        keys: Sequence[str | bytes],
        blocks: Sequence[Any],
        *,
        parent: str | bytes | None = None,
        after: Sequence[Any] = (),
        errors: str = "raise",
    ) -> list:
        """Stores blocks from memory: True for each, once the write policy is satisfied.

        A list is one chain: the parent of each block is the one before it, ``parent`` the first's, and the cache keeps
        what others continue. Blocks that do not continue one another are stored by a call each. ``blocks`` and
        ``errors`` as for ``load``. Memory must not change until the call returns; interrupted by a signal, until
        ``Region.unregister`` or ``close`` has.

        ``after`` are events of a device's streams, such as ``torch.cuda.Event``: the store begins when all of them have
        happened. Whoever still writes the memory records one; the call waits for it, without the interpreter's lock.
        """
        _happened(after)
        return super().store(keys, blocks, parent, errors)

    def load_pages(self, keys: list, addresses: list[int], sizes: list[int], *, errors: str = "raise") -> list:
        """``load`` with the segments of all blocks in two flat lists, equally many for each key."""
        return super().load_pages(keys, addresses, sizes, errors)

    def store_pages(
        self,
        keys: list,
        addresses: list[int],
        sizes: list[int],
        *,
        parent: str | bytes | None = None,
        after: Sequence[Any] = (),
        errors: str = "raise",
    ) -> list:
        """``store`` with the segments of all blocks in two flat lists, equally many for each key."""
        _happened(after)
        return super().store_pages(keys, addresses, sizes, parent, errors)

    def remove(self, key: str | bytes, *, durable: bool = False) -> bool:
        """Forgets a block in every tier; True if it was resident.

        Returned, the removal survives the end of the process. A power cut may undo it until a `sync` has followed, or
        with ``durable``, which flushes the disks: for several blocks it is enough to remove the last one durably.

        Raises IoError where its record on disk could not be cleared, or the flush failed, and DeadlineError where that
        takes too long. The block is forgotten all the same, but it may be back at the next start.

        A copy in a remote store stays there, for other nodes. This cache offers it again once it has written the block
        anew, or is opened anew.
        """
        return super().remove(key, bool(durable))

    # Coroutines

    async def fetch(self, key: str | bytes) -> bytes | None:
        """The bytes of a block, or None. Cancelled, the read may still finish and make the block resident."""
        block = bytearray(self.block_bytes)
        (found,) = await self.load_async([key], [block])
        return bytes(block) if found else None

    async def load_async(self, keys: Sequence[str | bytes], blocks: Sequence[Any]) -> list:
        """``load`` for coroutines. Cancelled, the loads go on, and their memory is kept until they have ended."""
        loading = await self._loop().submit(lambda queue: queue.submit_load(keys, blocks))
        return _raised(await loading)

    async def store_async(
        self, keys: Sequence[str | bytes], blocks: Sequence[Any], *, parent: str | bytes | None = None
    ) -> list:
        """``store`` for coroutines. Cancelled, it waits until the stores have ended: the memory may change then."""
        storing = await self._loop().submit(lambda queue: queue.submit_store(keys, blocks, parent))
        try:
            return _raised(await asyncio.shield(storing))
        except asyncio.CancelledError:
            await ended(storing)
            raise

    async def remove_async(self, key: str | bytes, *, durable: bool = False) -> bool:
        """``remove`` for coroutines, on a thread of the loop's executor. Cancelled, the removal goes on."""
        remove = functools.partial(self.remove, key, durable=durable)
        return await asyncio.get_running_loop().run_in_executor(None, remove)

    async def release_async(self, keys: Sequence[str | bytes]) -> int:
        """``release`` for coroutines, on a thread of the loop's executor. Cancelled, the release goes on."""
        return await asyncio.get_running_loop().run_in_executor(None, self.release, keys)

    async def keep_async(self, keys: Sequence[str | bytes], seconds: float) -> int:
        """``keep`` for coroutines, on a thread of the loop's executor. Cancelled, the blocks are kept all the same."""
        return await asyncio.get_running_loop().run_in_executor(None, self.keep, keys, seconds)

    def _loop(self) -> LoopQueue:
        loop = asyncio.get_running_loop()
        queue = self._loops.get(loop)
        if queue is None:
            self._forget_closed_loops()
            queue = self._loops[loop] = LoopQueue(loop, self.queue(LOOP_DEPTH))
        return queue

    def _forget_closed_loops(self) -> None:
        """Forgets loops that the futures of their cancelled calls would keep: those are in the values under them."""
        for loop in [ref() for ref in self._loops.keyrefs()]:
            if loop is not None and loop.is_closed() and (queue := self._loops.get(loop)) and queue.is_over():
                self._loops.pop(loop, None)


def _raised(results: list) -> list:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
