"""Requests of an asyncio server that share a prefix: what one has computed the others load.

    python coroutines.py
"""

import asyncio
import tempfile

import kvhoist

BLOCK = 64 << 10


async def answer(cache: kvhoist.Cache, request: list[str]) -> int:
    """The blocks of a request, in order; returns how many it had to compute."""
    computed, parent = 0, None
    for key in request:
        block = await cache.fetch(key)  # bytes, or None for a miss; other coroutines go on meanwhile
        if block is None:
            computed += 1
            await cache.store_async([key], [bytes([len(key)]) * BLOCK], parent=parent)
        parent = key
    return computed


async def main(folder: str) -> None:
    with kvhoist.Cache(folder, block_bytes=BLOCK, host_bytes="4MiB", capacity="16MiB", direct_io="prefer") as cache:
        first = await answer(cache, ["system", "system+a"])
        others = await asyncio.gather(*(answer(cache, ["system", f"system+{name}"]) for name in "abc"))
        print(f"the first request computed {first} blocks, the next three {others}")
        assert first == 2 and others == [0, 1, 1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
