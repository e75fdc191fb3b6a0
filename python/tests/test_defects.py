"""What a program is told of a cache that a defect has ended: a panic of the engine's thread."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# A library that fails the engine's thread one reading of the clock, which it takes for impossible, once the file named by
# FAIL_CLOCK exists.
FAILS_CLOCK = """
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strcmp(name, "kvhoist-reactor") == 0 && unlink(getenv("FAIL_CLOCK")) == 0) { errno = EINVAL; return -1; }
    return syscall(SYS_clock_gettime, clock, now);
}
"""

CLOSES_AFTER_A_DEFECT = """
import os, sys, kvhoist
cache = kvhoist.Cache(
    sys.argv[1], block_bytes=8192, host_bytes=1 << 20, capacity=2 << 20, direct_io="prefer", write_policy="write_back"
)
def told(call):
    try:
        call()
    except kvhoist.ClosedError as error:
        return str(error)
    return "it returned"
cache.store(["a", "b"], [bytes(8192)] * 2)
assert cache.stats()["dirty"] == 2
open(os.environ["FAIL_CLOCK"], "w").close()
print(told(cache.sync))
if sys.argv[2] == "closed":
    print(told(cache.close))
    print(told(cache.close))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) for a library that fails clocks; install one")
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_close_after_a_defect_says_that_blocks_are_lost(store_dir, how):
    library, source = store_dir / "clock.so", store_dir / "clock.c"
    source.write_text(FAILS_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    os.mkdir(store_dir / "store", 0o700)
    ended = subprocess.run(
        [sys.executable, "-c", CLOSES_AFTER_A_DEFECT, str(store_dir / "store"), how],
        env=os.environ | {"LD_PRELOAD": str(library), "FAIL_CLOCK": str(store_dir / "fail")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    synced, *closed = ended.stdout.splitlines()
    assert synced == "the cache is closed"
    # Where nobody has closed it, the interpreter reports what the end of the last reference has come to.
    reported = [line for line in ended.stderr.splitlines() if "ClosedError: " in line]
    assert (len(closed), len(reported)) == {"closed": (2, 0), "dropped": (0, 1)}[how], ended.stderr
    told = closed + reported
    assert all("a defect has ended" in line and "are lost" in line for line in told), told
