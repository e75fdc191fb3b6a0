#!/usr/bin/env python3
"""Time to the first token over the length of a prompt: recomputed, and loaded from host memory and from drives.

    python bench/ttft.py --path /mnt/nvme0/kv [--path ...] [--models llama-8b,...] [--tokens 2048,...] [--csv FILE]

Needs a CUDA device, torch, transformers and kvhoist. The models have random weights in bf16 and real shapes; those with
fewer layers than the real ones say so in their names. A time is that of `PrefixCache`'s call, the forward over the
tokens that are left, and the first token on the host. Beside it, in the same run, the bare copy of the same bytes from
pinned memory to the GPU, and the bare read of as many bytes of the same files by 32 threads with O_DIRECT, in pieces of
4 MiB; both with the time of one token added. Each also layer by layer (`layerwise`), and with a turn of `--new-tokens`
behind the stored prompt, where the time of that turn with its prefix in place is added instead.

Rows on standard output and in FILE: docs/results/README.md names the columns.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import mmap
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import torch
import transformers
from transformers.cache_utils import DynamicCache

from kvhoist.transformers import PrefixCache

COLUMNS = (
    "date commit machine command model attention tokens what runs ms ms_min ms_max bytes bare_ms over_bare same_token"
).split()
PIECE = 4 << 20
THREADS = 32


def config(name: str) -> transformers.PreTrainedConfig:
    """A shape by its name."""
    common: dict[str, Any] = {"vocab_size": 128_256, "max_position_embeddings": 1 << 18, "pad_token_id": 0}
    if name == "llama-8b":
        return transformers.LlamaConfig(
            **common, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8,
        )  # fmt: skip
    if name == "llama-70b-8-of-80-layers":
        return transformers.LlamaConfig(
            **common, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=8, num_attention_heads=64,
            num_key_value_heads=8,
        )  # fmt: skip
    if name == "mla-16-heads-27-dense-layers":
        # DeepSeek-V2-Lite's attention. transformers keeps MLA's keys and values of all heads, not its latents.
        return transformers.DeepseekV3Config(
            **common, hidden_size=2048, intermediate_size=10_944, num_hidden_layers=27,
            num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=27, n_routed_experts=8,
            n_group=1, topk_group=1, num_experts_per_tok=2,
        )  # fmt: skip
    if name == "gpt-oss-120b-kv":
        # The KV of gpt-oss-120b: 36 layers, 8 heads of 64, every second with a window of 128; dense instead of experts.
        return transformers.Qwen3Config(
            **common, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, use_sliding_window=True, sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 18,
        )  # fmt: skip
    if name == "hybrid-36-mamba2-4-attention":
        # As Granite 4.0's small hybrids: Mamba 2 with 64 heads of 64 and states of 128, dense.
        return transformers.GraniteMoeHybridConfig(
            **common, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=4,
            layer_types=(["mamba"] * 9 + ["attention"]) * 4, mamba_n_heads=64, mamba_d_head=64, mamba_d_state=128,
            mamba_expand=2, mamba_n_groups=1, num_local_experts=0, shared_intermediate_size=8192,
        )  # fmt: skip
    sys.exit(f"--models: found {name!r}, expected one of {', '.join(MODELS)}")


MODELS = ["llama-8b", "llama-70b-8-of-80-layers", "mla-16-heads-27-dense-layers", "gpt-oss-120b-kv",
          "hybrid-36-mamba2-4-attention"]  # fmt: skip


def milliseconds(call: Callable[[], Any], runs: int) -> tuple[list[float], Any]:
    """Times of a call that ends on the host, and its last result."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return times, result


@torch.no_grad()
def first_token(model: Any, ids: torch.Tensor, past: Any) -> int:
    """The first token after a prompt whose prefix is in `past`."""
    rest = ids[:, int(past.get_seq_length()) :]
    return int(model(rest, past_key_values=past, logits_to_keep=1).logits[0, -1].argmax())


