#!/usr/bin/env python3
"""Writes the tables of docs/{performance,files,remote,vllm}.md from the rows beside this file.

    docs/results/tables.py            # writes them
    docs/results/tables.py --check    # exit status 1 where one is not what the rows give

A table stands between `<!-- rows: GROUP -->` and `<!-- end -->`, where GROUP is a group of measured.csv, or the name of
another file without `.csv`. Rows of one date, commit, machine and command are one table, which names the four.
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGES = [HERE.parent / name for name in ("performance.md", "files.md", "remote.md", "vllm.md")]
ORIGIN = ("date", "commit", "machine", "command")
#: Columns that no table shows.
HIDDEN = {*ORIGIN, "runs"}

Row = dict[str, str]


def rows_of(group: str) -> list[Row]:
    """The rows of a group, or of a file."""
    path = HERE / f"{group}.csv"
    if path.is_file():
        return read(path)
    rows = [row for row in read(HERE / "measured.csv") if row["group"] == group]
    if not rows:
        sys.exit(f"docs: found 'rows: {group}', expected a group of measured.csv, or the name of a file beside it")
    return rows


def read(path: Path) -> list[Row]:
    """All rows of a file. Each has a date, a commit, a machine and a command."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for n, row in enumerate(rows, 2):
        for name in ORIGIN:
            if not row.get(name):
                sys.exit(f"{path}:{n}: found no {name}, expected one")
    return rows


def table(group: str) -> str:
    """Tables of a group."""
    parts = []
    for origin, some in itertools.groupby(rows_of(group), key=lambda row: tuple(row[name] for name in ORIGIN)):
        date, commit, machine, command = origin
        parts.append(f"{machine}; {date}, {commit}: `{command}`\n\n" + "\n".join(lines_of(list(some))))
    return "\n\n".join(parts)


def lines_of(rows: list[Row]) -> list[str]:
    """One table: measured rows in three columns, others in those of their file that differ."""
    if "value" in rows[0]:
        lines = ["|what|measured|bar|", "|--|--:|--|"]
        for row in rows:
            text = f"{row['value']} {row['unit']}".strip()
            text = f"**{text}**" if row["met"] == "no" else text
            lines.append(f"|{', '.join(filter(None, (row['what'], row['case'])))}|{text}|{row['bar']}|")
        return lines
    if "tokens" in rows[0]:
        return by_length(rows)
    names = [name for name in rows[0] if name not in HIDDEN and len({row[name] for row in rows}) > 1]
    lines = ["|" + "|".join(names) + "|", "|" + "|".join("--" if name == "what" else "--:" for name in names) + "|"]
    return lines + ["|" + "|".join(row[name] for name in names) + "|" for row in rows]


def by_length(rows: list[Row]) -> list[str]:
    """Times to the first token: a line for each length of a prompt, a column for each way to its KV."""
    names = list(dict.fromkeys(row["what"] for row in rows))
    lines = ["|tokens|" + "|".join(f"{name}, ms" for name in names) + "|", "|--:" * (1 + len(names)) + "|"]
    for tokens, some in itertools.groupby(sorted(rows, key=lambda row: int(row["tokens"])), key=lambda row: row["tokens"]):
        cells = {row["what"]: row["ms"] + (f" ({row['over_bare']})" if row.get("over_bare") else "") for row in some}
        lines.append(f"|{tokens}|" + "|".join(cells.get(name, "") for name in names) + "|")
    return lines


def main() -> int:
    """Writes the pages, or compares."""
    tables = re.compile(r"(<!-- rows: ([\w-]+) -->\n).*?(\n<!-- end -->)", re.S)
    status = 0
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        new = tables.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)
        if "--check" not in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
        elif new != page:
            print(f"docs/{path.name}: found other tables than docs/results gives; run docs/results/tables.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
