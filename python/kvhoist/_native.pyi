"""The native half of the package. Use `kvhoist.Cache`, which is thin on top of `Cache` here."""

import os
from pathlib import Path
from typing import Any, Sequence, final

from typing_extensions import Self

_Key = str | bytes
#: A buffer object, (address, bytes) in registered memory, or a list or tuple of either: the segments of a block.
_Block = Any

__all__ = [
    "Answers",
    "BYTES_EXPECTED",
    "Cache",
    "Client",
    "ENGINES",
    "FileMemory",
    "FileService",
    "FileSource",
    "FileTransfer",
    "Held",
    "Keys",
    "LayerLoad",
    "Queue",
    "Region",
    "__version__",
    "_logs_end",
    "_logs_renew",
    "metrics",
    "_logs_take",
    "chunk_keys",
    "default_socket",
    "files_read",
    "files_write",
    "files_write_at",
    "huge_pool_advice",
    "is_on_root",
    "machine_sizes",
    "parse_bytes",
    "path_bytes",
    "run_command",
    "setting_names",
    "slots_on_each",
]
__version__: str
BYTES_EXPECTED: str
#: The engines of this build, and those that it left out, in words.
ENGINES: str

def parse_bytes(text: str) -> int | None: ...
def setting_names() -> list[str]: ...
def metrics() -> list[tuple[str, str, str]]:
    """Of each metric of a cache: its name, its kind, and what it shows. Those of drives come last."""
def default_socket() -> str: ...
def path_bytes(slots: int, block_bytes: int) -> int: ...
def slots_on_each(capacity: int, paths: int, block_bytes: int) -> int: ...
def run_command(arguments: Sequence[str], findings: Sequence[tuple[str, str, str | None, bool]]) -> int: ...
def machine_sizes(paths: Sequence[str]) -> tuple[int | None, int | None]: ...
def is_on_root(path: str) -> bool: ...
def huge_pool_advice(engine: str, version: str) -> str | None: ...
def _logs_take() -> tuple[list[tuple[int, str, str]], int] | None: ...
def _logs_end() -> None: ...
def _logs_renew() -> None: ...

#: (file's number, first byte in the file, first byte in memory, length)
_Range = tuple[int, int, int, int]
#: Threads, bytes of the longest request, whether the page cache is asked, and how reads come into device memory:
#: ``"auto"``, ``"bounce"`` or ``"cufile"``.
_FileSettings = tuple[int | None, int | None, bool, str]

def files_read(
    files: Sequence[FileSource],
    ranges: Sequence[_Range],
    device: int | None,
    settings: _FileSettings,
    kept: object,
) -> FileTransfer: ...
def files_write(
    path: str, pieces: Sequence[tuple[int, int]], device: int | None, settings: _FileSettings, kept: object
) -> FileTransfer: ...
def files_write_at(
    file: FileSource, ranges: Sequence[_Range], device: int | None, settings: _FileSettings, kept: object
) -> FileTransfer: ...
@final
class FileMemory:
    """The exported memory of a buffer object, which stays where it is while this lives."""

    def __new__(cls, object: Any, writable: bool) -> Self: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class FileService:
    """A connection to a node's service that holds files."""

    def __new__(cls, socket: str | os.PathLike[str]) -> Self: ...
    def hold(self, file: FileSource, keep: bool) -> FileSource: ...

@final
class FileSource:
    """A file that is open for reading."""

    def __new__(cls, path: str) -> Self: ...
    def renewed(self) -> FileSource: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> tuple[int, int, int, int]: ...
    @property
    def direct_align(self) -> int | None: ...
    def tensors(self) -> tuple[list[tuple[str, str, list[int], int, int]], list[tuple[str, str]], int]: ...

@final
class FileTransfer:
    """Ranges on their way. Dropping it ends it, and waits for its requests."""

    def next_ranges(self, seconds: float = ...) -> list[int] | None:
        """The numbers of ranges that have arrived since the last call, once there are some; empty if none has within so
        many seconds (without a number there is no end to the wait); None after the last."""
    def wait(self) -> dict[str, Any]:
        """Waits for the end: what was moved, and how. Once: a second call is an ArgumentError."""
    def cancel(self) -> None:
        """Begins no more requests, also while another thread waits for the end."""
    def progress(self) -> tuple[int, int] | None:
        """Bytes that have arrived, and all; None once `wait` has begun."""

