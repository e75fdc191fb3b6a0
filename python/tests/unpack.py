"""Unpacks what HiCache needs of an sglang wheel: the Python files of its runtime and kernels, no binaries.

The kernels' sources are never compiled, but their folders are looked for at import.
"""

import sys
import zipfile

WANTED = ("sglang/srt/", "sglang/kernels/", "sglang/jit_kernel/")
SOURCES = ("/jit/include/", "/jit/csrc/", "jit_kernel/include/", "jit_kernel/csrc/")


def main(wheel: str, folder: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        python = [n for n in archive.namelist() if n.endswith(".py") and (n.startswith(WANTED) or n.count("/") == 1)]
        names = python + [n for n in archive.namelist() if any(folder in n for folder in SOURCES)]
        archive.extractall(folder, names)
    print(f"{len(names)} files of {wheel.rsplit('/', 1)[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
