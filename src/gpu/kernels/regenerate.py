#!/usr/bin/env python3
"""Makes copy.ptx of copy.cu, or with --check says whether it is what copy.cu gives.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install nvidia-cuda-nvrtc-cu12==12.9.86
    /tmp/v/bin/python src/gpu/kernels/regenerate.py [--check]

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


def compiled(nvrtc, source):
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"copy.cu", 0, None, None)
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
    with open(os.path.join(HERE, "copy.cu"), "rb") as file:
        ptx = compiled(library(), file.read())
    path = os.path.join(HERE, "copy.ptx")
    if sys.argv[1:] == ["--check"]:
        with open(path) as file:
            sys.exit(0 if file.read() == ptx else "copy.ptx is not what copy.cu gives: run regenerate.py")
    with open(path, "w") as file:
        file.write(ptx)


main()
