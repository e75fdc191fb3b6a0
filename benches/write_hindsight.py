#!/usr/bin/env python3
"""How many of the blocks that LRU writes through to disk are worth it: python3 benches/write_hindsight.py TRACE HOST DISK

TRACE is in Mooncake's format; HOST and DISK are the sizes of the tiers, percent of the trace's blocks. Prints what would be
left of all hits if half of the writes were left out: those with the fewest hits (hindsight), those of the classes with the
fewest hits (fitted to this trace: requests that used the block, its depth, the length of its chain, each to a power of
two), or any (random)."""

import collections
import json
import sys


def requests(path):
    for line in open(path, encoding="utf-8"):
        request = json.loads(line)
        chain = request["hash_ids"]
        # Full blocks only.
        if "input_length" in request:
            chain = chain[: request["input_length"] // 512]
        if chain:
            yield chain


def written(chains, host_slots, disk_slots):
    """All hits, those of host memory, and of each write the class of its block and the hits on disk that it brings."""
    host, disk = collections.OrderedDict(), collections.OrderedDict()
    uses, classes, hits_of, writes = collections.Counter(), {}, {}, []
    hits = in_host = 0
    for chain in chains:
        for block in chain:
            if block in host:
                in_host += 1
            elif block in disk:
                hits_of[block] += 1
            else:
                break
            hits += 1
        # The end of a chain first: LRU then evicts from the end.
        for depth in reversed(range(len(chain))):
            block = chain[depth]
            uses[block] += 1
            for tier in (host, disk):
                if block in tier:
                    tier.move_to_end(block)
                    continue
                tier[block] = True
                if tier is disk:
                    sizes = (uses[block], depth + 1, len(chain))
                    hits_of[block], classes[block] = 0, tuple(size.bit_length() for size in sizes)
        while len(host) > host_slots:
            host.popitem(last=False)
        while len(disk) > disk_slots:
            block, _ = disk.popitem(last=False)
            writes.append((classes.pop(block), hits_of.pop(block)))
    writes += [(classes[block], hits_of[block]) for block in hits_of]
    return hits, in_host, writes


def main():
    path, host, disk = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    chains = list(requests(path))
    blocks = len({block for chain in chains for block in chain})
    hits, in_host, writes = written(chains, int(blocks * host / 100), int(blocks * disk / 100))
    references, half = sum(map(len, chains)), len(writes) // 2
    of_class = collections.defaultdict(list)
    for key, count in writes:
        of_class[key].append(count)
    # The mean of its class stands for each write.
    fitted = [mean for counts in of_class.values() for mean in [sum(counts) / len(counts)] * len(counts)]
    counts = [count for _, count in writes]
    kept = {
        "hindsight": sum(sorted(counts, reverse=True)[:half]),
        "fitted": sum(sorted(fitted, reverse=True)[:half]),
        "random": sum(counts) / 2,
    }
    print(f"hits {hits / references:.4f}, writes {len(writes) / references:.4f} of references")
    print(f"{counts.count(0) / len(counts):.3f} of the writes bring no hit, all together {sum(counts) / len(counts):.1f} each")
    for name, left in kept.items():
        print(f"{name:10} {(in_host + left) / hits:.3f} of the hits with half of the writes")


main()
