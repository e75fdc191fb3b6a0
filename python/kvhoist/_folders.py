"""Folders of stores: made below a path that is there, private at every level, on a file system with room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

from . import _native
from ._values import printable
from .errors import StoreError

logger = logging.getLogger(__name__)

#: The share of a file system that a new store leaves free.
FREE_SHARE_MIN = 0.01

#: How long a store may be locked that is about to be opened.
LOCK_WAIT_S = 1.0

#: Paths that were warned of.
_warned: set[str] = set()


def make_folder(path: str, nbytes: int) -> None:
    """Makes the folder of a setting, whose stores will take so many bytes.

    Its parent must be there: a missing one is a drive that is not mounted, and the stores would fill the root file system.
    Of a folder that is on the root file system all the same, the log has a warning. Raises StoreError.
    """
    parent = os.path.dirname(os.path.normpath(path)) or "."
    if not os.path.lexists(path):
        if not os.path.isdir(parent):
            raise StoreError(
                f"{printable(path)}: found no folder {printable(parent)}, expected a folder, or a new name in one that "
                "exists; mount the missing drive, create the folder (mkdir -m 700), or correct `path`"
            )
        _make_private(Path(path))
    if not os.path.isdir(path):
        raise StoreError(
            f"{printable(path)}: found something else than a folder, expected a folder; correct `path`"
        )
    if path not in _warned and _native.is_on_root(path):
        _warned.add(path)
        logger.warning(
            "kvhoist: %s is on the root file system, of which its stores will take %.1f GiB; if a drive belongs there, it "
            "is not mounted",
            printable(path), nbytes / (1 << 30),
        )  # fmt: skip


def make_store_folder(path: str, directory: str, file_bytes: int) -> None:
    """Makes the folder of a store, somewhere below the path of the setting.

    Raises StoreError, also where the file system has no room for a new store.
    """
    make_folder(path, file_bytes)
    make_private_folders(directory)
    if os.path.exists(os.path.join(directory, "kvhoist.store")):
        return
    system = os.statvfs(directory)
    free = system.f_bavail * system.f_frsize
    reserve = int(system.f_blocks * system.f_frsize * FREE_SHARE_MIN)
    if file_bytes + reserve > free:
        raise StoreError(
            f"{printable(directory)}: found {free} bytes free, expected {file_bytes} for the store and {reserve} to be "
            "left; lower `capacity`, or free space"
        )


def refuse_locked(directory: str) -> None:
    """Raises StoreError where another cache has the store of a folder open. A store that is not there has no lock."""
    path = os.path.join(directory, "kvhoist.store")
    give_up = time.monotonic() + LOCK_WAIT_S
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # That of a process which was just killed goes with the last of its I/O.
                if time.monotonic() > give_up:
                    raise StoreError(
                        f"{printable(path)}: found a lock on it: the store is open in another process, or twice in "
                        "this one; expected a store that is not open; close the other, or choose another `path`"
                    ) from None
                time.sleep(0.005)


def make_private_folders(directory: str) -> None:
    """Makes the folders of a path that are missing, each of mode 0700 whatever the umask."""
    path = Path(directory)
    # os.makedirs gives its mode to the last folder only, and the umask takes from it.
    for folder in [*reversed(path.parents), path]:
        if not folder.is_dir():
            _make_private(folder)


def open_private(path: str, others: int = 0o077) -> BinaryIO:
    """Opens a file of this user alone to read it and to append to it; it is made where there is none.

    Where others may write to the folder, what is there may be theirs: no link is followed, and nothing changed. `others`
    are the rights that are taken from a file of earlier versions: who may read a lock may take it. Raises StoreError.
    """
    user = os.geteuid()
    expected = f"a file that is user {user}'s and no other's; remove it, or choose another `path`"
    try:
        # Of a pipe, the open would wait.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        file = open(os.open(path, flags, 0o600), "rb+", buffering=0)
    except OSError as error:
        found = "a link" if error.errno == errno.ELOOP else f"what cannot be opened ({error.strerror})"
        raise StoreError(f"{printable(path)}: found {found}, expected {expected}") from error
    status = os.fstat(file.fileno())
    found = f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}, with {status.st_nlink} names"
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == user and status.st_nlink == 1
    if not is_own:
        file.close()
        raise StoreError(f"{printable(path)}: found {found}, expected {expected}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & others:
        try:
            os.fchmod(file.fileno(), mode & ~others)
        except OSError as error:
            file.close()
            raise StoreError(f"{printable(path)}: found {found}, expected {expected}") from error
    return file


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        # Another process has made it, or it is no folder; opening it reports that.
        return
    if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
        folder.chmod(0o700)
