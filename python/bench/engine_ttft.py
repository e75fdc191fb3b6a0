#!/usr/bin/env python3
"""Time to the first tokens of a real engine with random weights: recomputed, from HBM, and from files.

    python bench/engine_ttft.py --path /mnt/nvme0/kv [--path ...] [--engine sglang|vllm] [--backends kvhoist,file]
        [--tokens 8192,32768,65536] [--attention triton] [--layers 32] [--steps FILE] [--machine TEXT] [--csv FILE]

Needs a CUDA device, kvhoist, and SGLang (0.5.17 where torch 2.11 is installed) or vLLM (0.28); newer ones with their
own torch. `bench/engine_bundle` packs all of them for a machine without a network. The model has Llama-8B's shape.
`engine_sglang.py` and `engine_vllm.py` have the engines' settings and their back ends.

For each back end an engine computes all prompts, answers them from HBM, flushes HBM and its host memory, and answers
them from files; a second engine, a new process over the same files, does the same. Pages are 64 tokens, and
generation is greedy: every row says whether its tokens are those of the first engine. A back end with `@1` behind its
name gets the first path alone. Each has a folder of its own below every path, which is removed after it. With
`--steps`, what answers of SGLang with kvhoist were made of follows into a file of rows for docs/results/measured.csv
(`engine_steps.py` has the steps), beside the drives' own time: plain reads of as many bytes of the store's files.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

COLUMNS = ("date commit machine command engine attention tokens what generated ms cached_tokens same_tokens").split()
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
#: Bytes of a token: the keys and values of 8 heads of 128 in bf16, in one layer.
TOKEN_BYTES = 2 * 8 * 128 * 2
#: Seconds until an engine has handed what it computed to its files, at most.
SETTLE_S = 120


def read_ms(paths: list[str], nbytes: int, to_one_place: bool) -> float:
    """Milliseconds of plain reads of so many bytes of kvhoist's files by 32 threads, in pieces of 4 MiB.

    `to_one_place`: each thread has one buffer, which may stay in the processor's cache. Otherwise every piece has a place
    of its own, as an engine's pages have, in memory that was touched before.
    """
    piece, threads = 4 << 20, 32
    files = [path for folder in paths for path in Path(folder).rglob("kvhoist.store") if path.stat().st_size > 1 << 28]
    opened = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // piece - 5) for path in files]
    places = threads if to_one_place else nbytes // piece
    memory = mmap.mmap(-1, places * piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)

    def read(thread: int) -> None:
        for n in range(thread, nbytes // piece, threads):
            at = (thread if to_one_place else n) * piece
            file, pieces = opened[n % len(opened)]
            os.preadv(file, [memoryview(memory)[at : at + piece]], (4 + n // len(opened) % pieces) * piece)

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    ended = time.monotonic()
    for file, _ in opened:
        os.close(file)
    return (ended - began) * 1e3


def written_bytes(paths: list[str]) -> int:
    """Bytes that were written to the drives of the paths since the machine started."""
    devices = {os.stat(path).st_dev for path in paths}
    stats = [Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat") for device in devices]
    return sum(int(stat.read_text().split()[6]) * 512 for stat in stats if stat.exists())


def settle(paths: list[str]) -> None:
    """Waits until an engine has written what it computed: its drives are not written to for 4 s."""
    until, before = time.monotonic() + SETTLE_S, -1
    time.sleep(4)
    while time.monotonic() < until and (now := written_bytes(paths)) != before:
        before = now
        time.sleep(4)


def engines(name: str) -> Any:
    """The module of an engine."""
    return importlib.import_module(f"engine_{name}")


def phase(given: argparse.Namespace) -> None:
    """What one engine answers, as a line of JSON for each answer. A process of its own: engines start others."""
    chosen = random.Random(3)
    prompts = [[chosen.randrange(10, 128_000) for _ in range(n)] for n in map(int, given.tokens.split(","))]
    kind, _, drives = given.backends.partition("@")
    paths = [str(Path(path, re.sub(r"\W", "-", given.backends))) for path in given.path]
    paths = paths[: int(drives)] if drives else paths
    for path in paths:
        os.makedirs(path, mode=0o700, exist_ok=True)
    module = engines(given.engine)
    engine = module.Engine(given, kind, paths)
    # Kernels are compiled at their first call.
    warm = [5 + i % 1000 for i in range(2048)]
    for ids in (warm, [9, *warm]):
        engine.answer(ids, 4)

    def answers(what: str) -> None:
        for ids in prompts:
            began = time.monotonic()
            cached, tokens = engine.answer(ids, given.generate)
            ended = time.monotonic()
            row = {"what": what, "tokens": len(ids), "ms": (ended - began) * 1e3, "cached": cached, "out": tokens}
            row |= {"steps": engine.steps(began, ended), "engine": engine.name}
            print("ANSWER", json.dumps(row), flush=True)

    name = module.BACKENDS[kind] + (f" on {drives} of the drives" if drives else "")
    if given.phase == "second":
        answers(f"{name}, after a restart")
    elif kind == "none":
        answers("recomputed")
        answers("hit in HBM")
    else:
        answers(f"recomputed and stored, {name}")
        settle(paths)
        engine.flush()
        answers(f"{name}, after a flush")
    engine.close()


def answers_of(given: argparse.Namespace, backend: str, which: str) -> Iterator[dict[str, Any]]:
    """Runs a phase in a process of its own, and yields its answers as they come."""
    # The last one of an argument counts.
    command = [sys.executable, __file__, *sys.argv[1:], "--backends", backend, "--phase", which, "--model", given.model]
    environment = dict(os.environ)
    if given.steps and given.engine == "sglang" and backend == "kvhoist":
        here = str(Path(__file__).parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        environment["KVHOIST_STEPS"] = str(Path(given.model, "steps"))
    print(f"# {backend}, {which}", file=sys.stderr, flush=True)
    count = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as child:
        assert child.stdout is not None
        timer = threading.Timer(given.timeout, kill_group, (child.pid,))
        timer.start()
        for line in child.stdout:
            if line.startswith("ANSWER "):
                count += 1
                yield json.loads(line[7:])
            else:
                sys.stderr.write(line)
        timer.cancel()
    kill_group(child.pid)
    if child.returncode or not count:
        print(f"# {backend}, {which}: exit status {child.returncode} after {count} answers", file=sys.stderr)


def kill_group(pid: int) -> None:
    """Ends what an engine has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Measures each back end in turn, and prints rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", required=True, help="a folder on a drive; once for each drive")
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--backends", help="of those of the engine's module; none recomputes and stores nothing")
    parser.add_argument("--tokens", default="8192,32768,65536")
    parser.add_argument("--generate", type=int, default=8, help="tokens generated, in every figure")
    parser.add_argument("--attention", help="the engine's name of it")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--capacity", default="16GiB")
    parser.add_argument("--host-gb", type=int, default=24, help="the engine's own host memory")
    parser.add_argument("--pool-tokens", type=int, default=140_000, help="tokens that HBM has room for")
    parser.add_argument("--timeout", type=int, default=400, help="seconds of one engine")
    parser.add_argument("--machine", default="unnamed")
    parser.add_argument("--commit", default="unknown", help="for the rows")
    parser.add_argument("--label", default="", help="for the rows: the command, if its paths say nothing")
    parser.add_argument("--csv", help="a file for the rows")
    parser.add_argument("--steps", help="a file for the steps of kvhoist's answers in SGLang")
    parser.add_argument("--phase", choices=["first", "second"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.attention = given.attention or engines(given.engine).ATTENTION
    given.backends = given.backends or ",".join(engines(given.engine).BACKENDS)
    if given.phase:
        # This folder has a vllm.py of its own.
        sys.path.append(sys.path.pop(0))
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
        for which in ("first", "second") if backend != "none" else ("first",):
            for one in answers_of(given, backend, which):
                same = expected.setdefault(one["tokens"], one["out"]) == one["out"]
                row = {**always, "command": command, "attention": given.attention, "tokens": one["tokens"]}
                row |= {"engine": f"{one['engine']}, Llama-8B's shape, random weights, {given.layers} layers"}
                row |= {"what": one["what"], "generated": given.generate, "ms": f"{one['ms']:.1f}"}
                row |= {"cached_tokens": one["cached"], "same_tokens": same}
                for writer, file in zip(writers, files, strict=True):
                    writer.writerow(row)
                    file.flush()
                if given.steps and one["steps"]:
                    add_steps(given, [*always.values(), command], one)
        for path in given.path:
            shutil.rmtree(Path(path, re.sub(r"\W", "-", backend)), ignore_errors=True)


def add_steps(given: argparse.Namespace, origin: list[str], answer: dict[str, Any]) -> None:
    """Rows of one answer's steps."""
    nbytes = answer["tokens"] // 64 * 64 * TOKEN_BYTES * given.layers
    rows = {
        **answer["steps"],
        "the drives' own time": read_ms(given.path, nbytes, True),
        "the drives' own time, to as many places": read_ms(given.path, nbytes, False),
    }
    with open(given.steps, "a", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for step, ms in rows.items():
            case = f"{answer['tokens']} tokens, {answer['what'].removeprefix('kvhoist, ')}"
            writer.writerow(["engine_steps", *origin, step, case, f"{ms:.1f}", "ms", "", ""])


if __name__ == "__main__":
    main()
