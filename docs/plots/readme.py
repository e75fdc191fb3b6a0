#!/usr/bin/env python3
"""Draws the two plots of the README from the numbers beside this file: throughput.svg from throughput.csv, hits.svg
from hits.csv. The head of each .csv names the command that measured it.

    docs/plots/readme.py            # writes them
    docs/plots/readme.py --check    # exit status 1 where one is not what the numbers give

The plots have a background of their own, so that they look the same on light and dark pages.
"""

from __future__ import annotations

import csv
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440, 280, 52, 64, 20, 46
COLORS = ["#1b6ca8", "#c4602a", "#6b6b6b"]


def read(name: str) -> tuple[str, list[str], list[list[float]]]:
    """The words of the first line, the names of the columns, and the rows."""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    title = next(line for line in lines if line.startswith("# title: "))
    names, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    return title.removeprefix("# title: "), names, [[float(cell) for cell in row] for row in rows]


def draw(name: str) -> str:
    """Lines over the first column, which has equal distances: each of its values is about twice the one before."""
    title, names, rows = read(name)
    top = max(value for row in rows for value in row[1:])
    step = next(step for step in (0.1, 0.2, 1, 2, 4, 5, 8, 10) if top <= 5 * step)
    ticks = [step * tick for tick in range(6)]

    def x(at: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / (len(rows) - 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / ticks[-1]

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fbfbfb"/>',
        f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in ticks:
        svg.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        svg.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for at, row in enumerate(rows):
        svg.append(f'<text x="{x(at):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{row[0]:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    svg.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(names[0])}</text>')
    begin = LEFT
    for column, (series, color) in enumerate(zip(names[1:], COLORS), 1):
        points = [(x(at), y(row[column])) for at, row in enumerate(rows)]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        svg.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        svg += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points]
        svg.append(f'<path d="M{begin} 40h16" stroke="{color}" stroke-width="3"/>')
        svg.append(f'<text x="{begin + 21}" y="44">{escape(series)}</text>')
        begin += 34 + 6.2 * len(series)
    return "\n".join([*svg, "</svg>"]) + "\n"


def main() -> int:
    status = 0
    for name in ("throughput", "hits"):
        target, svg = HERE / f"{name}.svg", draw(f"{name}.csv")
        if "--check" not in sys.argv[1:]:
            target.write_text(svg, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != svg:
            print(f"docs/plots/{name}.svg: found another picture than {name}.csv gives; run docs/plots/readme.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