@final
class Region:
    """Memory that blocks are loaded into and stored from in place, registered until `unregister`."""

    @property
    def address(self) -> int:
        """Its first byte."""
    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
    @property
    def pinned(self) -> bool:
        """The kernel keeps it pinned, as a buffer of the ring."""
    @property
    def copied(self) -> bool:
        """A service has not this memory: its blocks are copied through a buffer of the client's."""
    def unregister(self) -> None:
        """Waits until no movement uses the memory, and forgets it: it may be freed afterwards.

        Every caller waits; where it was forgotten already, nothing happens. Interrupted by a signal, the memory may
        still be in use: call again.
        """
    def __enter__(self) -> Region: ...
    def __exit__(self, _kind: object, _value: object, _trace: object, /) -> None: ...

@final
class Queue:
    """Submissions without a waiting caller, and their results. Dropping that of a cache waits for those in flight."""

    @property
    def event_fd(self) -> int:
        """Readable when `drain` has something to give. The queue's own: not to be read from or closed."""
    @property
    def outstanding(self) -> int:
        """Submissions that were not drained yet."""
    def submit_load(self, keys: Sequence[_Key], blocks: Sequence[_Block]) -> int:
        """Begins a load; returns its ticket. Buffer objects are kept until it was drained. BusyError past the depth."""
    def submit_store(self, keys: Sequence[_Key], blocks: Sequence[_Block], parent: _Key | None = None) -> int:
        """Begins a store; returns its ticket. As `submit_load`."""
    def submit_load_pages(self, keys: Sequence[_Key], addresses: Any, sizes: Sequence[int]) -> int:
        """Begins a load into segments of registered memory; returns its ticket.

        All blocks are cut in the same way: ``sizes`` are the bytes of the segments of one, ``addresses`` a buffer
        object with the 64-bit addresses of all, block after block.
        """
    def submit_store_pages(
        self, keys: Sequence[_Key], addresses: Any, sizes: Sequence[int], parent: _Key | None = None
    ) -> int:
        """Begins a store from segments of registered memory. As `submit_load_pages`."""
    def drain(self) -> list[tuple[int, list[bool | BaseException]]]:
        """Completed submissions, oldest first: (ticket, results), with an exception in the place of a failed block."""

@final
class LayerLoad:
    """A load that completes layer by layer. Dropping it changes nothing: the load goes on."""

    @property
    def layers(self) -> int:
        """The number of layers."""
    def wait(self, layer: int, stream: int | None = None) -> None:
        """Waits for a layer, and for every block that it has.

        ``stream`` is the address of a stream of the cache's CUDA device (``torch.cuda.current_stream().cuda_stream``):
        then the stream waits, on the device, and this call only for the layer before: what is put into the stream
        afterwards runs when the layer is complete. Without one, and where host memory plays the device, the call waits.

        Complete does not mean right: a failed layer lets the stream go, too. `blocks` says what came to be.
        """
    def layer(self, layer: int) -> tuple[int, BaseException | None]:
        """Waits for a layer: how many leading blocks have it in place, and the error of the next, if it has one."""
    def blocks(self, errors: str = "return") -> list[bool | BaseException]:
        """Waits for the end of the load: one entry for each block, as of `Cache.load`: True if all layers are there."""
    def poison_address(self, layer: int) -> int:
        """Where kernels find what a layer came to: the device's address of a 32-bit word, which is 0 where all blocks
        have this layer in place, else one more than the number of leading blocks that have it. It means nothing before
        the layer is complete. UnavailableError without a CUDA device."""

@final
class Held:
    """Blocks that stay in host memory until they are released, or this is dropped."""

    def __len__(self) -> int:
        """How many blocks it holds."""
    def release(self) -> None:
        """Lets the blocks go. Again: does nothing."""

@final
class Answers:
    """Whether one key is resident, in the words of an engine that asks for each key of each prompt."""

    def answer(self, key: bytes, context: object = None) -> Any:
        """The answer for the chunk of that name: `known`'s where it has one, else the index's. No I/O, no use."""

def chunk_keys(names: list[bytes]) -> list[bytes]:
    """The keys of an engine's chunks, whose names are hashes already."""

@final
class Keys:
    """The keys of resident blocks, one after the other. It keeps neither a block nor the cache."""

    def __iter__(self) -> Keys: ...
    def __next__(self) -> bytes: ...

