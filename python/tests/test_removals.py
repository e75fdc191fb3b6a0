"""What a removal promises: gone when the process is killed, and flushed to the disk where that was asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from nodes import await_unlocked

import kvhoist

BLOCK = 8192
COUNT = 32
SIZES = dict(block_bytes=BLOCK, host_bytes=8 * BLOCK, capacity=(1 << 20) + 64 * BLOCK, direct_io="prefer")

REMOVES_AND_WAITS = """
import asyncio, sys, kvhoist
path, block, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cache = kvhoist.Cache(
    path, block_bytes=block, host_bytes=8 * block, capacity=(1 << 20) + 64 * block, direct_io="prefer"
)
keys = [f"block {n}" for n in range(count)]
cache.store(keys, [n.to_bytes(4, "little") * (block // 4) for n in range(count)])
async def remove():
    return [await cache.remove_async(key, durable=True) for key in keys[1::4]]
removed = [cache.remove(key, durable=True) for key in keys[::4]] + asyncio.run(remove())
assert all(removed) and not cache.remove(keys[0], durable=True)
print("removed", flush=True)
sys.stdin.read()
"""


def test_a_block_that_was_removed_durably_is_gone_when_the_process_is_killed(store_dir):
    command = [sys.executable, "-c", REMOVES_AND_WAITS, str(store_dir), str(BLOCK), str(COUNT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "removed\n"
        child.send_signal(signal.SIGKILL)
    await_unlocked(store_dir)
    with kvhoist.Cache(store_dir, **SIZES) as cache:
        found = cache.contains_each([f"block {n}" for n in range(COUNT)])
        assert found == [n % 4 > 1 for n in range(COUNT)]
        assert cache.get("block 2") == (2).to_bytes(4, "little") * (BLOCK // 4)


# A library that fails every flush while the file named by FAIL_FLUSHES exists.
FAILS_FLUSHES = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int fd) {
    if (access(getenv("FAIL_FLUSHES"), F_OK) == 0) { errno = EIO; return -1; }
    return syscall(SYS_fdatasync, fd);
}
"""

REMOVES_WHILE_FLUSHES_FAIL = """
import asyncio, os, sys, kvhoist
path, block = sys.argv[1], int(sys.argv[2])
cache = kvhoist.Cache(
    path, block_bytes=block, host_bytes=8 * block, capacity=(1 << 20) + 64 * block, direct_io="prefer",
    storage="blocking",
)
keys = ["a", "b", "c"]
cache.store(keys, [bytes(block)] * 3)
assert cache.stats()["storage"] == "blocking"
open(os.environ["FAIL_FLUSHES"], "w").close()
assert cache.remove("a") is True
def refused(remove):
    try:
        remove()
    except kvhoist.IoError:
        return "refused"
    return "it returned"
print(refused(lambda: cache.remove("b", durable=True)))
print(refused(lambda: asyncio.run(cache.remove_async("c", durable=True))))
print(cache.contains_each(keys))
print(refused(cache.close))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) for a library that fails flushes; install one")
def test_a_durable_removal_returns_only_after_a_flush(store_dir):
    library, source = store_dir / "flushes.so", store_dir / "flushes.c"
    source.write_text(FAILS_FLUSHES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    os.mkdir(store_dir / "store", 0o700)
    ended = subprocess.run(
        [sys.executable, "-c", REMOVES_WHILE_FLUSHES_FAIL, str(store_dir / "store"), str(BLOCK)],
        env=os.environ | {"LD_PRELOAD": str(library), "FAIL_FLUSHES": str(store_dir / "fail")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    # Without the flush they would be silent; the blocks are forgotten all the same.
    assert ended.stdout.splitlines() == ["refused", "refused", "[False, False, False]", "refused"]
