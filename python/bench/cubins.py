#!/usr/bin/env python3
"""Zeros the kernels of a shared object that a machine does not run, so that it packs small.

    python bench/cubins.py FILE.so --sm 90 [--only REGEX]

`.nv_fatbin` holds a list of images for each translation unit: PTX, and code for one architecture each. A driver takes
the images of its own architecture and reads no others, so their bytes may be anything. With `--only`, images of the
architecture that have attention kernels none of which matches go, too: the names of the kernels are those of an
image's sections, demangled. Images whose names cannot be read, because they are compressed, are kept.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, CODE = 1, 2


def section(path: str, name: str) -> tuple[int, int]:
    """Offset and size of a section in its file."""
    listed = subprocess.run(["readelf", "-SW", path], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        fields = line.partition("]")[2].split()
        if fields and fields[0] == name:
            return int(fields[3], 16), int(fields[4], 16)
    raise SystemExit(f"{path}: found no section {name}, expected a library with kernels")


def images(data: bytes, begin: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and size of each image."""
    at = begin
    while at + 16 <= begin + size:
        magic, _, head, rest = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        one, end = at + head, at + head + rest
        while one < end:
            kind, _, head, nbytes = struct.unpack_from("<HHIQ", data, one)
            (architecture,) = struct.unpack_from("<I", data, one + 28)
            yield kind, architecture, one + head, nbytes
            one += head + nbytes
        at = end


def kernels(image: bytes) -> str:
    """The names of its kernels, one a line; none where it is compressed."""
    mangled = sorted(set(re.findall(rb"\.text\.(_Z[A-Za-z0-9_]+)", image)))
    found = subprocess.run(["c++filt", "-p"], input=b"\n".join(mangled), check=True, capture_output=True)
    return found.stdout.decode()


def main() -> None:
    """Rewrites a file in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--sm", type=int, required=True, help="the architecture that stays: 90")
    parser.add_argument("--only", help="what a name must match, of images with attention kernels")
    given = parser.parse_args()
    data = bytearray(Path(given.file).read_bytes())
    kept = zeroed = 0
    for kind, architecture, at, nbytes in list(images(data, *section(given.file, ".nv_fatbin"))):
        stays = kind == CODE and architecture == given.sm
        if stays and given.only:
            names = kernels(data[at : at + nbytes])
            stays = "FlashAttnFwdSm" not in names or bool(re.search(given.only, names))
        if stays:
            kept += nbytes
        else:
            zeroed += nbytes
            data[at : at + nbytes] = bytes(nbytes)
    Path(given.file).write_bytes(data)
    print(f"{given.file}: {kept >> 10} KiB of kernels stay, {zeroed >> 10} KiB are zeros")


if __name__ == "__main__":
    main()
