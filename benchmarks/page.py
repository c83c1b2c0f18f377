"""RESULTS.md and its plot, made from the rows of `results.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from benchmarks.measure import Figure, number

HEAD = """# Figures

Measured by `python -m benchmarks`, which writes this page; by hand nothing here changes. A figure is a ratio: how fast ours
is beside the peer, and above 1 is faster, unless the figure says otherwise. Ratios are of medians from runs in turn, in one
process: CPU time, beside RadixTree, publishers and servers the clock. Where a row names no workload: 10,000 requests of
32 blocks of 16 tokens, half of each shared by one of 64 groups, one at a time, capacity 8,192 blocks. Machine and load of
each run are in `results.json`.

| figure | ratio | bar | beside | `python -m benchmarks` | date |
|---|---|---|---|---|---|
"""  # noqa: E501
AXES = {
    "blocks": ("blocks of cache", 2**10, 2**22),
    "workers": ("workers", 1, 2**10),
    "requests": ("requests of a trace", 2**8, 2**16),
}
"""The axes of cost per block: name of the size, smallest size, and largest size by default."""

BAND = 2
"""The limit of a block's cost, in multiples of its cost at the smallest size."""


def cost_name(axis: str) -> str:
    return f"cost a block against {AXES[axis][0]}"


def document(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the page; rows that differ only in their variant are merged."""
    rows = list(rows)
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    lines = [f"| {' | '.join(_cells(of_name))} |" for of_name in by_name.values()]
    reached = {axis: points[-1][0] for axis, points in _points(rows).items()}
    measured = ", ".join(f"{size:,} {AXES[axis][0]}" for axis, size in reached.items())
    largest = ", ".join(f"{size:,} {what}" for what, _, size in AXES.values())
    lines += ["", "## Cost a block against size", "", "![cost a block](scaling.svg)", ""]
    lines += [f"Beside the smallest size of each, CPU time, full verdict. This run went up to {measured}."]
    if any(reached.get(axis, 0) < size for axis, (*_, size) in AXES.items()):
        lines += [f"Larger sizes are not measured yet: `python -m benchmarks scaling` goes up to {largest}."]
    return HEAD + "\n".join(lines) + "\n"


def _cells(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    names = {field.name for field in fields(Figure)}
    figures = [Figure(**{key: value for key, value in row.items() if key in names}) for row in rows]
    bar = _joined(figures, lambda figure: figure.bar_shown)
    missed: dict[str, list[str]] = {}
    for figure in figures:
        if figure.missed:
            missed.setdefault(figure.why, []).append(figure.variant)
    for why, variants in missed.items():
        which = "" if len(variants) == len(figures) else f" by {' / '.join(variants)}"
        bar += f"; missed{which}: {why}"
    name = figures[0].name if len(figures) > 1 else figures[0].key
    lines = _joined(figures, lambda figure: "<br>".join(f"`{line}`" for line in figure.lines.splitlines()))
    return (
        f"{name}:<br>{lines}" if lines else name,
        _joined(figures, lambda figure: figure.shown),
        bar,
        _joined(figures, lambda figure: figure.peer),
        "; ".join(dict.fromkeys(f"`{row['command'].rpartition(' ')[2]}`" for row in rows)),
        "; ".join(dict.fromkeys(row["place"].partition(",")[0] for row in rows)),
    )


def _joined(figures: Sequence[Figure], text: Callable[[Figure], str]) -> str:
    """Return one text if it is the same for all figures; otherwise each text after its variants."""
    of_text: dict[str, list[str]] = {}
    for figure in figures:
        of_text.setdefault(text(figure), []).append(figure.variant)
    if len(of_text) == 1:
        return next(iter(of_text))
    return "; ".join(f"{' / '.join(variants)}: {said}" for said, variants in of_text.items() if said)


def _points(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return size and cost of each measured axis, the smallest first."""
    names = {cost_name(axis): axis for axis in AXES}
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["name"] in names:
            points.setdefault(names[row["name"]], []).append((int(row["variant"].replace(",", "")), row["ratio"]))
    return {axis: sorted(of_axis) for axis, of_axis in points.items()}


WIDTH, HEIGHT, LEFT, TOP, FOOT = 280, 200, 50, 30, 50  # size of a panel; margins left, above and below


def plot(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return an SVG with one panel per axis, and a common scale of cost from 0."""
    points = _points(rows)
    top = max([BAND, *(cost for of_axis in points.values() for _, cost in of_axis)]) * 1.1
    step = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100, 1_000) if top / step < 8)
    width, height = LEFT + (WIDTH + 20) * len(points), TOP + HEIGHT + FOOT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        '<g font-family="sans-serif" font-size="11" text-anchor="middle">',
        "<title>Cost a block beside that at the smallest size</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]

    def y(cost: float) -> float:
        return round(TOP + HEIGHT * (1 - cost / top), 1)

    for number_of_panel, (axis, of_axis) in enumerate(points.items()):
        left = LEFT + (WIDTH + 20) * number_of_panel
        places = [left + 15 + round((WIDTH - 30) * i / max(1, len(of_axis) - 1)) for i in range(len(of_axis))]
        right = left + WIDTH
        out.append(f'<rect x="{left}" y="{y(BAND)}" width="{WIDTH}" height="{y(0) - y(BAND)}" fill="#e8f3e8"/>')
        for i in range(int(top / step) + 1):
            at = y(i * step)
            out.append(f'<path d="M{left} {at}H{right}" stroke="#ccc"/>')
            if not number_of_panel:
                out.append(f'<text x="{left - 6}" y="{at + 4}" text-anchor="end">{number(i * step)} ×</text>')
        out.append(f'<text x="{left + WIDTH / 2}" y="{TOP - 12}">cost a block, {AXES[axis][0]}</text>')
        line = " ".join(f"{x},{y(cost)}" for x, (_, cost) in zip(places, of_axis, strict=True))
        out.append(f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="2"/>')
        for x, (size, cost) in zip(places, of_axis, strict=True):
            out.append(f'<circle cx="{x}" cy="{y(cost)}" r="3" fill="#1f5fa8"/>')
            out.append(f'<text x="{x}" y="{TOP + HEIGHT + 18}">{_short(size)}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 10}">green: within {BAND} × of the smallest size</text>')
    return "\n".join([*out, "</g></svg>"]) + "\n"


def _short(size: int) -> str:
    for unit, name in ((2**20, " M"), (2**10, " k")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}"
