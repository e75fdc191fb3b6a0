"""vLLM for `engine_ttft.py`: eager, with blocks of 16 tokens, and chunks of four in whatever it offloads to.

`kvhoist` and `fs` are secondary tiers of vLLM's own offloading, below its host memory; `kvhoist-gpu` moves chunks
between HBM and drives without it.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

#: Before vLLM is imported. Hashes of blocks must be those of the process before.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
#: The attention back end of its rows, where none is given.
ATTENTION = "FLASH_ATTN"
#: What it may offload to, and how rows call it.
BACKENDS = {
    "none": "none",
    "kvhoist": "kvhoist's tier",
    "kvhoist-gpu": "KvhoistConnector",
    "fs": "vLLM's fs",
}
BLOCK = 16
#: Blocks of a chunk: 64 tokens.
CHUNK = {"blocks_per_chunk": 4}
#: Seconds until blocks that are being stored may be forgotten.
FLUSH_S = 60


def offloading(kind: str, paths: list[str], given: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's KV transfer config of a back end."""
    if kind == "none":
        return None
    if kind == "kvhoist-gpu":
        # The least host memory, so that what is loaded comes from the drives.
        extra = {**CHUNK, "path": paths, "capacity": given.capacity, "host_bytes": "256MiB"}
        connector = {"kv_connector": "KvhoistConnector", "kv_connector_module_path": "kvhoist.vllm"}
        return {**connector, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra}  # fmt: skip
    tier: dict[str, Any] = {"type": "fs", "root_dir": os.path.join(paths[0], "fs")}  # It has one folder.
    if kind == "kvhoist":
        tier = {"type": "KvhoistTier", "module_path": "kvhoist.vllm", "path": paths, "capacity": given.capacity}
    extra = {**CHUNK, "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": given.host_gb << 30,
             "secondary_tiers": [tier]}  # fmt: skip
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Engine:
    """One engine."""

    def __init__(self, given: argparse.Namespace, kind: str, paths: list[str]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import torch
        import vllm

        longest = max(map(int, given.tokens.split(",")))
        self._engine = vllm.LLM(
            model=given.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            attention_backend=given.attention, block_size=BLOCK, enable_prefix_caching=True,
            max_model_len=longest + 64, max_num_batched_tokens=16_384, max_num_seqs=4, seed=7,
            num_gpu_blocks_override=given.pool_tokens // BLOCK, gpu_memory_utilization=0.6,
            kv_transfer_config=offloading(kind, paths, given),
        )  # fmt: skip
        # A connector of its own keeps what it has stored hidden after a reset.
        self._resets_connector = kind != "kvhoist-gpu"
        self._sampling = vllm.SamplingParams
        self.name = f"vLLM {vllm.__version__} over torch {torch.__version__.partition('+')[0]}"

    def answer(self, ids: list[int], count: int) -> tuple[int, list[int]]:
        """Tokens of the prompt that were not computed, and those that follow it."""
        sampling = self._sampling(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        result = self._engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
        return int(result.num_cached_tokens or 0), list(result.outputs[0].token_ids)

    def flush(self) -> None:
        """Forgets what HBM and vLLM's host memory have."""
        until = time.monotonic() + FLUSH_S
        while not self._engine.reset_prefix_cache(reset_connector=self._resets_connector):
            if time.monotonic() > until:
                raise TimeoutError(f"vLLM's prefix cache was not reset in {FLUSH_S} s: blocks are in use")
            time.sleep(0.1)
        time.sleep(1)

    def steps(self, _began: float, _ended: float) -> dict[str, float]:
        """Milliseconds of an answer's steps: not recorded."""
        return {}

    def close(self) -> None:
        """Ends its processes: they end with it."""
        del self._engine