def bare_copy(nbytes: int, runs: int) -> list[float]:
    """Times of copies of so many bytes from pinned memory, a GiB at a time."""
    host = torch.empty(min(nbytes, 1 << 30), dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def copy() -> None:
        for at in range(0, nbytes, 1 << 30):
            size = min(nbytes - at, 1 << 30)
            device[:size].copy_(host[:size], non_blocking=True)

    return milliseconds(copy, runs + 1)[0][1:]


class BareRead:
    """Reads of a store's own files, past its head, by threads with a buffer each."""

    def __init__(self, folders: list[str]) -> None:
        files = [
            path
            for folder in folders
            for path in Path(folder).rglob("*")
            if path.is_file() and path.stat().st_size > 64 << 20
        ]
        self._files = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size) for path in files]
        self._buffers = [mmap.mmap(-1, PIECE) for _ in range(THREADS)]
        self._pool = ThreadPoolExecutor(THREADS)

    def read(self, nbytes: int) -> None:
        """Reads so many bytes, striped over the files as the store's blocks are."""
        pieces = -(-nbytes // PIECE)

        def some(thread: int) -> None:
            for n in range(thread, pieces, THREADS):
                fd, size = self._files[n % len(self._files)]
                at = (16 << 20) + n // len(self._files) * PIECE
                os.preadv(fd, [self._buffers[thread]], at % (size - 2 * PIECE) // 4096 * 4096)

        list(self._pool.map(some, range(THREADS)))

    def times(self, nbytes: int) -> list[float]:
        """Times of such a read, in milliseconds."""
        return milliseconds(lambda: self.read(nbytes), 2)[0][1:]

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()
        for fd, _ in self._files:
            os.close(fd)


class Rows:
    """Rows of results, printed and kept as they come."""

    def __init__(self, given: argparse.Namespace) -> None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = given.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        command = given.label or shlex.join(["python/bench/ttft.py", *sys.argv[1:]])
        self._always = {
            "date": datetime.date.today().isoformat(),
            "commit": commit,
            "machine": given.machine,
            "command": command,
        }
        self._files = [sys.stdout] + ([open(given.csv, "w", encoding="utf-8")] if given.csv else [])
        self._writers = [csv.DictWriter(file, COLUMNS, lineterminator="\n") for file in self._files]
        for writer in self._writers:
            writer.writeheader()

    def add(self, times: list[float], bare: list[float] | None = None, **values: Any) -> None:
        """One row; `times` and `bare` in milliseconds."""
        row = {**self._always, **values, "runs": len(times), "ms": f"{statistics.median(times):.1f}"}
        row |= {"ms_min": f"{min(times):.1f}", "ms_max": f"{max(times):.1f}"}
        if bare:
            row |= {"bare_ms": f"{statistics.median(bare):.1f}"}
            row |= {"over_bare": f"{statistics.median(times) / statistics.median(bare):.2f}"}
        for file, writer in zip(self._files, self._writers):
            writer.writerow(row)
            file.flush()


class Bench:
    """One model, its prompts, and the folders of its store."""

    def __init__(self, name: str, lengths: list[int], given: argparse.Namespace, rows: Rows) -> None:
        torch.manual_seed(1)
        with torch.device("cuda"):
            self.model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16).eval()
        self.rows, self.runs = rows, given.runs
        self.always = {"model": name, "attention": f"transformers sdpa, torch {torch.__version__.partition('+')[0]}"}
        self.settings = {"capacity": given.capacity, "block_tokens": given.block_tokens, "revision": "random"}
        made = {n: torch.randint(10, 128_000, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths}
        self.prompts = {n: ids.cuda() for n, ids in made.items()}
        self.folders = [os.path.join(path, name) for path in given.path]
        for folder in self.folders:
            os.makedirs(folder, mode=0o700)
        self.new_tokens = given.new_tokens
        #: By length: the first token, the time of one token and of a new turn, and the bytes that are loaded.
        self.tokens: dict[int, int] = {}
        self.single: dict[int, float] = {}
        self.added: dict[int, float] = {}
        self.nbytes: dict[int, int] = {}

    def opened(self, host_bytes: str) -> PrefixCache:
        """The prefixes of this model."""
        return PrefixCache(self.model, self.folders, host_bytes=host_bytes, **self.settings)

    def plain(self, ids: torch.Tensor) -> tuple[int, Any]:
        """The first token without kvhoist, and the cache."""
        past = DynamicCache(config=self.model.config)
        return first_token(self.model, ids, past), past

    def hit(self, prefixes: PrefixCache, ids: torch.Tensor, layerwise: bool = False) -> int:
        """The first token with it; a prompt that was not stored is no hit."""
        past = prefixes(ids, layerwise=layerwise)
        stored = self.stored_length(ids)
        if past.prefix_length < stored - stored % prefixes.block_tokens - 1:
            print(f"# found {past.prefix_length} of {ids.shape[1]} tokens", file=sys.stderr, flush=True)
        return first_token(self.model, ids, past)

    def stored_length(self, ids: torch.Tensor) -> int:
        """Tokens of a prompt that were stored: all but a new turn."""
        return max(n for n in self.prompts if n <= ids.shape[1])

    def turn(self, n: int) -> torch.Tensor:
        """A prompt and a new turn, another at each call."""
        return torch.cat([self.prompts[n], torch.randint(10, 128_000, (1, self.new_tokens), device="cuda")], 1)

    @torch.no_grad()
    def recompute(self, n: int) -> None:
        """A row, and what one token costs after so many: what a hit takes beside its copy."""
        ids = self.prompts[n]
        times, (self.tokens[n], past) = milliseconds(lambda: self.plain(ids), self.runs if n <= 32_768 else 1)
        self.rows.add(times, **self.always, tokens=n, what="recomputed")
        step = {"past_key_values": past, "logits_to_keep": 1}
        self.single[n] = min(milliseconds(lambda: int(self.model(ids[:, -1:], **step).logits.argmax()), 3)[0])
        if self.new_tokens:
            turn = self.turn(n)[:, n:]

            def added() -> int:
                past.crop(n)
                return int(self.model(turn, **step).logits.argmax())

            self.added[n] = min(milliseconds(added, 3)[0])

    def store(self, prefixes: PrefixCache, n: int) -> None:
        """A row: the first prompt pays for its store."""
        times, _ = milliseconds(lambda: first_token(self.model, self.prompts[n], prefixes(self.prompts[n])), 1)
        self.nbytes[n] = kept_bytes(prefixes, n)
        self.rows.add(times, **self.always, tokens=n, what="recomputed and stored", bytes=self.nbytes[n])

    def load(self, prefixes: PrefixCache, n: int, runs: int, layerwise: bool = False) -> tuple[list[float], bool]:
        """The times of hits, and whether the first token is the recomputed one."""
        times, token = milliseconds(lambda: self.hit(prefixes, self.prompts[n], layerwise), runs)
        return times, token == self.tokens[n]

    def turns(self, prefixes: PrefixCache, n: int, runs: int, layerwise: bool) -> list[float]:
        """The times to the first token of new turns behind a stored prompt."""
        turns = [self.turn(n) for _ in range(runs)]
        return milliseconds(lambda: self.hit(prefixes, turns.pop(), layerwise), runs)[0]

    def add(self, n: int, what: str, times: list[float], bare: list[float], same: bool | None, more: float) -> None:
        """A row of hits beside bare movements of the same bytes and what is computed then."""
        bare = [one + more for one in bare]
        self.rows.add(times, bare, **self.always, tokens=n, what=what, bytes=self.nbytes[n], same_token=same)

    def run(self, host_bytes: str, small_host_bytes: str) -> None:
        """All rows."""
        self.plain(self.prompts[min(self.prompts)])
        with self.opened(host_bytes) as prefixes:
            for n in self.prompts:
                self.recompute(n)
                self.store(prefixes, n)
                bare = bare_copy(self.nbytes[n], self.runs)
                for layerwise, how in ((False, ""), (True, ", layer by layer")):
                    times, same = self.load(prefixes, n, self.runs, layerwise)
                    self.add(n, f"host memory{how}", times, bare, same, self.single[n])
                    if self.new_tokens:
                        what = f"host memory, {self.new_tokens} new tokens{how}"
                        self.add(n, what, self.turns(prefixes, n, self.runs, layerwise), bare, None, self.added[n])
                gc.collect()
                torch.cuda.empty_cache()
        self.restart(small_host_bytes)
        for folder in self.folders:
            shutil.rmtree(folder)

    def restart(self, host_bytes: str) -> None:
        """Rows of hits that come from the drives: the host tier is empty after a restart, so each prompt does once."""
        ways = [(layerwise, new) for new in (False, True)[: 1 + bool(self.new_tokens)] for layerwise in (False, True)]
        loads: dict[Any, tuple[list[float], list[float], list[bool]]] = {
            (n, layerwise, new): ([], [], []) for n in self.prompts for layerwise, new in ways
        }
        for layerwise, new in ways * self.runs:
            with self.opened(host_bytes) as prefixes:
                reader = BareRead(self.folders)
                for n in self.prompts:
                    times, bare, same = loads[n, layerwise, new]
                    bare += reader.times(self.nbytes[n])
                    if new:
                        times += self.turns(prefixes, n, 1, layerwise)
                    else:
                        took, right = self.load(prefixes, n, 1, layerwise)
                        times += took
                        same.append(right)
                reader.close()
        for (n, layerwise, new), (times, bare, same) in loads.items():
            how = (f", {self.new_tokens} new tokens" if new else "") + (", layer by layer" if layerwise else "")
            more = self.added[n] if new else self.single[n]
            self.add(n, f"drives, after a restart{how}", times, bare, None if new else all(same), more)


def kept_bytes(prefixes: PrefixCache, tokens: int) -> int:
    """Bytes that are loaded for so many tokens."""
    store = prefixes.store
    end = -(-(tokens - 1) // store.block_tokens)
    if store.has_states:
        end, tokens = (tokens - 1) // store.block_tokens, (tokens - 1) // store.block_tokens * store.block_tokens + 1
    blocks = [end - group.first_token(tokens - 1) // store.block_tokens for group in store.groups]
    return sum(count * nbytes for count, nbytes in zip(blocks, store.block_bytes))


def main() -> None:
    """Measures each model in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", action="append", required=True, help="an empty folder on a drive; once for each drive"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="2048,4096,8192,16384,32768,65536,131072")
    parser.add_argument("--tokens-max", type=int, default=65_536, help="the longest prompt of all models but the first")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=0, help="of a turn behind each stored prompt")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--capacity", default="40GiB", help="on the drives, of one model")
    parser.add_argument("--host-bytes", default="20GiB", help="of the host tier, as much as the longest prompt's KV")
    parser.add_argument("--small-host-bytes", default="2GiB", help="of the host tier while the drives are measured")
    parser.add_argument("--machine", default="", help="for the rows")
    parser.add_argument("--commit", default="", help="for the rows, outside of a checkout")
    parser.add_argument("--label", default="", help="for the rows: the command, if its paths say nothing")
    parser.add_argument("--csv", help="a file for the rows")
    given = parser.parse_args()
    rows = Rows(given)
    lengths = [int(n) for n in given.tokens.split(",")]
    for at, name in enumerate(given.models.split(",")):
        bench = Bench(name, [n for n in lengths if at == 0 or n <= given.tokens_max], given, rows)
        bench.run(given.host_bytes, given.small_host_bytes)
        del bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
