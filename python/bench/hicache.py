"""kvhoist against SGLang's own storage backends, through SGLang's factory and host pools, in interleaved rounds.

    python/test                                              # makes python/.venv, with torch and SGLang's modules
    KVHOIST_SGLANG=python/.venv/sglang-0.5.23 LD_LIBRARY_PATH=python/.venv/no-gpu \\
        python/.venv/bin/python python/bench/hicache.py [--dir DIR] [--model llama8b] [--layout page_first] [--rounds 5]

Each round every entrant gets the same pages: `get` reads batches of 128 pages that were stored before, `set` stores
pages that were not. Bytes are compared after each get. The page cache helps nobody: kvhoist and nixl use O_DIRECT, the
files of `file` are flushed and dropped from it before they are read. `ring` is the bare loop of `benches/ring.rs` at
the page's size, on the blocks of kvhoist's own store (where a file lies on its disk can decide more than who reads it),
with a buffer for each operation in flight, which may stay in the processor's cache; `places` is the same loop with a
buffer for each page of a batch, as an engine has; `memcpy` is the copy of as many bytes within memory. Ratios are
within a round; medians and ranges are printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import sgl  # noqa: E402

BATCH = 128
MODELS = {"llama8b": sgl.LLAMA_8B, "llama70b-tp8": sgl.LLAMA_70B_TP8, "deepseek-v3": sgl.DEEPSEEK_V3}
GIB = 1 << 30


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Entrant:
    """Stores and reads pages of a pool of its own."""

    name = "?"

    def __init__(self, geometry, layout: str, pages: int, folder: Path, options) -> None:
        import torch

        self.pool = sgl.host_pool(geometry, sgl.device_pool(geometry, 1), layout, ratio=float(pages))
        self.page_bytes = self.pool.size_per_token * self.pool.page_size
        self.indices = self.pool.alloc(pages * geometry.page_tokens)
        self.raw = self.pool.kv_buffer.reshape(-1).view(torch.uint8)
        self.folder = folder
        folder.mkdir()
        self.open(geometry, layout, options)

    def open(self, geometry, layout, options) -> None: ...

    def set(self, keys, indices) -> None: ...

    def get(self, keys, indices) -> None: ...

    def drop_caches(self) -> None:
        """Takes what was stored out of the page cache."""

    def close(self) -> None: ...


class Kvhoist(Entrant):
    name = "kvhoist"

    def open(self, geometry, layout, options) -> None:
        capacity = options.pages * 3 * (self.page_bytes + 8192) + (64 << 20)
        extra = sgl.extra_config(self.folder, capacity=capacity, host_bytes=options.host_bytes, direct_io="require")
        self.backend = sgl.backend(geometry, self.pool, extra)

    def set(self, keys, indices) -> None:
        assert all(self.backend.batch_set_v1(keys, indices))

    def get(self, keys, indices) -> None:
        assert all(self.backend.batch_get_v1(keys, indices))

    def close(self) -> None:
        self.backend.close()


class File(Entrant):
    name = "file"

    def open(self, geometry, layout, options) -> None:
        storage = sgl.boot().storage
        self.backend = storage.HiCacheFile(sgl.storage_config(geometry, {}, layout), str(self.folder))

    def set(self, keys, indices) -> None:
        # As HiCacheController._generic_page_set.
        tokens = self.pool.page_size
        pages = [self.pool.get_data_page(indices[i * tokens]) for i in range(len(keys))]
        assert self.backend.batch_set(keys, pages)

    def get(self, keys, indices) -> None:
        # As HiCacheController._generic_page_get.
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        for i, page in enumerate(self.backend.batch_get(keys, targets)):
            assert page is not None
            self.pool.set_from_flat_data_page(indices[i * self.pool.page_size], page)

    def drop_caches(self) -> None:
        for path in self.folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Nixl(Kvhoist):
    """SGLang's nixl backend with its POSIX plugin, O_DIRECT."""

    name = "nixl"
    uring = False

    def open(self, geometry, layout, options) -> None:
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = str(self.folder)
        plugin = {"active": True, **({"use_uring": "true"} if self.uring else {})}
        extra = {"plugin": {"posix": plugin}, "use_direct_io": True}
        config = sgl.storage_config(geometry, extra, layout)
        self.backend = sgl.boot().factory.create_backend("nixl", config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        # The first store of a process says that it succeeded, and its files are not there: let it be one of no use.
        self.backend.batch_set_v1(["0" * 64], self.indices[: self.pool.page_size])

    def close(self) -> None:
        if hasattr(self.backend, "close"):
            self.backend.close()


class NixlUring(Nixl):
    name = "nixl-uring"
    uring = True


class Memcpy(Entrant):
    """The pool's bytes copied to and from other memory: no storage can be faster."""

    name = "memcpy"

    def open(self, geometry, layout, options) -> None:
        self.other = self.raw.clone()

    def _bytes(self, keys) -> slice:
        return slice(0, len(keys) * self.page_bytes)

    def set(self, keys, indices) -> None:
        self.other[self._bytes(keys)].copy_(self.raw[self._bytes(keys)])

    def get(self, keys, indices) -> None:
        self.raw[self._bytes(keys)].copy_(self.other[self._bytes(keys)])


class Ring:
    """The bare loop, in a process of its own, over a number of buffers."""

    def __init__(self, name: str, places: int, kvhoist: Kvhoist, options) -> None:
        self.name = name
        command = ["cargo", "bench", "-q", "-p", "kvhoist", "--bench", "ring", "--"]
        if options.ring_dir:
            command += ["--dir", options.ring_dir, "--blocks", str(options.pages)]
        else:
            (path,) = kvhoist.folder.rglob("kvhoist.store")
            slots = kvhoist.backend.stats()["pools"]["kv"]["tiers"]["disk"]["slots"]
            slot_bytes = -(-kvhoist.page_bytes // 4096) * 4096
            offset = path.stat().st_size - slots * slot_bytes
            command += ["--file", str(path), "--offset", str(offset), "--blocks", str(slots)]
        command += ["--block-bytes", str(kvhoist.page_bytes), "--depth", str(options.depth)]
        command += ["--places", str(places)]
        self.process = subprocess.Popen(
            command, cwd=HERE.parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit("the bare ring loop did not start")
        if not options.ring_dir:
            # What was never written is read without the drive, and written with more work.
            self.run("set", slots)

    def run(self, what: str, count: int) -> tuple[float, float]:
        self.process.stdin.write(f"{'read' if what == 'get' else 'write'} {count}\n")
        self.process.stdin.flush()
        seconds, cpu = map(float, self.process.stdout.readline().split())
        return seconds, cpu

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def batches(count: int):
    return (slice(start, min(start + BATCH, count)) for start in range(0, count, BATCH))


def run(entrant: Entrant, what: str, keys: list[str]) -> tuple[float, float]:
    """Moves the pages of `keys`; wall and processor seconds."""
    tokens = entrant.pool.page_size
    move = getattr(entrant, what)
    cpu, wall = cpu_seconds(), time.perf_counter()
    for batch in batches(len(keys)):
        move(keys[batch], entrant.indices[batch.start * tokens : batch.stop * tokens])
    return time.perf_counter() - wall, cpu_seconds() - cpu


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", default=str(HERE.parents[1] / "target"), help="a folder on the drive")
    parser.add_argument("--model", choices=MODELS, default="llama8b")
    parser.add_argument("--layout", default="page_first")
    parser.add_argument("--pages", type=int, default=BATCH, help="pages of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8, help="operations that the bare loop has in flight")
    parser.add_argument("--ring-dir", help="a folder for a file of the bare loop's own, instead of kvhoist's store")
    parser.add_argument("--host-bytes", default="256MiB")
    parser.add_argument("--restart-pages", type=int, default=0, help="also open a store of so many pages anew")
    parser.add_argument("--only", nargs="*", help="entrants")
    options = parser.parse_args()
    if why := sgl.missing():
        raise SystemExit(why)
    sgl.boot()
    geometry = MODELS[options.model]
    folder = Path(tempfile.mkdtemp(prefix="bench-hicache-", dir=options.dir))
    try:
        compare(geometry, folder, options)
    finally:
        shutil.rmtree(folder)


def contenders(geometry, folder: Path, options) -> tuple[list[Entrant], list[Ring]]:
    classes: list[type[Entrant]] = [Kvhoist, File, Memcpy]
    try:
        import nixl  # noqa: F401

        classes += [Nixl, NixlUring]
    except ImportError:
        print("nixl is not installed: left out (pip install nixl)")
    entrants = []
    for cls in classes:
        if options.only is None or cls.name in options.only:
            try:
                entrants.append(cls(geometry, options.layout, options.pages, folder / cls.name, options))
            except Exception as error:  # noqa: BLE001  A rival that does not start is said so, and left out.
                if cls is Kvhoist:
                    raise
                print(f"{cls.name} did not start, left out: {error}")
    rings = []
    if entrants[0].name == Kvhoist.name:
        places = {"ring": options.depth, "places": max(min(options.pages, BATCH), options.depth)}
        wanted = [name for name in places if options.only is None or name in options.only]
        rings = [Ring(name, places[name], entrants[0], options) for name in wanted]
    return entrants, rings


def compare(geometry, folder: Path, options) -> None:
    import torch

    entrants, rings = contenders(geometry, folder, options)
    page_bytes = entrants[0].page_bytes
    gib = options.pages * page_bytes / GIB
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    noise = torch.randint(0, 256, ((16 << 20) + 13,), dtype=torch.uint8)
    print(
        f"{options.model}, {options.layout}: {options.pages} pages of {page_bytes} bytes a round, {gib:.2f} GiB",
        flush=True,
    )
    for round_ in range(options.rounds + 1):
        tokens = range(round_ * 1_000_003, round_ * 1_000_003 + options.pages * geometry.page_tokens)
        keys = sgl.page_keys(list(tokens), geometry.page_tokens)
        # Who goes first changes: what a drive gives depends on what it has just done.
        order = entrants[round_ % len(entrants) :] + entrants[: round_ % len(entrants)]
        for entrant in order:
            fill(entrant.raw, noise, round_)
            wrote = run(entrant, "set", keys)
            entrant.drop_caches()
            if entrant.name != Memcpy.name:
                entrant.raw.zero_()
            if isinstance(entrant, Kvhoist) and entrant.name == "kvhoist":
                forget_host(entrant)
            read = run(entrant, "get", keys)
            check(entrant, noise, round_)
            if round_ > 0:  # The first round warms up.
                figures.setdefault((entrant.name, "set"), []).append(wrote)
                figures.setdefault((entrant.name, "get"), []).append(read)
        for ring in rings:
            # What it writes over is of this round, and not read again.
            for what in ("get", "set"):
                sample = ring.run(what, options.pages)
                if round_ > 0:
                    figures.setdefault((ring.name, what), []).append(sample)
    report(figures, gib)
    exists(entrants[0])
    counting(entrants[0], keys)
    if options.restart_pages:
        restart(folder / "restart", options.restart_pages)
    for entrant in entrants:
        entrant.close()
    for ring in rings:
        ring.close()


def fill(raw, noise, round_: int) -> None:
    """Noise, another each round."""
    for start in range(0, len(raw), len(noise)):
        piece = raw[start : start + len(noise)]
        piece.copy_(noise[: len(piece)]).add_((round_ * 31 + start // len(noise)) % 251)


def check(entrant, noise, round_: int) -> None:
    """Every byte of every page that was read, whatever lies between them."""
    import torch

    pool = entrant.pool
    got = [pool.get_data_page(int(i)).clone() for i in entrant.indices[:: pool.page_size]]
    fill(entrant.raw, noise, round_)
    for page, start in zip(got, entrant.indices[:: pool.page_size]):
        expected = pool.get_data_page(int(start)).contiguous()
        if not torch.equal(page.contiguous().view(torch.uint8), expected.view(torch.uint8)):
            raise SystemExit(f"{entrant.name} gave other bytes")


def forget_host(entrant) -> None:
    """Lets the store be opened anew, so that no page is still in kvhoist's own memory."""
    store = entrant.backend._stores["kv"]
    store.cache.close()
    store.cache = store._open()


def report(figures: dict, gib: float) -> None:
    for what in ("get", "set"):
        print(f"\n{what:12}{'MiB/s':>28}{'CPU s/GiB':>24}{'kvhoist is times as fast':>30}")
        ours = figures.get(("kvhoist", what))
        for (name, which), samples in figures.items():
            if which != what:
                continue
            speed = [gib * 1024 / wall for wall, _ in samples]
            cpu = [used / gib for _, used in samples]
            line = f"{name:12}{spread(speed, '.0f'):>28}{spread(cpu, '.3f'):>24}"
            if ours and name != "kvhoist":
                line += f"{spread([theirs[0] / mine[0] for theirs, mine in zip(samples, ours)], '.2f'):>30}"
            print(line)


def exists(entrant) -> None:
    """`batch_exists` of 4,096 keys that are there."""
    if entrant.name != "kvhoist":
        return
    import kvhoist

    keys = [f"{i:064x}" for i in range(4096)]
    with kvhoist.Cache(block_bytes=16, host_bytes=4096 * 8192) as cache:
        cache.store(keys, [bytes(16)] * 4096)
        took = []
        for _ in range(200):
            started = time.perf_counter()
            assert cache.match_prefix(keys) == 4096
            took.append((time.perf_counter() - started) * 1e6)
    print(f"\nexists of 4,096 keys: {spread(took, '.0f')} us")


def counting(entrant, keys) -> None:
    """What is left to a thread that counts while pages are read, and what took the rest: the processors or the lock."""
    if entrant.name != "kvhoist":
        return
    stop, counted, ids = threading.Event(), [0], []

    def count() -> None:
        ids.append(threading.get_native_id())
        while not stop.is_set():
            counted[0] += 1

    def used() -> tuple[float, float]:
        """Seconds that the thread has run, and has waited for a processor."""
        ran, waited, _ = Path(f"/proc/self/task/{ids[0]}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9

    def sample(busy: bool) -> tuple[float, float, float]:
        """Counts a second; shares of the time in which it waited for a processor, and for the interpreter's lock."""
        before, (ran, waited), started = counted[0], used(), time.perf_counter()
        if busy:
            # A page that the bare loop has overwritten is a miss: its checksum is verified all the same.
            for batch in batches(len(keys)):
                tokens = entrant.pool.page_size
                entrant.backend.batch_get_v1(keys[batch], entrant.indices[batch.start * tokens : batch.stop * tokens])
        else:
            time.sleep(0.5)
        took, (ran_since, waited_since) = time.perf_counter() - started, used()
        ran, waited = ran_since - ran, waited_since - waited
        return (counted[0] - before) / took, waited / took, max(0.0, 1 - (ran + waited) / took)

    thread = threading.Thread(target=count)
    thread.start()
    kept, processor, lock = [], [], []
    for _ in range(9):
        entrant.set(keys, entrant.indices)
        forget_host(entrant)
        alone, _, _ = sample(busy=False)
        rate, for_processor, for_lock = sample(busy=True)
        kept.append(rate / alone)
        processor.append(for_processor)
        lock.append(for_lock)
    stop.set()
    thread.join()
    print(
        f"a counting thread keeps {spread(kept, '.2f')} of its speed during a get of "
        f"{len(keys) * entrant.page_bytes / GIB:.2f} GiB;\n  of that time it waits {spread(processor, '.2f')} for a "
        f"processor, {spread(lock, '.2f')} for the interpreter's lock"
    )


def restart(folder: Path, pages: int) -> None:
    """A store of so many pages (of 4 KiB: what a start reads does not depend on their size), opened anew."""
    import kvhoist

    folder.mkdir()
    page = 4096
    settings = dict(block_bytes=page, host_bytes="64MiB", capacity=pages * (page + 160) + (64 << 20))
    keys = [f"{i:064x}" for i in range(pages)]
    took = []
    for round_ in range(4):
        started = time.perf_counter()
        with kvhoist.Cache(folder, **settings) as cache:
            found = cache.match_prefix(keys[:BATCH])
            into = [bytearray(page) for _ in range(BATCH)]
            if round_ > 0:
                assert found == BATCH and all(cache.load(keys[:BATCH], into))
                took.append(time.perf_counter() - started)
                assert [bytes(block) for block in into] == [key.encode() * 64 for key in keys[:BATCH]]
                assert cache.match_prefix(keys) == pages
            else:
                # Prompts of 8,192 tokens.
                for start in range(0, pages, BATCH):
                    part = keys[start : start + BATCH]
                    cache.store(part, [key.encode() * 64 for key in part])
    print(f"a store of {pages} pages serves again after {spread(took, '.2f')} s")


if __name__ == "__main__":
    main()
