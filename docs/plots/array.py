#!/usr/bin/env python3
"""Draws array.svg, GiB/s over the number of drives, from array.csv, which the bench `array` wrote with `--csv`.

    docs/plots/array.py [array.csv [array.svg]]
"""

import csv
import pathlib
import sys
from collections import defaultdict
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 300, 200, 50, 40, 70, 20
COLORS = ["#777777", "#bbbbbb", "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf"]
COLORS += ["#bcbd22", "#000000", "#4b0082", "#556b2f"]
BENCHES = ["load", "store", "fetch"]


def read(path):
    """The series of each panel: GiB/s by the number of drives. A later row replaces an earlier one of its point."""
    panels = defaultdict(lambda: defaultdict(dict))
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            panel = int(row["block_bytes"]), row["bench"]
            panels[panel][row["contender"]][int(row["drives"])] = float(row["mib_per_s"]) / 1024
    return panels


def round_up(value):
    """The next value that divides evenly into four ticks."""
    step = next(step for step in (1, 2, 4, 8, 10, 12, 16, 20, 40) if value <= 4 * step)
    return 4 * step


def panel(x, y, title, series, colors):
    """One diagram, as SVG elements."""
    drives = sorted({n for points in series.values() for n in points})
    top = round_up(max(value for points in series.values() for value in points.values()))
    at_x = {n: x + WIDTH * i / max(len(drives) - 1, 1) for i, n in enumerate(drives)}
    at_y = lambda value: y + HEIGHT * (1 - value / top)  # noqa: E731
    yield f'<text x="{x}" y="{y - 12}" font-weight="bold">{escape(title)}</text>'
    for tick in range(5):
        value = top * tick / 4
        yield f'<path d="M{x} {at_y(value):.1f}h{WIDTH}" stroke="#dddddd"/>'
        yield f'<text x="{x - 6}" y="{at_y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    for n in drives:
        yield f'<text x="{at_x[n]:.1f}" y="{y + HEIGHT + 16}" text-anchor="middle">{n}</text>'
    for name, points in series.items():
        places = [(at_x[n], at_y(value)) for n, value in sorted(points.items())]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        width = 2.5 if name.startswith("kvhoist") else 1.5
        yield f'<polyline points="{line}" fill="none" stroke="{colors[name]}" stroke-width="{width}"/>'
        yield from (f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colors[name]}"/>' for px, py in places)


def draw(panels):
    """The whole picture."""
    sizes = sorted({size for size, _ in panels}, reverse=True)
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    benches = [bench for bench in BENCHES if any(kind == bench for _, kind in panels)]
    body = []
    for row, size in enumerate(sizes):
        for column, bench in enumerate(benches):
            if series := panels.get((size, bench)):
                x, y = LEFT + column * (WIDTH + GAP), TOP + row * (HEIGHT + GAP)
                body += panel(x, y, f"{bench}, blocks of {size / 1024:g} KiB: GiB/s over drives", series, colors)
    width = LEFT + len(benches) * (WIDTH + GAP)
    below = TOP + len(sizes) * (HEIGHT + GAP)
    for i, name in enumerate(names):
        x, y = LEFT + i % 3 * (WIDTH + GAP), below + i // 3 * LEGEND
        body.append(f'<path d="M{x} {y}h24" stroke="{colors[name]}" stroke-width="3"/>')
        body.append(f'<text x="{x + 30}" y="{y + 4}">{escape(name)}</text>')
    height = below + (len(names) + 2) // 3 * LEGEND
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    font = ' font-family="sans-serif" font-size="12">'
    return "\n".join([head + font, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n"


def main():
    folder = pathlib.Path(__file__).parent
    source, target = [*sys.argv[1:], *[folder / "array.csv", folder / "array.svg"][len(sys.argv) - 1 :]]
    pathlib.Path(target).write_text(draw(read(source)))


if __name__ == "__main__":
    main()
