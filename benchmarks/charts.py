"""Draw the plots of the report: one per task, with bars for medians and whiskers from slowest to fastest round.

And the README's figure of a few of them.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from figures import OURS, TIMES, YES, Row, bests, groups, named

BLUE, LIGHT, GREY, PALE, INK = "#1f5fa8", "#7ea6d3", "#9aa0a6", "#d8dadd", "#333333"

#: The colours of the README's figure: text, quiet text, our bars, other bars.
THEMES = {
    "light": {"ink": "#1f2328", "quiet": "#59636e", "ours": BLUE, "theirs": "#c3cad2"},
    "dark": {"ink": "#f0f6fc", "quiet": "#9198a1", "ours": "#58a6ff", "theirs": "#444c56"},
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

NOTE = (
    "Medians; whiskers from the slowest to the fastest round;\n"
    "in brackets workers or threads; hatched: not the whole set."
)


def overview(panels: dict[str, list[tuple[str, float, str]]], note: str, theme: str) -> str:
    """Return an SVG of these panels, two in a row, each of bars: a name, a rate, and what is written behind the bar."""
    colours, names, longest, wide, step = THEMES[theme], 92, 230, 450, 22
    drawn, top = [], 20

    def text(x: float, y: float, words: str, colour: str, **more: str) -> None:
        options = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        drawn.append(f'<text x="{x:.0f}" y="{y}" fill="{colours[colour]}"{options}>{escape(words)}</text>')

    for pair in (list(panels.items())[first : first + 2] for first in range(0, len(panels), 2)):
        for left, (title, bars) in zip((0, wide), pair):
            text(left, top, title, "ink", font_weight="600")
            most = max(rate for _, rate, _ in bars)
            for place, (name, rate, words) in enumerate(bars):
                x, y, length = left + names, top + 12 + step * place, max(2, longest * rate / most)
                shade, colour = ("ink", "ours") if name == OURS else ("quiet", "theirs")
                text(x - 8, y + 13, name, shade, text_anchor="end")
                box = f'x="{x}" y="{y + 1}" width="{length:.1f}" height="{step - 6}" rx="2"'
                drawn.append(f'<rect {box} fill="{colours[colour]}"/>')
                text(x + length + 8, y + 13, words, shade)
        top += 12 + step * max(len(bars) for _, bars in pair) + 36
    text(0, top - 8, note, "quiet", font_size="12")
    size = f'viewBox="0 0 {2 * wide - 60} {top}" width="{2 * wide - 60}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="13" role="img">'
    return "\n".join([head, f"<title>{escape(note)}</title>", *drawn, "</svg>"]) + "\n"


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
