"""vLLM's KV-offload modules, from an unpacked wheel without its binaries.

Installed must be what `python/test` installs for it: torch, numpy, msgspec, psutil, pydantic, pyzmq, cachetools, cbor2,
regex, prometheus_client, requests.
"""

from __future__ import annotations

import importlib
import sys

from .stand_ins import Blank, add_absent, add_shells, prepare_torch

#: Packages that vLLM imports and KV offload does not need. triton must stay absent: vLLM has an answer to that.
ABSENT = frozenset(
    """
    IPython PIL aiohttp blake3 cloudpickle compressed_tensors cpuinfo cutlass cv2 datasets depyf dill einops fastapi
    gguf grpc huggingface_hub lark llguidance mistral_common modelscope numba openai openai_harmony opentelemetry orjson
    outlines partial_json_parser pybase64 pynvml quack ray safetensors scipy sentencepiece setproctitle soundfile
    starlette tiktoken tokenizers torch_memory_saver torch_npu torchcodec torchvision tqdm transformers tvm_ffi uvicorn
    uvloop watchfiles xgrammar xxhash yaml
    """.split()
)

#: Packages whose `__init__` imports models, tokenizers or servers.
SHELLS = (
    "vllm.entrypoints",
    "vllm.lora",
    "vllm.model_executor",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.layers.quantization.utils",
    "vllm.multimodal",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tokenizers",
    "vllm.tool_parsers",
    "vllm.transformers_utils",
)


def boot(root: str) -> None:
    """Makes vLLM's modules importable from the wheel that was unpacked into `root`."""
    prepare_torch()
    from pydantic_core import core_schema

    # vLLM's settings are pydantic models, some of whose fields have blank types.
    Blank.__get_pydantic_core_schema__ = classmethod(lambda cls, _source, _handler: core_schema.any_schema())
    sys.path.insert(0, root)
    add_shells(root, SHELLS)
    add_absent(ABSENT)
    # The loaders join it to a folder's name.
    importlib.import_module("transformers.utils").SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
