"""RESULTS.md, read: its sections, the cells of their tables, and the summary of the suite."""

from __future__ import annotations

import re
from pathlib import Path

from measure import RESULTS

OURS = "tarshards"


class Results:
    """A page of results: its sections, and the cells of their tables."""

    def __init__(self, page: Path = RESULTS):
        parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
        self.sections = dict(part.split("\n", 1) for part in parts)
        self.summary = glance(page)

    def found(self, section: str, pattern: str) -> str:
        """Return what the group of a pattern matches in a section."""
        match = re.search(pattern, self.sections[section], re.DOTALL)
        if match is None:
            raise LookupError(f"{section}: no {pattern}")
        return match[1]

    def date(self, section: str) -> str:
        return self.found(section, r"(\d{4}-\d\d-\d\d)")

    def table(self, section: str, *, after: str = "") -> list[list[str]]:
        """Return the cells of the first table that follows *after*: of its head, then of each row."""
        text = self.sections[section]
        lines = re.search(r"(?:^\|.*\n?)+", text[text.index(after) :], re.MULTILINE)
        if lines is None:
            raise LookupError(f"{section}: no table")
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
        return [head, *rows]

    def cell(self, section: str, row: str, column: str, *, after: str = "") -> str:
        """Return the cell of the first row that begins with these cells, in the tables that follow *after*."""
        heads: list[str] = []
        text = self.sections[section]
        for line in text[text.index(after) :].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if not cells:
                heads = []
            elif not heads:
                heads = cells
            elif line.startswith(f"| {row} |"):
                return cells[heads.index(column)]
        raise LookupError(f"{section}: no row {row!r} with {column!r}")


def glance(page: Path) -> dict[str, dict[str, str]]:
    """Return the summary in a page of results: the cells of each row, by the names of their columns."""
    text = page.read_text() if page.exists() else ""
    found = re.search(
        r"^## The suite at a glance\n.*?^\| \| ([^\n]*) \|\n\|[-|]+\n((?:\|[^\n]*\n)*)", text, re.M | re.S
    )
    if found is None:
        return {}
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in found[2].splitlines()]
    return {name: dict(zip(found[1].split(" | "), cells, strict=True)) for name, *cells in rows}


def number(cell: str) -> float:
    return float(cell.strip("~* ").replace(",", ""))