class Cache:
    """The engine's cache. One dict of the engine's settings, ``disks`` as a list of (path, bytes or None, slots); see
    `kvhoist.Cache` for the rest."""

    def __new__(cls, settings: dict[str, Any]) -> Self: ...
    @property
    def block_bytes(self) -> int:
        """Size of every block, bytes."""
    @property
    def namespace(self) -> str:
        """The name that keys belong to."""
    @property
    def closed(self) -> bool:
        """True once `close` was called."""
    def match_prefix(self, keys: Sequence[_Key]) -> int:
        """How many leading keys are resident. One short lock, no I/O, no use counted."""
    def contains(self, key: _Key) -> bool:
        """Whether a key is resident. One short lock, no I/O, no use counted."""
    def __len__(self) -> int:
        """How many blocks are resident, each counted once."""
    def __bool__(self) -> bool:
        """True, also while the cache is empty."""
    def __iter__(self) -> Keys:
        """As `keys`."""
    def keys(self) -> Keys:
        """The keys of all resident blocks, as bytes of length 32, in no particular order. No I/O, no use counted.

        A name is listed as the key that it stands for. Blocks that come or go meanwhile may be listed or not; every
        other one is listed once. Callers go on in between. Empty once the cache is closed.
        """
    def clear(self) -> int:
        """Forgets every block that is resident now, as `remove` does; how many there were.

        Blocks that are stored meanwhile may stay or go. Raises the first error of a removal when all have ended.
        Interrupted by a signal, it removes no more blocks.
        """
    def answers(self, resident: Any, absent: Any, known: dict[bytes, Any]) -> Answers:
        """Answers with these objects; `known` has the names of which the program knows better than the index."""
    def touch(self, keys: Sequence[_Key]) -> None:
        """Counts a use of every resident block of a chain, as a load of it would. No I/O."""
    def release(self, keys: Sequence[_Key]) -> int:
        """Releases the chain of `keys`, in prefix order, because it is over: its blocks are evicted first.

        Returns how many blocks are released: from the end up to the first block from which another chain continues, or
        that is kept. A later use takes the release back. Release only what is known to be over: a chain that continues
        after all has to be computed anew. No I/O.
        """
    def keep(self, keys: Sequence[_Key], seconds: float) -> int:
        """Keeps the resident blocks of a chain for so many seconds from now: they are evicted last. Returns how many.

        A quarter of a tier's slots at most; a preference, and no pin. It ends with the time or the process. No I/O.
        """
    def contains_each(self, keys: Sequence[_Key]) -> list[bool]:
        """Which keys are resident."""
    def register_address(self, address: int, nbytes: int, pin: bool) -> Region: ...
    def register_device(self, address: int, nbytes: int) -> Region: ...
    def register_buffer(self, memory: Any, pin: bool) -> Region: ...
    def load(self, keys: Sequence[_Key], blocks: Sequence[_Block], errors: str) -> list: ...
    def store(self, keys: Sequence[_Key], blocks: Sequence[_Block], parent: _Key | None, errors: str) -> list: ...
    def load_pages(self, keys: Sequence[_Key], addresses: list[int], sizes: list[int], errors: str) -> list: ...
    def store_pages(
        self, keys: Sequence[_Key], addresses: list[int], sizes: list[int], parent: _Key | None, errors: str
    ) -> list: ...
    def load_layers(
        self, keys: Sequence[_Key], addresses: Any, sizes: Sequence[int], layer_of: Sequence[int]
    ) -> LayerLoad: ...
    def tiers(self, keys: Sequence[_Key]) -> list[str]:
        """The fastest tier of each leading resident block: ``"device"``, ``"host"``, ``"disk"`` or ``"remote"``. No
        I/O, no use counted."""
    def hold(self, keys: Sequence[_Key], most: int) -> Held:
        """Holds those of the blocks that are in host memory, ``most`` at most, until they are released.

        A held block takes a slot of host memory that nothing else can have: hold few, and not for long.
        """
    def get(self, key: _Key) -> bytes | None:
        """The bytes of a block, or None."""
    def prefetch(self, keys: Sequence[_Key]) -> int:
        """Begins to bring blocks into host memory; returns how many movements it began."""
    def remove(self, key: _Key, durable: bool) -> bool: ...
    def sync(self) -> None:
        """Returns when all that was stored before is written and flushed."""
    def stats(self) -> dict[str, Any]:
        """Figures of the cache since it was opened, and its residency."""
    def samples(self) -> list[list[tuple[str, list[tuple[str, str]], float]]]:
        """The samples of each metric, in the order of `metrics` and without those of drives: suffix, labels, value."""
    def drives(self) -> list[tuple[str, float, int, float | None]]:
        """Of each path whose NVMe drive answers: the path, the share of the drive's life that is used, the
        bytes written to it in its whole life, and the years that are left (None if too little is used)."""
    def validate(self) -> None:
        """Checks every invariant of the index, from scratch; slow. AssertionError with the first that is broken."""
    def queue(self, depth: int) -> Queue: ...
    def close(self) -> None: ...

