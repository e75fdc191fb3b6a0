#!/usr/bin/env python3
"""Makes the .ptx of every .cu here, or with --check says whether each is what its .cu gives.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install nvidia-cuda-nvrtc-cu12==12.9.86
    /tmp/v/bin/python device/src/cuda/kernels/regenerate.py [--check]

The compiler is NVIDIA's run-time compiler, which needs no GPU; its version is fixed so that the result is too.
"""

import ctypes
import glob
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ARCHITECTURE = b"--gpu-architecture=compute_80"  # its PTX runs on every later chip
PTX_VERSION = ".version 7.0"  # what the kernel uses is older, so that drivers of CUDA 11 take it too


def library():
    paths = [os.environ.get("NVRTC", "")]
    for place in sys.path:
        paths += glob.glob(os.path.join(place, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    for path in paths:
        if path and os.path.exists(path):
            return ctypes.CDLL(path)
    sys.exit("found no libnvrtc.so.12, expected the package nvidia-cuda-nvrtc-cu12 or its path in NVRTC")


def compiled(nvrtc, source, name):
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    options = (ctypes.c_char_p * 1)(ARCHITECTURE)
    if nvrtc.nvrtcCompileProgram(program, 1, options) != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(log.value.decode())
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    lines = ptx.value.decode().rstrip().split("\n")
    lines = [PTX_VERSION if line.startswith(".version") else line.rstrip() for line in lines]
    return "\n".join(lines) + "\n"


def main():
    nvrtc = library()
    for source in sorted(glob.glob(os.path.join(HERE, "*.cu"))):
        name = os.path.basename(source)
        with open(source, "rb") as file:
            ptx = compiled(nvrtc, file.read(), name)
        path = source.removesuffix(".cu") + ".ptx"
        if sys.argv[1:] == ["--check"]:
            with open(path) as file:
                if file.read() != ptx:
                    sys.exit(f"{os.path.basename(path)} is not what {name} gives: run regenerate.py")
            continue
        with open(path, "w") as file:
            file.write(ptx)


main()
