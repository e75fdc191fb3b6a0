"""The pages: what is generated is current, and every link leads somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvhoist import doctor
from kvhoist._store_settings import StoreSettings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="no docs beside the tests; run them in a checkout")

#: Folders of pages that are the project's own.
PAGES = ["*.md", "docs/**/*.md", "python/*.md"]


def pages() -> list[Path]:
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def prose(page: Path) -> str:
    """A page without what is code in it, where brackets are brackets."""
    text = re.sub(r"^([ ]*)(```|~~~).*?^\1\2", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mdBook make them."""
    headings = re.findall(r"^#{1,6} (.+)$", re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings)
    return set(plain)


def test_generated_pages_are_what_the_code_says():
    ended = subprocess.run([sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("script", ["plots/draw.py", "results/tables.py"])
def test_figures_come_from_rows_of_the_results(script):
    ended = subprocess.run([sys.executable, DOCS / script, "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_link_leads_somewhere():
    broken, checked = [], 0
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            checked += 1
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken and checked > 30, "\n".join(broken)


def test_the_site_has_every_page_once():
    listed = re.findall(r"\]\(([^)]+)\)", (DOCS / "SUMMARY.md").read_text())
    there = {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")} - {"SUMMARY.md"}
    # Pages beside the folder, which the site takes in.
    beside = [page for page in listed if page.startswith("../")]
    assert all((DOCS / page).is_file() for page in beside)
    assert sorted(listed) == sorted(there | set(beside))


#: The flags of launch lines and of the doctor that take an adapter's configuration, and whose it is.
CONFIGURATIONS = {
    "--hicache-storage-backend-extra-config": "sglang",
    "--unified-cache-external-linker-config": "sglang",
    "--kv-transfer-config": "vllm",
    "--l2-adapter": "lmcache",
    "--config": "sglang",
}


def configurations(page: Path) -> list[tuple[str, str]]:
    """Each configuration that a page's commands have, as JSON, after its engine."""
    found = []
    for code in re.findall(r"^[ ]*```sh\n(.*?)^[ ]*```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        for document in re.findall(r"<<'JSON'\n(.*?)^ *JSON$", code, flags=re.M | re.S):
            found.append((page.stem, document))
        words = shlex.split(code, comments=True)
        pairs = zip(words, words[1:], strict=False)
        found += [(CONFIGURATIONS[flag], word) for flag, word in pairs if flag in CONFIGURATIONS and word.startswith("{")]
    return found


@pytest.mark.parametrize(
    "page,count", [("start/sglang", 2), ("start/vllm", 1), ("sglang", 4), ("vllm", 2), ("lmcache", 1)]
)
def test_the_pages_configurations_are_what_the_adapters_read(page, count):
    found = configurations(DOCS / f"{page}.md")
    assert len(found) == count, found
    for engine, text in found:
        settings, _ = doctor._settings(engine, json.loads(text), 1, None)
        assert "/mnt/nvme" in str(getattr(settings, "store", settings).path)


@pytest.mark.parametrize("page", ["vllm", "lmcache"])
def test_the_table_of_a_tier_has_every_setting_that_it_takes(page):
    table = (DOCS / f"{page}.md").read_text(encoding="utf-8").split("| setting | default | |", 1)[1].split("\n\n", 1)[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")}
    # These two are refused.
    assert StoreSettings.__dataclass_fields__.keys() - {"pool_shares", "capacity_total"} <= named
