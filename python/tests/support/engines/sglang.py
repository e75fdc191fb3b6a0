"""SGLang's HiCache modules, from an unpacked wheel."""

from __future__ import annotations

import sys

from . import kvcacheio
from .stand_ins import add_absent, add_blank, add_shells, prepare_torch

#: Packages that SGLang imports and HiCache does not need. torch, numpy, msgspec, psutil, packaging must be installed.
ABSENT = frozenset(
    """
    IPython PIL aiohttp aiter annotated_types certifi cloudpickle compressed_tensors cutlass datasets deep_gemm dill
    einops fastapi flashinfer gguf grpc huggingface_hub llguidance modelscope numba openai orjson outlines
    prometheus_client pybase64 pydantic pydantic_core pynvml quack regex requests safetensors scipy sentencepiece
    setproctitle sgl_kernel sgl_kernel_npu soundfile starlette tiktoken tokenizers torch_memory_saver torch_npu torchao
    torchcodec torchvision tqdm transformers triton triton_kernels tvm_ffi typing_inspection urllib3 uvicorn uvloop
    xgrammar xxhash yaml zmq
    """.split()
)

#: Packages whose `__init__` imports the server or the kernels.
SHELLS = (
    "sglang",
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.layers.attention",
    "sglang.srt.layers.attention.dsa",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.quantization",
    "sglang.srt.managers",
    "sglang.srt.model_executor",
)

#: Modules of which HiCache needs a name or two.
BLANK = (
    "sglang.kernels.ops.quantization.dsa_quant_k_cache",
    "sglang.kernels.ops.quantization.fp8_kernel",
    "sglang.srt.layers.attention.dsa.utils",
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method",
    "sglang.srt.layers.radix_attention",
    # The controller asks whether a pool is one of these; to import them imports the server.
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
)


def boot(root: str) -> None:
    """Makes HiCache's modules importable from the wheel that was unpacked into `root`."""
    prepare_torch()
    sys.path.insert(0, root)
    add_shells(root, SHELLS)
    for name in BLANK:
        add_blank(name)
    add_blank("sglang.srt.layers.dp_attention", is_dp_attention_enabled=lambda: False)
    add_absent(ABSENT)


def patch_pools(*modules) -> None:
    """Gives the modules of SGLang's host pools their copy operations, which they import only where CUDA is."""
    for module in modules:
        for name, operation in kvcacheio.OPERATIONS.items():
            module.__dict__.setdefault(name, operation)
        for name in ("can_use_hicache_jit_kernel", "can_use_write_back_jit_kernel"):
            if name in module.__dict__:
                module.__dict__[name] = lambda *_args, **_named: False
