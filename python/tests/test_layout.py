"""The package's modules: the paths that users' settings name stay, engines are imported last, and nothing is a circle."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvhoist

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvhoist.__file__).parent

#: What documents, launch lines and settings of engines name.
PUBLIC = {
    "kvhoist": "Cache Client Held LayerLoad Queue Region SharedMemory connect parse_bytes metrics errors __version__",
    "kvhoist.errors": "Error ConfigError ArgumentError StoreError BusyError CancelledError DeadlineError RefusedError "
    "IoError CopyError UnavailableError ClosedError ForkError",
    "kvhoist.files": "File Result Service open read_many read_many_async write write_async",
    "kvhoist.lmcache": "KvhoistL2",
    "kvhoist.metrics": "Collector METRICS Metric Sample Server samples serve text",
    "kvhoist.safetensors": "iterate load_file load_files safe_open save_file",
    "kvhoist.service": "ServiceSettings find_or_start",
    "kvhoist.sglang": "HiCacheKvhoist KvhoistLinker",
    "kvhoist.transformers": "PrefixCache",
    "kvhoist.vllm": "KvhoistConnector KvhoistOffloadingSpec KvhoistTier",
    "kvhoist.__main__": "main script",
}
#: Packages of an engine each, whose names are looked up when they are used.
ENGINES = {"kvhoist.lmcache", "kvhoist.sglang", "kvhoist.transformers", "kvhoist.vllm"}
#: Modules whose imports need torch.
NEED_TORCH = {"kvhoist.safetensors"}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ["kvhoist", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The package's own modules that a module imports, at its top or in a function."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))
            for alias in node.names:
                found.add(f"{base}.{alias.name}" if {f"{base}.{alias.name}"} & {*known, "kvhoist._native"} else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found & known.keys()


def test_no_module_imports_one_that_imports_it():
    known = modules()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    assert graph["kvhoist.sglang.linker"] >= {"kvhoist.sglang.linker_pages", "kvhoist._guard"}, "imports are found"
    done: set[str] = set()

    def walk(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                walk(other, (*way, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_an_engine_s_modules_are_imported_by_no_other_engine_s():
    """Nor by what all share: the doctor reads settings, which need no engine."""
    known = modules()
    engine = re.compile(r"kvhoist\.(sglang|vllm|lmcache|transformers)\b")
    for name, path in known.items():
        mine = engine.match(name)
        for other in imports(name, path, known):
            theirs = engine.match(other)
            allowed = theirs is None or (mine and mine[0] == theirs[0]) or name == "kvhoist.doctor"
            assert allowed, f"{name} imports {other}"


def test_public_names_are_where_they_were():
    for module, names in PUBLIC.items():
        if module in ENGINES:
            assert {*importlib.import_module(module).__all__} == {*names.split()}
        elif module not in NEED_TORCH:
            found = importlib.import_module(module)
            assert not [name for name in names.split() if not hasattr(found, name)], module


@pytest.mark.parametrize("module", sorted(ENGINES))
def test_names_of_an_engine_are_in_the_modules_that_are_looked_into(module):
    """Without the engine: what is imported when a name is used has it."""
    sources = [path for name, path in modules().items() if name.startswith(module + ".")]
    defined = {node.name for path in sources for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
    assert {*PUBLIC[module].split()} <= defined
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        importlib.import_module(module).nonsense


def test_every_path_in_the_pages_is_one_of_them():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "python/README.md"]
    if not ROOT.joinpath("docs").exists():
        pytest.skip("no docs beside the tests; run them in a checkout")
    found = set()
    for page in pages:
        found |= set(re.findall(r"\bkvhoist\.(?:lmcache|sglang|transformers|vllm|files|safetensors)(?:\.\w+)?", page.read_text()))
    known = modules()
    for path in found:
        module, _, name = path.removeprefix("kvhoist.").partition(".")
        source = known[f"kvhoist.{module}"].read_text()
        (names,) = re.findall(r"^__all__ = (\[[^]]*\])", source, flags=re.M)
        assert not name or name in ast.literal_eval(names), path
    assert len(found) > 5


def test_entry_points_lead_to_a_function():
    """By the metadata of the installed package; the modules need no engine to be imported."""
    from importlib.metadata import distribution

    points = {(point.group, point.value) for point in distribution("kvhoist").entry_points}
    assert {group for group, _ in points} == {"console_scripts", "sglang.srt.plugins", "vllm.general_plugins"}
    for _, value in points:
        module, _, function = value.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), value


def test_nothing_of_an_engine_is_imported_before_it_is_used():
    code = (
        "import sys, kvhoist, kvhoist.sglang, kvhoist.vllm, kvhoist.lmcache, kvhoist.transformers, kvhoist.doctor, "
        "kvhoist.sglang.weights, kvhoist.vllm.weights\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'sglang', 'vllm', 'lmcache', 'transformers')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
