"""Unpacks what tests drive of an engine's wheel: its Python files, few binaries."""

import sys
import zipfile

#: What is taken of each package's wheel, by the beginning of the name.
PYTHON = {
    # HiCache is part of the runtime. The kernels' sources are never compiled, but their folders are looked for.
    "sglang": ("sglang/srt/", "sglang/kernels/", "sglang/jit_kernel/"),
    "vllm": ("vllm/",),
    "lmcache": ("lmcache/",),
}
SOURCES = ("/jit/include/", "/jit/csrc/", "jit_kernel/include/", "jit_kernel/csrc/")

#: What the benches compare with: the engines of vLLM's `fs` tier and of LMCache's `fs_native`. And LMCache's bitmaps.
BINARIES = ("vllm/fs_io_C.", "lmcache/lmcache_native.", "lmcache/native_storage_ops.", "lmcache/lmcache_fs.")


def main(wheel: str, folder: str) -> None:
    file_name = wheel.rsplit("/", 1)[-1]
    wanted = PYTHON[file_name.split("-")[0]]
    with zipfile.ZipFile(wheel) as archive:
        python = [n for n in archive.namelist() if n.endswith(".py") and (n.startswith(wanted) or n.count("/") == 1)]
        names = python + [n for n in archive.namelist() if any(folder in n for folder in SOURCES)]
        names += [n for n in archive.namelist() if n.startswith(BINARIES)]
        archive.extractall(folder, names)
    print(f"{len(names)} files of {file_name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
