#!/usr/bin/env python3
"""Time to the first tokens of a real SGLang engine with random weights: recomputed, from HBM, and from its third tier.

    python bench/engine_ttft.py --path /mnt/nvme0/kv [--path ...] [--backends kvhoist,file] [--tokens 8192,32768,65536]
        [--attention triton] [--layers 32] [--steps FILE] [--machine TEXT] [--csv FILE]

Needs a CUDA device, SGLang (0.5.17 where torch 2.11 is installed; newer ones with their own torch) and kvhoist.
`bench/engine_bundle` makes a folder with all of them for a machine without a network. The model has Llama-8B's shape.

For each back end an engine computes all prompts, answers them from HBM, flushes HBM and its host memory, and answers
them from the third tier; a second engine, a new process over the same store, does the same. Pages are 64 tokens,
prefetches are waited for (`wait_complete`), and generation is greedy: every row says whether its tokens are the
recomputed ones. With `--steps`, what kvhoist's answers were made of follows into a file of rows for
docs/results/measured.csv (`engine_steps.py` has the steps), beside the drives' own time: plain reads of as many bytes
of the store's files.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_steps import read_lines, steps

COLUMNS = ("date commit machine command engine attention tokens what generated ms cached_tokens same_tokens").split()
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
#: The class of kvhoist's back end, for SGLang's extra config.
KVHOIST = {
    "backend_name": "kvhoist",
    "module_path": "kvhoist.sglang",
    "class_name": "HiCacheKvhoist",
    "interface_v1": 1,
}
#: Seconds until SGLang has handed what it computed to its third tier.
BACKUP_S = 120


def third_tier(backend: str, paths: list[str], capacity: str) -> dict[str, Any]:
    """SGLang's settings of a back end."""
    if backend == "kvhoist":
        extra = {**KVHOIST, "path": paths, "capacity": capacity, "host_bytes": "1GiB"}
        if os.environ.get("KVHOIST_STEPS"):
            extra["module_path"] = "engine_steps"
        return {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(extra)}
    if backend == "file":
        # It has one folder: the first drive's.
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = os.path.join(paths[0], "file")
    return {"hicache_storage_backend": backend}


