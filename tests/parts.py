"""The parts that stand on the core, as docs/architecture.md lists them, and the names of tarshards that modules use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class PartFiles(NamedTuple):
    """The files and folders of a part in this repository: of its code, its tests and its pages."""

    code: list[str]
    tests: list[str]
    pages: list[str]

    def has(self, name: str) -> bool:
        """Return whether the file *name* is one of them."""
        return any(name == each or name.startswith(f"{each}/") for files in self for each in files)


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below *heading* on a page of the documentation, without its head."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def _paths(folder: str, cell: str) -> list[str]:
    return [f"{folder}/{name.rstrip('/')}" for name in re.findall(r"`([^`]+)`", cell)]


PARTS = {
    name.strip("`"): PartFiles(_paths("tarshards", code), _paths("tests", tests), _paths("docs", pages))
    for name, code, tests, pages in rows("architecture.md", "### What stands on the core")
}
FILES = sorted((ROOT / "tarshards").rglob("*.py"))


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module_of(path): path for path in FILES}


@cache
def part_of(module: str) -> str | None:
    """Return the part that a module belongs to, None for the core."""
    name = str(MODULES[module].relative_to(ROOT))
    return next((part for part, files in PARTS.items() if files.has(name)), None)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imported(module: str) -> dict[str, tuple[str, str]]:
    """Return what names that a module imports from tarshards stand for: see ``_defined``."""
    found = {}
    for node, _ in _imports(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("tarshards."):
            for alias in node.names:
                found[alias.asname or alias.name] = _defined(str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES:
                    found[alias.asname or alias.name] = (alias.name, "")
    return found


def _defined(module: str, name: str) -> tuple[str, str]:
    """Return the module and the name under which *name* of *module* is defined; a module itself has no name."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}", ""
    if module in MODULES:
        for node in tree_of(module).body:
            for inner in node.body if isinstance(node, ast.If) else [node]:
                if isinstance(inner, ast.ImportFrom) and f"{inner.module}.".startswith("tarshards."):
                    for alias in inner.names:
                        if (alias.asname or alias.name) == name:
                            return _defined(str(inner.module), alias.name)
    return module, name


def names_used(module: str) -> Iterator[tuple[str, str]]:
    """Yield the names of tarshards that a module uses, each as the module and the name: imported, or an attribute."""
    known = imported(module)
    of_modules = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            owner, name = known.get(first, (first, ""))
            if owner in MODULES and not name:
                while rest and not name:
                    owner, name = _defined(owner, rest.pop(0))
                if name:
                    of_modules.add(first)
                    yield owner, name
    for first, (owner, name) in known.items():
        if name or first not in of_modules:
            yield owner, name


def parts_imported(module: str) -> dict[str, bool]:
    """Return the other parts that a module imports, each with whether it does at once and always."""
    found: dict[str, bool] = {}
    for node, is_at_once in _imports(tree_of(module)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            if name in MODULES and (part := part_of(name)) not in (None, part_of(module)):
                found[str(part)] = found.get(str(part), False) or is_at_once
    return found


def _imports(node: ast.AST, is_at_once: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports among the statements of *node*, each with whether it is done at once."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            yield inner, is_at_once
        elif isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _imports(inner, is_at_once and not _is_later(inner))


def _is_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" or ast.unparse(node.test).startswith("find_spec(")
    return isinstance(node, ast.FunctionDef)


def needed(part: str) -> set[str]:
    """Return the parts that *part* imports at once: it is removed with them."""
    return {
        other
        for module in MODULES
        if part_of(module) == part
        for other, is_at_once in parts_imported(module).items()
        if is_at_once
    }
