#!/usr/bin/env python3
"""Draws the plots of the pages from docs/results: engine_ttft.svg, ttft.svg, throughput.svg, hits.svg and array.svg.

    docs/plots/draw.py            # writes them
    docs/plots/draw.py --check    # exit status 1 where one is not what the numbers give

The plots have a background of their own, so that they look the same on light and dark pages. The numbers are in
docs/results, whose files' heads name the commands that measured them, and the notes below the titles.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, log
from pathlib import Path
from textwrap import wrap

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
# Of a panel: its diagram, and the room around it for the title, the ticks and the name of the axis.
WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 368, 170, 52, 28, 32, 46
LEGEND, LETTER = 20, 7  # the height of a row of names, and about the width of a letter
NOTE, NOTE_LETTERS = 15, 60  # of a line below the title: its height, and the letters that have room
STAND_IN = "no real drives: loop devices over files in memory"  # what the results call stand-in drives
COLORS = ["#1b6ca8", "#c4602a", "#6b6b6b", "#3a8f5c", "#8a5fa8", "#b5862c", "#b04a5a", "#2f9c9c"]
DASHES = ["none", "7 3", "2 3"]  # of lines that have a color for the second and third time

# Values by place on the axis, for each name of a line.
Lines = dict[str, dict[float, float]]
# The title, what must be known to read it, the name of the axis, the lines.
Panel = tuple[str, list[str], str, Lines]


def columns(name: str) -> list[list[Panel]]:
    """One panel: the first column is the axis, each other one a line. The head has the title and the notes."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    title = next(line for line in lines if line.startswith("# title: ")).removeprefix("# title: ")
    notes = wrapped(line.removeprefix("# note: ") for line in lines if line.startswith("# note: "))
    (axis, *names), *rows = csv.reader(line for line in lines if not line.startswith("#"))
    for row in rows:
        if len(row) != len(names) + 1:
            sys.exit(f"docs/results/{name}: found {len(row)} cells in a row, expected {len(names) + 1} as in its head")
    return [[(title, notes, axis, {n: {float(row[0]): float(row[i]) for row in rows} for i, n in enumerate(names, 1)})]]


def wrapped(notes: Iterable[str]) -> list[str]:
    """The lines of the notes, none wider than a panel."""
    return [line for note in notes for line in wrap(note, NOTE_LETTERS)]


def ttft(name: str) -> list[list[Panel]]:
    """Seconds over tokens, a panel for each engine or model that was measured at three lengths or more. Below its title is
    what was measured, and on which machine."""
    panels: dict[str, tuple[list[str], Lines]] = {}
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if "new tokens" in row["what"]:
                continue  # Longer prompts than their tokens say.
            what, _, shape = (row.get("engine") or f"{row['model']}, {row['attention']}").partition(", ")
            machine = row["machine"] + (f" ({STAND_IN})" if "stand-in drives" in row["machine"] else "")
            _, lines = panels.setdefault(what, (wrapped([f"{shape}; {machine}."]), {}))
            lines.setdefault(row["what"], {})[int(row["tokens"])] = float(row["ms"]) / 1000
    return [[(f"{what}: seconds to the answer", notes, "tokens of the prompt", lines)
             for what, (notes, lines) in panels.items() if max(map(len, lines.values())) > 2]]  # fmt: skip


def array(name: str) -> list[list[Panel]]:
    """A row of panels for each size of a block: GiB/s over drives. A later row replaces an earlier one of its point."""
    panels: dict[tuple[int, str], Lines] = {}
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            lines = panels.setdefault((int(row["block_bytes"]), row["bench"]), {})
            lines.setdefault(row["contender"], {})[int(row["drives"])] = float(row["mib_per_s"]) / 1024
    return [
        [(f"{bench}, blocks of {size / 1024:g} KiB: GiB/s", [], "drives", panels[size, bench])
         for bench in ("load", "store", "fetch", "device") if (size, bench) in panels]
        for size in sorted({size for size, _ in panels}, reverse=True)
    ]  # fmt: skip


