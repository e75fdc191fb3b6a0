#!/usr/bin/env python3
"""Writes from the code the pages of docs/reference (settings, metrics and errors), the keywords of the Python package, and
the versions of engines that pages name.

    docs/generate.py            # writes them
    docs/generate.py --check    # exit status 1 where one is not what the code says
"""

from __future__ import annotations

import ast
import re
import sys
from functools import partial
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).resolve().parent.parent
HEAD = "<!-- Written by docs/generate.py from {source}: change that, and run it. -->\n\n"


def source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def plain(doc: list[str]) -> str:
    """Lines of a Rust comment as a paragraph: links into the code become their words."""
    text = " ".join(line.strip() for line in doc).strip()
    text = re.sub(r"\[(`[^`]*`)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    return re.sub(r"\[(`[^`]*`)\]", r"\1", text)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def documented(body: str, item: str) -> list[tuple[str, str]]:
    """Each match of `item` in a Rust block, with the comment above it."""
    found, doc = [], []
    for line in body.splitlines():
        line = line.strip()
        if line.startswith("///"):
            doc.append(line[3:])
        elif match := re.match(item, line):
            found.append((match[1], plain(doc)))
            doc = []
        elif line and not line.startswith("#["):
            doc = []
    return found


def block(text: str, begin: str) -> str:
    """A block of Rust from the line that begins so to its closing brace."""
    return text[text.index(begin) :].split("\n}", 1)[0]


def setting_lines() -> list[tuple[str, str, str, str]]:
    """Each line of the table of settings: how serde reads it, its name, its type, its field."""
    # `spin_us(u32) => spin_us, 0..=10_000, "microseconds";`, and above it `#[serde(deserialize_with = "size")]` for sizes.
    line = r'^(?:    #\[serde\(deserialize_with = "(\w+)"\)\]\n)?    (\w+)\((.+)\) => ([\w.]+)(?:, .+)?;$'
    return re.findall(line, source("src/config/settings.rs"), re.M)


# The struct of each group of settings.
GROUPS = {"": "Config", "host": "HostConfig", "device": "DeviceConfig", "disk": "DiskConfig"}
GROUPS |= {"remote": "RemoteConfig", "limits": "Limits"}


def settings() -> str:
    files = [f"src/config/{name}.rs" for name in ("mod", "groups", "remote", "choices")]
    text = "".join(map(source, [*files, "device/src/choices.rs", "index/src/policy.rs"]))
    words, kinds, defaults = {}, {}, {}
    for group, struct in GROUPS.items():
        body = block(text, f"pub struct {struct} {{")
        at = f"{group}." if group else ""
        words |= {at + field: words for field, words in documented(body, r"pub (\w+): ")}
        kinds |= {at + field: kind for field, kind in re.findall(r"pub (\w+): ([^,\n]+),", body)}
        # `blocking_threads: 16,` of the default.
        values = re.findall(r"[{,]\s+(\w+): ([^,\n]+?)(?=,| })", block(text, f"impl Default for {struct} {{"))
        defaults |= {at + field: value for field, value in values}
    fields = [(name, at) for _, name, _, at in setting_lines()]
    rows = {name: f"{default(defaults[at], kinds[at], text)} | {cell(words[at])}" for name, at in fields}
    for tier in ("host", "device"):
        blocks = re.fullmatch(r"Capacity::Blocks\((\d+)\)", defaults[f"{tier}.capacity"])[1]
        rows[f"{tier}_bytes"] = f"none | {cell(words[f'{tier}.capacity'])} In bytes, rounded down to whole slots."
        rows[f"{tier}_blocks"] = f"{blocks} | The same in slots; either of the two."
    first = ["block_bytes", "namespace", "host_bytes", "host_blocks", "disks"]
    table = ["| setting | default | |", "|---|---|---|"]
    table += [f"| `{name}` | {rows[name]} |" for name in dict.fromkeys(first + list(rows))]
    enums = []
    for name, at in fields:
        if f"pub enum {kinds[at]} {{" in text:
            values = documented(block(text, f"pub enum {kinds[at]} {{"), r"(\w+),")
            lines = [f"- `{snake(value)}`: {words}" for value, words in values]
            enums.append(f"### `{name}`\n\n" + "\n".join(lines))
    return (
        HEAD.format(source="src/config/, device/src/choices.rs and index/src/policy.rs")
        + "# Settings of the engine\n\n*For developers who open a cache, in Rust or in Python.*\n\n"
        "Methods of `kvhoist::Config`, its serialized form, and keywords of `kvhoist.Cache`. In Python, and in the settings of\n"
        "the engines' adapters, `path` with `capacity` stands for `disks`, and host memory is 64 MiB, or one block, where nothing is\n"
        "said; the adapters' own settings are on the pages of [SGLang](../sglang.md), [vLLM](../vllm.md) and\n"
        "[LMCache](../lmcache.md). Files and keywords take a size as a number of\n"
        "bytes, or as text with a unit: `64KiB`, `1.5 MiB`, `200Gi` (powers of 1024), `10GB` (powers of 1000).\n\n"
        + "\n".join(table)
        + "\n\n## Values\n\n"
        + "\n\n".join(enums)
        + "\n"
    )


def default(value: str, kind: str, text: str) -> str:
    if value.endswith("::default()"):
        variants = block(text, f"pub enum {kind} {{")
        variant = re.search(r"#\[default\]\s+(\w+)", variants)[1]
        return f"`{snake(variant)}`"
    if choice := re.fullmatch(rf"{kind}::(\w+)", value):
        return f"`{snake(choice[1])}`"
    value = value.removesuffix(".into()").replace("_", "").replace('"', "")
    if shifted := re.fullmatch(r"(\d+) << (10|20|30)", value):
        return f"{shifted[1]} {dict(zip(('10', '20', '30'), ('KiB', 'MiB', 'GiB')))[shifted[2]]}"
    return {"None": "none", "Vec::new()": "none"}.get(value, f"{value}")


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def metrics() -> str:
    declared, figures, more = (source(f"src/{name}.rs") for name in ("metrics", "cache/stats", "cache/exported"))
    plain = {f"kvhoist_{field}_total": words for field, words in re.findall(r'^ {16}(\w+):\s+"([^"]+)"(?: = .+)?;$', declared, re.M)}
    plain |= dict(re.findall(r'\w+: "(kvhoist_\w+)".*?"([^"]+)";', figures, re.S))
    # Name and words, in the order of a tuple's or a struct's fields.
    pairs = r'"(kvhoist_\w+)",\s*(?:help: )?"([^"]+)"'
    live = re.findall(pairs, block(declared, "const LIVE").split("];")[0] + block(more, "const GDR_IN_USE"))
    every = plain | dict(re.findall(pairs, declared + more))
    rust, python = every, every.keys() - dict(live).keys()
    service = dict(re.findall(pairs, source("cli/src/http/figures.rs")))
    rows = ["| name | kind | Rust | Python | service | |", "|---|---|---|---|---|---|"]
    for name in sorted(rust.keys() | service.keys()):
        kind = "histogram" if name.endswith("_seconds") else "counter" if name.endswith("_total") else "gauge"
        words = rust.get(name) or service[name]
        exported = " | ".join("yes" if name in names else "" for names in (rust, python, python | service.keys()))
        rows.append(f"| `{name}` | {kind} | {exported} | {cell(words)} |")
    return (
        HEAD.format(source="src/metrics.rs, src/cache/stats.rs, src/cache/exported.rs and cli/src/http/figures.rs")
        + "# Metrics\n\n*For operators.*\n\n"
        "Where to get them: [monitoring](../monitoring.md). The label `cache` is the namespace of a cache or the name of a\n"
        "service's space; `number` tells two of the same name apart (not in Rust). Figures of drives have `path`, in a service\n"
        "also `drive`, and `cache` in Python alone. Other labels: `tier`, `route`, `engine`; `version` and `storage` of\n"
        "`kvhoist_info`; `reason`, of `kvhoist_writes_declined_total` `value` or `budget`, of `kvhoist_retired`,\n"
        "`kvhoist_read_only` and `kvhoist_remote_read_only` why (not in Rust).\n\n" + "\n".join(rows) + "\n"
    )


def errors() -> str:
    body = block(source("base/src/error.rs"), "pub enum Error {")
    variants = documented(body.replace(" {\n", ",\n"), r"([A-Z]\w+),")
    tree = ast.parse(source("python/kvhoist/errors.py"))
    classes = {node.name: " ".join((ast.get_docstring(node) or "").split()) for node in tree.body if isinstance(node, ast.ClassDef)}
    names = dict(re.findall(r'Error::(\w+)(?: \{ \.\. \})? => "(\w+)"', source("python/src/errors.rs")))
    rows = ["| Rust | Python | |", "|---|---|---|"]
    for name, words in variants:
        # The fault of a service decides between classes, and the rows above have them.
        python = f"`{names.pop(name)}`" if name in names else "by its `fault`, one of these" if name == "Service" else None
        assert python, f"Error::{name} has no class in python/src/errors.rs"
        rows.append(f"| `Error::{name}` | {python} | {cell(words)} |")
    told = set(re.findall(r"`(\w+Error)`", "\n".join(rows)))
    for name, words in classes.items():
        if name not in told and name != "Error":
            rows.append(f"| | `{name}` | {cell(words)} |")
    return (
        HEAD.format(source="base/src/error.rs and python/kvhoist/errors.py")
        + "# Errors\n\n*For developers who call a cache.*\n\n"
        "Split by what the caller can do. In Python all are subclasses of `kvhoist.Error`.\n\n" + "\n".join(rows) + "\n"
    )


# Settings that are parameters of the Python package's `Cache` by another way.
OF_CACHE = {"block_bytes", "namespace", "host_bytes", "host_blocks", "disks"}


def keywords() -> str:
    types = {"bool": "bool", "f64": "float", "Layout": "Sequence[int]"}
    types |= dict.fromkeys(("u8", "u32", "u64", "usize"), "int")
    lines = []
    for read, name, kind, at in setting_lines():
        inner = re.sub(r"^Option<(.+)>$", r"\1", kind)
        word = "_Size" if read else types.get(inner, "str")
        if name == "device":
            # Those with two names are not in the table.
            lines += ["device_bytes: _Size", "device_blocks: int"]
        if name not in OF_CACHE:
            lines.append(f"{name}: {word}" + (" | None" if inner != kind else ""))
    return (
        '"""Keywords of `Cache` that are settings of the engine, with their types: docs/reference/settings.md describes them.\n\n'
        'Written by docs/generate.py from src/config/settings.rs: change that, and run it.\n"""\n\n'
        "from __future__ import annotations\n\n"
        "from typing import Sequence, TypedDict, Union\n\n"
        '__all__ = ["EngineSettings"]\n\n'
        "_Size = Union[int, str]\n\n\n"
        "class EngineSettings(TypedDict, total=False):\n"
        '    """Settings of the engine. Choices are words, checked when the cache is opened. A size is a number of bytes, or text\n'
        '    such as ``"200GiB"``."""\n\n' + "".join(f"    {line}\n" for line in lines)
    )


# The engines of python/kvhoist/_versions.py whose first and last version pages name.
ENGINES = {"SGLang": "sglang", "vLLM": "vllm", "transformers": "transformers"}


def with_versions(page: str) -> str:
    """A page with the versions that are supported, where it names a first and a last one: `vLLM 0.28 to 0.33`."""
    words, text = run_path(str(ROOT / "python/kvhoist/_versions.py"))["words"], source(page)
    for name, engine in ENGINES.items():
        text = re.sub(rf"\b{name} [\d.]+ to [\d.]*\d", f"{name} {words(engine)}", text)
    return text


WRITTEN = {
    "docs/reference/settings.md": settings,
    "docs/reference/metrics.md": metrics,
    "docs/reference/errors.md": errors,
    "python/kvhoist/_settings.py": keywords,
}
for name in ("docs/files", "docs/sglang", "docs/start/sglang", "docs/start/vllm", "docs/transformers", "docs/vllm", "python/README"):
    WRITTEN[f"{name}.md"] = partial(with_versions, f"{name}.md")


def main() -> int:
    stale = []
    for name, write in WRITTEN.items():
        path, text = ROOT / name, write()
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    for name in stale:
        print(f"{name}: found another text than the code gives, expected the same; run docs/generate.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
