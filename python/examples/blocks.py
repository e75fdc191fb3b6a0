"""Blocks in, blocks out, and again after a restart.

    python blocks.py [FOLDER]        # a folder on the drive to be used; a temporary one if none is named
"""

import sys
import tempfile

import kvhoist

BLOCK = 1 << 20


def block(n: int) -> bytes:
    """What an engine would have computed for a prompt's n-th block."""
    return n.to_bytes(4, "little") * (BLOCK // 4)


def main(folder: str) -> None:
    # The namespace names all that changes the bytes of a block but not its key: model, dtype, rank.
    settings = dict(block_bytes=BLOCK, host_bytes="16MiB", capacity="64MiB", namespace="example", direct_io="prefer")
    prompt = ["system", "system+question", "system+question+answer"]
    with kvhoist.Cache(folder, **settings) as cache:
        # A list is one chain: each block continues the one before it, and is evicted before it.
        cache.store(prompt, [block(n) for n in range(3)])
        # Blocks that continue nothing, or something else, are stored by calls of their own.
        cache.store(["other"], [block(7)])
        cache.store(["system+joke"], [block(8)], parent="system")
        print(f"{cache.match_prefix([*prompt, 'more'])} of 4 blocks resident")

    # The files outlive the process. What was stored is verified when it is read.
    with kvhoist.Cache(folder, **settings) as cache:
        out = [bytearray(BLOCK) for _ in range(4)]
        found = cache.load([*prompt, "more"], out)
        assert found == [True, True, True, False], found
        assert [bytes(one) for one in out[:3]] == [block(n) for n in range(3)]
        print(f"after a restart: {found.count(True)} of 4 blocks loaded, {cache.stats()['tiers']['disk']['hits']} from disk")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