class Client:
    """A space of a node's service; see `kvhoist.connect` and `kvhoist.Client` for the rest.

    ``sizes``: capacity, host_bytes, bounce_bytes. ``deadlines_ms``: deadline_ms, ask_ms, give_up_ms. ``space``: shared,
    device, device_ordinal.
    """

    def __new__(
        cls,
        socket: str | os.PathLike[str],
        namespace: str,
        block_bytes: int,
        sizes: tuple[int, int, int],
        deadlines_ms: tuple[int, int | None, int | None],
        space: tuple[bool, str | None, int],
    ) -> Self: ...
    @property
    def block_bytes(self) -> int:
        """Size of every block, bytes."""
    @property
    def namespace(self) -> str:
        """The space's name."""
    @property
    def socket(self) -> Path:
        """Where the service listens."""
    @property
    def device(self) -> str | None:
        """The device whose memory it registers: ``"cuda"``, ``"simulated"`` or None."""
    @property
    def closed(self) -> bool:
        """True once `close` was called."""
    @property
    def connected(self) -> bool:
        """True while the service can be reached."""
    def match_prefix(self, keys: Sequence[_Key]) -> int:
        """How many leading keys are resident."""
    def contains(self, key: _Key) -> bool:
        """Whether a key is resident."""
    def contains_each(self, keys: Sequence[_Key]) -> list[bool]:
        """Which keys are resident."""
    def touch(self, keys: Sequence[_Key]) -> None:
        """Counts a use of every resident block of a chain, as a load of it would."""
    def release(self, keys: Sequence[_Key]) -> int:
        """Releases a chain, given in prefix order, for all clients of the space, as `Cache.release`."""
    def keep(self, keys: Sequence[_Key], seconds: float) -> int:
        """Keeps the resident blocks of a chain for so many seconds, for all clients of the space, as `Cache.keep`."""
    def register_address(self, address: int, nbytes: int, memfd: tuple[int, int] | None, pin: bool) -> Region: ...
    def register_buffer(self, memory: Any, memfd: tuple[int, int] | None, pin: bool) -> Region: ...
    def register_device(self, address: int, nbytes: int, memfd: tuple[int, int] | None) -> Region: ...
    def load_layers(
        self, keys: Sequence[_Key], addresses: Any, sizes: Sequence[int], layer_of: Sequence[int]
    ) -> LayerLoad: ...
    def tiers(self, keys: Sequence[_Key]) -> list[str]:
        """The fastest tier of each leading resident block, as `Cache.tiers`."""
    def hold(self, keys: Sequence[_Key], most: int) -> Held:
        """Holds those of the blocks that are in the service's host memory, as `Cache.hold`: of all clients of a space
        together a quarter of its host memory, and no longer than the connection lasts."""
    def load(self, keys: Sequence[_Key], blocks: Sequence[_Block], errors: str) -> list: ...
    def store(self, keys: Sequence[_Key], blocks: Sequence[_Block], parent: _Key | None, errors: str) -> list: ...
    def load_pages(self, keys: Sequence[_Key], addresses: list[int], sizes: list[int], errors: str) -> list: ...
    def store_pages(
        self, keys: Sequence[_Key], addresses: list[int], sizes: list[int], parent: _Key | None, errors: str
    ) -> list: ...
    def get(self, key: _Key) -> bytes | None:
        """The bytes of a block, or None."""
    def prefetch(self, keys: Sequence[_Key]) -> int:
        """Begins to bring blocks into the service's host memory; returns how many movements it began."""
    def remove(self, key: _Key, durable: bool) -> bool: ...
    def sync(self) -> None:
        """Returns when all that was stored in the space before, by any client, is written and flushed."""
    def stats(self, briefly: bool = False) -> dict[str, Any]:
        """The space's figures for all clients, since the service opened it. ``briefly``: within ``ask_ms``."""
    def queue(self, depth: int) -> Queue: ...
    def close(self) -> None: ...

