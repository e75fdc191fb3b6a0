"""SGLang for `engine_ttft.py`: HiCache with pages of 64 tokens, prefetches that are waited for, and a third tier."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from engine_steps import read_lines, steps

#: The attention back end of its rows, where none is given.
ATTENTION = "triton"
#: What its third tier may be, and how rows call it.
BACKENDS = {"none": "none", "kvhoist": "kvhoist", "nixl": "SGLang's nixl, POSIX, io_uring", "file": "SGLang's file"}
#: The class of kvhoist's back end, for SGLang's extra config.
KVHOIST = {
    "backend_name": "kvhoist",
    "module_path": "kvhoist.sglang",
    "class_name": "HiCacheKvhoist",
    "interface_v1": 1,
}


def third_tier(kind: str, paths: list[str], capacity: str) -> dict[str, Any]:
    """SGLang's settings of a back end."""
    if kind == "none":
        return {}
    extra: dict[str, Any] = {}
    if kind == "kvhoist":
        extra = {**KVHOIST, "path": paths, "capacity": capacity, "host_bytes": "1GiB"}
        if os.environ.get("KVHOIST_STEPS"):
            extra["module_path"] = "engine_steps"
    elif kind == "nixl":
        # Files of one page each, with O_DIRECT, spread over the folders by their keys.
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = ",".join(paths)
        posix = {"active": True, "use_uring": "true"}
        extra = {"plugin": {"posix": posix}, "use_direct_io": True, "l3_cleaner_enabled": False}
    else:
        # It has one folder: the first drive's.
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = os.path.join(paths[0], "file")
    return {
        "hicache_storage_backend": "dynamic" if kind == "kvhoist" else kind,
        "hicache_storage_backend_extra_config": json.dumps(extra) if extra else None,
        "hicache_storage_prefetch_policy": "wait_complete",
    }


class Engine:
    """One engine."""

    def __init__(self, given: argparse.Namespace, kind: str, paths: list[str]) -> None:
        import sglang

        self._engine = sglang.Engine(
            model_path=given.model, load_format="dummy", skip_tokenizer_init=True, attention_backend=given.attention,
            sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True, page_size=64,
            mem_fraction_static=0.5, chunked_prefill_size=16_384, max_total_tokens=given.pool_tokens,
            enable_hierarchical_cache=kind != "none", hicache_size=given.host_gb,
            hicache_mem_layout="page_first_direct", hicache_io_backend="direct", hicache_write_policy="write_through",
            log_level="warning", random_seed=7, **third_tier(kind, paths, given.capacity),
        )  # fmt: skip
        self.name = f"SGLang {sglang.__version__}"

    def answer(self, ids: list[int], count: int) -> tuple[int, list[int]]:
        """Tokens of the prompt that were not computed, and those that follow it."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        result = self._engine.generate(input_ids=[ids], sampling_params=sampling)[0]
        return int(result["meta_info"].get("cached_tokens") or 0), list(result["output_ids"])

    def flush(self) -> None:
        """Forgets what HBM and host memory have."""
        self._engine.flush_cache()
        time.sleep(1)

    def steps(self, began: float, ended: float) -> dict[str, float]:
        """Milliseconds of an answer's steps, where they are recorded."""
        path = os.environ.get("KVHOIST_STEPS", "")
        return steps(read_lines(path), began, ended) if os.path.exists(path) else {}

    def close(self) -> None:
        """Ends its processes."""
        self._engine.shutdown()
