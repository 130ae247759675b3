"""Draw the plots of the report: one per task, with bars for medians and whiskers from slowest to fastest round.

And the charts of README and docs, each of one row or table of the report.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from figures import OURS, TIMES, YES, Row, bests, groups, named

BLUE, LIGHT, GREY, PALE, INK = "#1f5fa8", "#7ea6d3", "#9aa0a6", "#d8dadd", "#333333"

#: The colours of a chart, light and dark: text, quiet text, our bars, other bars.
COLOURS = {
    "ink": ("#1f2328", "#f0f6fc"),
    "quiet": ("#59636e", "#9198a1"),
    "ours": (BLUE, "#58a6ff"),
    "theirs": ("#c3cad2", "#444c56"),
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
WIDTH, LETTER = 336, 6.9  # pixels: of a chart, two beside each other on a page of the site; of a letter, about

NOTE = (
    "Medians; whiskers from the slowest to the fastest round;\n"
    "in brackets workers or threads; hatched: not the whole set."
)


class Bar(NamedTuple):
    """A bar of a chart: its name, how long it is, what is written behind it, and whether it is ours."""

    name: str
    length: float
    words: str
    ours: bool


def chart(title: str, bars: list[Bar], note: str) -> str:
    """Return an SVG of bars, light or dark as the page that shows it."""
    names = LETTER * max(len(bar.name) for bar in bars)
    longest = WIDTH - names - 16 - LETTER * max(len(bar.words) for bar in bars)
    most, step = max(bar.length for bar in bars), 22
    light, dark = ("".join(f".{name}{{fill:{each[i]}}}" for name, each in COLOURS.items()) for i in (0, 1))
    top = 32
    size = f'viewBox="0 0 {WIDTH} {top + step * len(bars)}" width="{WIDTH}" height="{top + step * len(bars)}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="13" role="img">',
        f"<title>{escape(title)}. {escape(note)}</title>",
        f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>",
        f'<text x="0" y="20" class="ink" font-weight="600">{escape(title)}</text>',
    ]
    for place, bar in enumerate(bars):
        y, wide = top + step * place, max(2, longest * bar.length / most)
        shade, colour = ("ink", "ours") if bar.ours else ("quiet", "theirs")
        drawn += [
            f'<text x="{names:.0f}" y="{y + 13}" class="{shade}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{names + 8:.0f}" y="{y + 1}" width="{wide:.1f}" height="16" rx="2" class="{colour}"/>',
            f'<text x="{names + wide + 16:.0f}" y="{y + 13}" class="{shade}">{escape(bar.words)}</text>',
        ]
    return "\n".join([*drawn, "</svg>"]) + "\n"


def panel(axes: Any, title: str, rows: list[Row], task: str) -> None:
    """Draw one setting, fastest peer first."""
    rows = sorted(bests(rows, task), key=lambda row: median(row["seconds"]) / row.get("samples", 1))
    for place, row in enumerate(rows):
        values = [1000 * s if task in TIMES else row["samples"] / s for s in row["seconds"]]
        middle, right = median(values), row.get("checked", "yes") in YES
        colour = BLUE if row["peer"] == OURS else LIGHT if row["peer"].startswith(OURS) else GREY if right else PALE
        spread = [[middle - min(values)], [max(values) - middle]]
        axes.barh(place, middle, 0.66, color=colour, hatch="" if right else "////", edgecolor="white", linewidth=0)
        axes.errorbar(middle, place, xerr=spread, color=INK, linewidth=0.9, capsize=2)
        told = f"{middle:,.1f}" if task in TIMES and middle < 100 else f"{middle:,.0f}"
        axes.annotate(told, (max(values), place), (4, 0), textcoords="offset points", va="center", color=INK)
    workers = [f" ({row['workers']})" if "workers" in row else "" for row in rows]
    axes.set_yticks(range(len(rows)), [f"{named(row)}{each}" for row, each in zip(rows, workers)])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max((axes.get_xlim()[1], 1e-9)))
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    for side in "top", "right", "bottom":
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(PALE)


def main(parts: list[dict[str, Any]], folder: Path) -> None:
    """Write `<task>-<set>.png` for every part that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        task, name = part["task"], part["set"]
        panels = [(", ".join(filter(None, [name, *words])), rows) for *words, rows in groups(part)]
        if not panels:
            continue
        columns = min(2, len(panels))
        lines = math.ceil(len(panels) / columns)
        bars = max(len(bests(rows, task)) for _, rows in panels)
        size = (5.2 * columns, lines * (0.6 + 0.24 * bars) + 0.3)
        with pyplot.rc_context({"font.size": 8.5, "font.family": "DejaVu Sans", "hatch.linewidth": 0.6}):
            figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
            for axes, (title, rows) in zip(grid.flat, panels):
                unit = "ms, less is better" if task in TIMES else "samples a second"
                panel(axes, f"{title}: {unit}", rows, task)
            for axes in grid.flat[len(panels) :]:
                axes.set_visible(False)
            figure.supxlabel(NOTE, fontsize=7.5, color=GREY, x=0.01, ha="left")
            figure.get_layout_engine().set(hspace=0.05, h_pad=0.08)
            figure.savefig(folder / f"{task}-{name}.png", dpi=110)
            pyplot.close(figure)
