"""Stand-ins for the GPU libraries that torch's wheel is linked with, for machines without a GPU.

torch from the package index needs 2 GB of them only to be imported. Each stand-in has the symbols that torch looks for,
and every call of one fails, as on a machine whose driver finds no device. For tests of what runs on the CPU.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

#: CUDA's "no device".
FAILED = 100

#: The version of a library's symbols, where it is not the library's name.
SYMBOL_VERSIONS = {"libnvshmem_host.so.3": "NVSHMEM"}


def run(*args: str | Path) -> str:
    return subprocess.run(list(map(str, args)), check=True, capture_output=True, text=True).stdout


def main(out: Path) -> None:
    spec = importlib.util.find_spec("torch")
    lib = Path(spec.submodule_search_locations[0], "lib")
    files = [path for path in lib.iterdir() if ".so" in path.name]
    known = {path.name for path in files}
    installed = run("ldconfig", "-p")
    needed = {name for path in files for name in re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-dW", path))}
    missing = sorted(name for name in needed - known if f"\t{name} " not in installed)
    undefined: dict[str, set[str]] = defaultdict(set)
    defined: set[str] = set()
    for path in files:
        for line in run("nm", "-D", path).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            (undefined[version.lstrip("@")] if kind in "Uw" else defined).add(name)
    # Without a version they may come from any library that is loaded: the run-time library always is.
    stray = {name for name in undefined[""] - defined if re.match("cu|nv|nccl", name)}
    out.mkdir(parents=True, exist_ok=True)
    for name in missing:
        version = SYMBOL_VERSIONS.get(name, name)
        symbols = sorted(undefined[version] | (stray if name.startswith("libcudart.") else set()))
        source, script = out / "source.c", out / "version.map"
        source.write_text("".join(map(function, symbols)) or "int nothing;\n")
        versioned = "; ".join(sorted(undefined[version]))
        script.write_text(f"{version} {{ global: {versioned}; }};\n" if versioned else "VERSION { };\n")
        options = ("-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}")
        run("cc", *options, "-o", out / name, source)
    print(f"{len(missing)} stand-ins for GPU libraries in {out}")


def function(name: str) -> str:
    if "String" in name or "Name" in name:
        return f'const char *{name}(void) {{ return "no GPU"; }}\n'
    return f"int {name}(void) {{ return {FAILED}; }}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
