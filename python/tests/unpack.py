"""Unpacks what HiCache needs of an sglang wheel: the Python files of its runtime and kernels, no binaries."""

import sys
import zipfile

WANTED = ("sglang/srt/", "sglang/kernels/", "sglang/jit_kernel/")


def main(wheel: str, folder: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") and (n.startswith(WANTED) or n.count("/") == 1)]
        archive.extractall(folder, names)
    print(f"{len(names)} files of {wheel.rsplit('/', 1)[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
