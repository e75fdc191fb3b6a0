"""One cache for several processes: a service owns the drive, and its clients load into memory that they share with it.

    python processes.py
"""

import os
import subprocess
import sys
import tempfile

import kvhoist

BLOCK = 1 << 20


def main(folder: str) -> None:
    # Where a service listens and its clients connect if nobody names a socket.
    os.environ["KVHOIST_SOCKET"] = os.path.join(folder, "kvhoist.sock")
    store = os.path.join(folder, "store")
    os.mkdir(store)
    command = [sys.executable, "-m", "kvhoist", "serve", "--path", store, "--capacity", "64MiB", "--host-bytes", "16MiB"]
    command += ["--direct-io", "prefer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            print(service.stdout.readline().strip())
            share()
        finally:
            service.terminate()  # it answers what is under way, flushes, and ends


def share() -> None:
    space = dict(space="example", block_bytes=BLOCK)
    with kvhoist.connect(**space) as one, kvhoist.connect(**space) as other:
        one.store(["a", "a+b"], [b"\1" * BLOCK, b"\2" * BLOCK])
        pool = kvhoist.SharedMemory(2 * BLOCK)  # the service moves blocks straight between it and the drive
        other.register_host(pool)
        assert other.load(["a", "a+b"], [pool.view[:BLOCK], pool.view[BLOCK:]]) == [True, True]
        print(f"what one client stored the other has: {pool.view[0]}, {pool.view[BLOCK]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