def read_ms(paths: list[str], nbytes: int) -> float:
    """Milliseconds of plain reads of so many bytes of kvhoist's files by 32 threads, in pieces of 4 MiB."""
    piece, threads = 4 << 20, 32
    files = [path for folder in paths for path in Path(folder).rglob("kvhoist.store") if path.stat().st_size > 1 << 28]
    opened = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // piece - 5) for path in files]

    def read(thread: int) -> None:
        buffer = mmap.mmap(-1, piece)
        for n in range(thread, nbytes // piece, threads):
            file, pieces = opened[n % len(opened)]
            os.preadv(file, [buffer], (4 + n // len(opened) % pieces) * piece)

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    ended = time.monotonic()
    for file, _ in opened:
        os.close(file)
    return (ended - began) * 1e3


def stored_bytes(paths: list[str]) -> int:
    """Bytes that the file systems of the paths have taken."""
    free = [os.statvfs(path) for path in paths]
    return sum((one.f_blocks - one.f_bfree) * one.f_frsize for one in free)


def settle(backend: str, paths: list[str]) -> None:
    """Waits until a back end has written: SGLang's own files stop growing. kvhoist's stores are allocated at once."""
    if backend == "kvhoist":
        time.sleep(8)
        return
    until, before = time.monotonic() + BACKUP_S, -1
    while time.monotonic() < until and (now := stored_bytes(paths)) != before:
        before = now
        time.sleep(4)


class Engine:
    """One engine, and the answers that it gave."""

    def __init__(self, given: argparse.Namespace) -> None:
        import sglang

        self.engine = sglang.Engine(
            model_path=given.model, load_format="dummy", skip_tokenizer_init=True, attention_backend=given.attention,
            sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True, page_size=64,
            mem_fraction_static=0.5, chunked_prefill_size=16_384, max_total_tokens=given.pool_tokens,
            enable_hierarchical_cache=True, hicache_size=given.hicache_gb, hicache_mem_layout="page_first_direct",
            hicache_io_backend="direct", hicache_write_policy="write_through", log_level="warning", random_seed=7,
            hicache_storage_prefetch_policy="wait_complete",
            **third_tier(given.backends, given.path, given.capacity),
        )  # fmt: skip
        self.version = sglang.__version__
        # Kernels are compiled at their first call.
        warm = [5 + i % 1000 for i in range(2048)]
        for ids in (warm, [9, *warm]):
            self.answer(ids, 4)

    def answer(self, ids: list[int], count: int) -> tuple[float, int, list[int]]:
        """Milliseconds, cached tokens, and the tokens."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        self.began = time.monotonic()
        result = self.engine.generate(input_ids=[ids], sampling_params=sampling)[0]
        self.ended = time.monotonic()
        spent = (self.ended - self.began) * 1e3
        return spent, int(result["meta_info"].get("cached_tokens") or 0), list(result["output_ids"])

    def steps(self) -> dict[str, float]:
        """Milliseconds of the last answer's steps, where they are recorded."""
        path = os.environ.get("KVHOIST_STEPS", "")
        return steps(read_lines(path), self.began, self.ended) if os.path.exists(path) else {}


def phase(given: argparse.Namespace) -> None:
    """What one engine answers, as a line of JSON for each answer. A process of its own: SGLang's start others."""
    chosen = random.Random(3)
    prompts = [[chosen.randrange(10, 128_000) for _ in range(n)] for n in map(int, given.tokens.split(","))]
    engine = Engine(given)

    def answers(what: str) -> None:
        for ids in prompts:
            ms, cached, tokens = engine.answer(ids, given.generate)
            row = {"what": what, "tokens": len(ids), "ms": ms, "cached": cached, "out": tokens}
            row["steps"] = engine.steps()
            print("ANSWER", json.dumps({**row, "version": engine.version}), flush=True)

    name = "SGLang's file" if given.backends == "file" else given.backends
    if given.phase == "first":
        answers("recomputed")
        answers("hit in HBM")
        settle(given.backends, given.path)
        engine.engine.flush_cache()
        time.sleep(1)
        answers(f"{name}, after a flush")
    else:
        answers(f"{name}, after a restart")
    engine.engine.shutdown()


def answers_of(given: argparse.Namespace, backend: str, which: str) -> list[dict[str, Any]]:
    """Runs a phase in a process of its own."""
    # The last one of an argument counts.
    command = [sys.executable, __file__, *sys.argv[1:], "--backends", backend, "--phase", which, "--model", given.model]
    environment = dict(os.environ)
    if given.steps and backend == "kvhoist":
        here = str(Path(__file__).parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        environment["KVHOIST_STEPS"] = str(Path(given.model, "steps"))
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=given.timeout, check=False, env=environment
    )
    found = [json.loads(line[7:]) for line in ended.stdout.splitlines() if line.startswith("ANSWER ")]
    if ended.returncode or not found:
        print(f"# {backend}, {which}: exit status {ended.returncode} after {len(found)} answers", file=sys.stderr)
    return found


def main() -> None:
    """Measures each back end in turn, and prints rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", required=True, help="a folder on a drive; once for each drive")
    parser.add_argument("--backends", default="kvhoist,file", help="kvhoist, file, nixl: what SGLang's start takes")
    parser.add_argument("--tokens", default="8192,32768,65536")
    parser.add_argument("--generate", type=int, default=8, help="tokens generated, in every figure")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--capacity", default="16GiB")
    parser.add_argument("--hicache-gb", type=int, default=24)
    parser.add_argument("--pool-tokens", type=int, default=140_000)
    parser.add_argument("--timeout", type=int, default=400, help="seconds of one engine")
    parser.add_argument("--machine", default="unnamed")
    parser.add_argument("--commit", default="unknown", help="for the rows")
    parser.add_argument("--label", default="", help="for the rows: the command, if its paths say nothing")
    parser.add_argument("--csv", help="a file for the rows")
    parser.add_argument("--steps", help="a file for the steps of kvhoist's answers")
    parser.add_argument("--phase", choices=["first", "second"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.phase:
        return phase(given)
    with tempfile.TemporaryDirectory() as folder:
        config = {**MODEL, "num_hidden_layers": given.layers}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        # One folder for all engines: a model's path is part of what its pages are known by.
        given.model = folder
        measure(given)


def measure(given: argparse.Namespace) -> None:
    """All back ends."""
    command = given.label or " ".join(["python/bench/engine_ttft.py", *sys.argv[1:]])
    always = {"date": datetime.date.today().isoformat(), "commit": given.commit, "machine": given.machine}
    files = [sys.stdout] + ([open(given.csv, "w", encoding="utf-8")] if given.csv else [])
    writers = [csv.DictWriter(file, COLUMNS, lineterminator="\n") for file in files]
    for writer in writers:
        writer.writeheader()
    expected: dict[int, list[int]] = {}
    for backend in given.backends.split(","):
        for which in ("first", "second"):
            for one in answers_of(given, backend, which):
                same = expected.setdefault(one["tokens"], one["out"]) == one["out"]
                row = {**always, "command": command, "attention": given.attention, "tokens": one["tokens"]}
                row |= {"engine": f"SGLang {one['version']}, Llama-8B's shape, random weights, {given.layers} layers"}
                row |= {"what": one["what"], "generated": given.generate, "ms": f"{one['ms']:.1f}"}
                row |= {"cached_tokens": one["cached"], "same_tokens": same}
                for writer, file in zip(writers, files, strict=True):
                    writer.writerow(row)
                    file.flush()
                if given.steps and one["steps"]:
                    add_steps(given, [*always.values(), command], one)


def add_steps(given: argparse.Namespace, origin: list[str], answer: dict[str, Any]) -> None:
    """Rows of one answer's steps."""
    # Of a page of 64 tokens: the keys and values of 8 heads of 128, in each layer.
    nbytes = answer["tokens"] // 64 * 64 * 2 * 8 * 128 * 2 * given.layers
    rows = {**answer["steps"], "the drives' own time": read_ms(given.path, nbytes)}
    with open(given.steps, "a", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for step, ms in rows.items():
            case = f"{answer['tokens']} tokens, {answer['what'].removeprefix('kvhoist, ')}"
            writer.writerow(["engine_steps", *origin, step, case, f"{ms:.1f}", "ms", "", ""])


if __name__ == "__main__":
    main()
