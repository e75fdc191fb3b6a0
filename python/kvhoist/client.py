"""`connect`: a space of a node's service (`kvhoist serve`), with the calls of `kvhoist.Cache`."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any

from . import _native
from ._calls import Calls
from ._values import config_error, parse_block_bytes, parse_bytes
from .errors import ArgumentError, ClosedError

DEFAULT_BOUNCE_BYTES = "64MiB"


class SharedMemory:
    """Memory that a service can map: a memfd that cannot shrink, of zeros at first. `view` is its bytes.

    Register it with ``Client.register_host``, which keeps it. It is given back with the last that has it.
    """

    def __init__(self, nbytes: int | str) -> None:
        self.nbytes = parse_bytes(nbytes, "nbytes")
        self.fd = os.memfd_create("kvhoist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.view = memoryview(mmap.mmap(self.fd, self.nbytes))

    def __repr__(self) -> str:
        return f"<kvhoist.SharedMemory of {self.nbytes} bytes>"


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    space: str,
    block_bytes: int | str,
    capacity: int | str | None = None,
    host_bytes: int | str | None = None,
    bounce_bytes: int | str = DEFAULT_BOUNCE_BYTES,
    deadline_ms: int = 30_000,
    give_up_ms: int | None = 30_000,
    ask_ms: int | None = None,
    shared: bool = False,
    device: str | None = None,
    device_ordinal: int = 0,
) -> "Client":
    """Connects to the service at ``socket`` and attaches to a space, which is made if there is none.

    ``None`` is where ``kvhoist serve`` listens if nobody names a socket: ``$KVHOIST_SOCKET``; else ``kvhoist.sock`` in
    ``/run/kvhoist`` where that folder exists, else in ``$XDG_RUNTIME_DIR``, else in ``/run``.

    Clients of one user with the same ``space`` and ``block_bytes`` share blocks; with ``shared``, those of all users
    that the service admits. ``capacity`` is the disk of a space
    that is made now, ``host_bytes`` its share of host memory where this is the first client since the service began;
    ``None``, or 0, is all that is left. ``bounce_bytes`` are for blocks whose memory the service cannot map; they are taken
    for the first of them. Calls end after ``deadline_ms``, with a DeadlineError; those that only ask the service's
    index (``match_prefix``, ``contains``, ``touch``, ``release``, ``keep``) after ``ask_ms``, if it is given. Loads and
    stores of memory that the service maps then fail for the blocks that are not begun, and wait for those in flight:
    when such a call has ended, the service uses none of its memory. A service that hangs for ``give_up_ms`` more keeps
    it: the call raises a DeadlineError, whatever its ``errors``, and so do later calls with that memory, whose content
    is not to be used until ``Region.unregister`` has returned. With None such a call waits for as long as the
    connection lasts.

    ``device``: the device whose memory the clients of the space register (`Client.register_device`), as the first client
    since the service began says: ``"cuda"``, the one of number ``device_ordinal`` in this process, or ``"simulated"``.

    Raises UnavailableError where no service answers, and for a device that this process or the service lacks;
    DeadlineError where the service accepts no connection in time, StoreError where too little is left for a new space,
    ConfigError.
    """
    if not isinstance(space, str) or not 0 < len(space.encode(errors="surrogatepass")) <= 255:
        raise config_error("space", space, "a name of 1 to 255 bytes")
    block_bytes = parse_block_bytes(block_bytes)
    if not isinstance(deadline_ms, int) or isinstance(deadline_ms, bool) or not 0 < deadline_ms <= 86_400_000:
        raise config_error("deadline_ms", deadline_ms, "1 to 86400000")
    if give_up_ms is not None and (type(give_up_ms) is not int or not 0 < give_up_ms <= 86_400_000):
        raise config_error("give_up_ms", give_up_ms, "1 to 86400000, or None")
    if ask_ms is not None and (type(ask_ms) is not int or not 0 < ask_ms <= 86_400_000):
        raise config_error("ask_ms", ask_ms, "1 to 86400000, or None")
    if device not in (None, "cuda", "simulated"):
        raise config_error("device", device, "None, 'cuda' or 'simulated'")
    if type(device_ordinal) is not int or not 0 <= device_ordinal < 1024:
        raise config_error("device_ordinal", device_ordinal, "the number of a CUDA device, from 0")
    disk, memory = _share(capacity, "capacity"), _share(host_bytes, "host_bytes")
    bounce = parse_bytes(bounce_bytes, "bounce_bytes")
    socket = _native.default_socket() if socket is None else socket
    deadlines, of_space = (deadline_ms, ask_ms, give_up_ms), (shared, device, device_ordinal)
    return Client(socket, space, block_bytes, (disk, memory, bounce), deadlines, of_space)


class Client(Calls, _native.Client):
    """A space of a node's service. `connect` makes it.

    Usable from any number of threads. While the service is away every call fails at once with an UnavailableError, in
    each block's place for loads and stores; the client connects again by itself (10 ms later at first, then up to a
    second), registers all regions again, and finds the blocks. ``connected`` is False while the service is away.

    Calls are as those of `Cache`, for all clients of the space. A store is True once the service's disk has taken the
    block; with ``by_value``, its memory. Interrupted by a signal, memory of buffer objects is left alone from then on.

    A context manager: leaving it closes the connection, and waits until the service uses none of this memory.
    """

    def __reduce__(self):
        raise TypeError("found a Client to pickle or copy, expected one left where it is: connect another")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self.connected else "away"
        return f"<kvhoist.Client of {self.namespace!r} at {self.socket}, {state}>"

    def register_host(
        self, memory: Any, nbytes: int | None = None, *, pin: bool = False, fd: int | None = None
    ) -> _native.Region:
        """Registers memory to be loaded into and stored from.

        ``memory`` is a `SharedMemory`, a writable buffer object, or an address with ``nbytes``. The service maps a
        `SharedMemory`, and other memory where ``fd`` is the memfd that it is mapped from: blocks then go straight
        between the drive and it, except loads while several clients of the space have registered memory: these go through
        the service's host memory. Blocks of all other memory are copied through ``bounce_bytes`` of the client's own, and
        ``Region.copied`` says so. ``pin`` has the service's kernel keep it pinned.

        An address must stay mapped until ``Region.unregister`` or ``close`` has returned; objects are kept.

        Raises ArgumentError for a range that is empty, registered already, or not mapped from ``fd``;
        UnavailableError where the service is away.
        """
        # Kept to the end of this call: it closes its descriptor when nobody has it any more.
        shared = memory if isinstance(memory, SharedMemory) else None
        if shared is not None:
            memory, fd = shared.view, shared.fd
        if isinstance(memory, int):
            if nbytes is None:
                raise ArgumentError(f"nbytes: found None, expected the bytes at address {memory:#x}")
            return self.register_address(memory, nbytes, _place(memory, nbytes, fd), pin)
        return self.register_buffer(memory, _place(*address_of(memory), fd), pin)

    def register_device(self, address: int, nbytes: int, *, fd: int | None = None) -> _native.Region:
        """Registers memory of the space's device, to be loaded into and stored from, as `Cache.register_device`.

        Memory of a CUDA device is a range of one allocation of ``cudaMalloc``, which the service maps; not that of PyTorch's
        expandable segments. It must stay allocated until ``Region.unregister`` or ``close`` has returned. The simulated
        device's memory is mapped from the memfd ``fd``, which is looked for where it is None.

        Raises ArgumentError without a device, for memory that the service cannot map, and as `register_host`.
        """
        found = file_of(address, nbytes) if fd is None and self.device == "simulated" else None
        try:
            place = _place(address, nbytes, found if fd is None else fd)
            return super().register_device(address, nbytes, place)
        finally:
            if found is not None:
                os.close(found)

    def queue(self, depth: int = 1024) -> _native.Queue:
        """As `Cache.queue`, with a thread of its own, of which at most 16 submissions are in flight.

        Raises IoError where the system has no thread to give. Dropping it drops what is in flight; what the service has
        goes on until the region is unregistered.
        """
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ArgumentError(f"depth: found {depth!r}, expected 1 or more")
        if self.closed:
            raise ClosedError("the client is closed")
        return super().queue(depth)

    def close(self) -> None:
        """Hangs up, and returns when the service uses none of this client's memory. Again: does nothing.

        Raises DeadlineError, each time, where a service that hangs may still use the memory.
        """
        super().close()


def _share(size: int | str | None, name: str) -> int:
    """Bytes of a space; 0 for all that is left."""
    if size is None or size == "0" or (type(size) is int and size == 0):
        return 0
    return parse_bytes(size, name)


def address_of(memory: Any) -> tuple[int, int]:
    """Where a buffer object's memory lies."""
    import ctypes

    view = memoryview(memory).cast("B")
    if view.readonly or not view.nbytes:
        found = f"{view.nbytes} bytes, read-only: {view.readonly}"
        raise ArgumentError(f"memory: found {found}; expected bytes to write to")
    return ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes


def _place(address: int, nbytes: int, fd: int | None) -> tuple[int, int] | None:
    """The memfd and where in it the memory begins; ArgumentError where it is not mapped from there."""
    if fd is None:
        return None
    offset = mapped_from(address, nbytes, fd)
    if offset is None:
        raise ArgumentError(
            f"fd: found {fd}, of which {nbytes} bytes at {address:#x} are no shared mapping; expected the memfd that "
            "this memory is mapped from"
        )
    return fd, offset


def mapped_from(address: int, nbytes: int, fd: int) -> int | None:
    """Where in a file some memory begins; `None` where it is no shared mapping of that file, wholly."""
    file = os.fstat(fd)
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    first, end = None, address
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, offset, where, inode = line.split(maxsplit=5)[:5]
            start, stop = (int(number, 16) for number in span.split("-"))
            if stop <= end or start > end:
                continue
            if access[3] != "s" or where != device or int(inode) != file.st_ino:
                return None
            at = int(offset, 16) + end - start
            if first is None:
                first = at
            elif at != first + end - address:
                return None
            end = stop
            if end >= address + nbytes:
                return first
    return None


def file_of(address: int, nbytes: int) -> int | None:
    """A descriptor, to be closed, of the file that shared memory is mapped from; None where it cannot be had."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _offset, _device, inode, *path = line.split(maxsplit=5)
            start, stop = (int(number, 16) for number in span.split("-"))
            if not start <= address < stop:
                continue
            if access[3] != "s" or not path:
                return None
            for fd in _descriptors(path[0].rstrip("\n"), int(inode)):
                if mapped_from(address, nbytes, fd) is not None:
                    return fd
                os.close(fd)
            return None
    return None


def _descriptors(path: str, inode: int) -> Iterator[int]:
    """Descriptors of a mapped file: by its path, and those of a memfd of this process."""
    with contextlib.suppress(OSError):
        yield os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if path.startswith("/memfd:"):
        for name in os.listdir("/proc/self/fd"):
            # Closed by other threads meanwhile.
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                    yield os.dup(int(name))