def styles(names: list[str]) -> dict[str, str]:
    """How the line of each name is drawn: no two lines alike."""
    if len(names) > len(COLORS) * len(DASHES):
        sys.exit(f"docs/plots: found {len(names)} lines, expected at most {len(COLORS) * len(DASHES)} that differ")
    style = (f'stroke="{color}" stroke-dasharray="{dash}"' for dash in DASHES for color in COLORS)
    return dict(zip(names, style))


def panel(left: float, top: float, panel: Panel, styles: dict[str, str]) -> Iterator[str]:
    """One diagram. The axis is logarithmic, because each place is about twice the one before, and begins above 0."""
    title, notes, axis, lines = panel
    places = sorted({place for points in lines.values() for place in points})
    highest = max(value for points in lines.values() for value in points.values())
    step = next(times * 10**power for power in range(-3, 6) for times in (1, 2, 5) if highest <= 8 * times * 10**power)
    ticks = ceil(highest / step)

    def x(place: float) -> float:
        return left + WIDTH * (log(place / places[0]) / log(places[-1] / places[0]) if len(places) > 1 else 0)

    def y(value: float) -> float:
        return top + HEIGHT * (1 - value / (ticks * step))

    yield f'<text x="{left}" y="{top - 14 - NOTE * len(notes)}" font-size="13" font-weight="bold">{escape(title)}</text>'
    for i, note in enumerate(notes, 1):
        yield f'<text x="{left}" y="{top - 14 - NOTE * (len(notes) - i)}" font-size="11">{escape(note)}</text>'
    for tick in (step * n for n in range(ticks + 1)):
        yield f'<path d="M{left} {y(tick):.1f}h{WIDTH}" stroke="#dddddd"/>'
        yield f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for place in places:
        yield f'<text x="{x(place):.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{place:g}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{top + HEIGHT + 36}" text-anchor="middle">{escape(axis)}</text>'
    for name, points in lines.items():
        at = [(x(place), y(value)) for place, value in sorted(points.items())]
        width = 2.5 if name.startswith("kvhoist") else 1.5
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in at)
        yield f'<polyline points="{path}" fill="none" {styles[name]} stroke-width="{width}"/>'
        color = styles[name].split('"')[1]
        yield from (f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in at)


def draw(rows: list[list[Panel]]) -> str:
    """The panels in rows, below the names of all lines."""
    names = list(dict.fromkeys(name for row in rows for *_, lines in row for name in lines))
    style = styles(names)
    above = ABOVE + NOTE * max(len(notes) for row in rows for _, notes, _, _ in row)
    across, down = LEFT + WIDTH + RIGHT, above + HEIGHT + BELOW
    width = across * max(len(row) for row in rows)
    places, x, y = {}, 16.0, 18
    for name in names:
        if x + 21 + LETTER * len(name) > width - 8:
            x, y = 16.0, y + LEGEND
        places[name] = x, y
        x += 40 + LETTER * len(name)
    head = y + LEGEND
    height = head + down * len(rows)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#fbfbfb"/>',
    ]
    for name, (x, y) in places.items():
        svg.append(f'<path d="M{x:.1f} {y}h16" {style[name]} stroke-width="3"/>')
        svg.append(f'<text x="{x + 21:.1f}" y="{y + 4}">{escape(name)}</text>')
    for i, row in enumerate(rows):
        for j, one in enumerate(row):
            svg += panel(j * across + LEFT, head + i * down + above, one, style)
    return "\n".join([*svg, "</svg>"]) + "\n"


def main() -> int:
    status = 0
    for name, read in (("engine_ttft", ttft), ("ttft", ttft), ("throughput", columns), ("hits", columns), ("array", array)):
        target, svg = HERE / f"{name}.svg", draw(read(f"{name}.csv"))
        if "--check" not in sys.argv[1:]:
            target.write_text(svg, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != svg:
            print(f"docs/plots/{name}.svg: found another picture than docs/results/{name}.csv gives; run docs/plots/draw.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
