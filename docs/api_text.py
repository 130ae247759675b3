"""The API as Markdown, read from the code without importing it: the text of the reference for programs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def described(name: str) -> str:
    """Return the signatures and docstrings of a module, class or function, and of what is public in it."""
    return "\n\n".join(_described(name, 2)) + "\n"


def _described(name: str, level: int) -> Iterator[str]:
    if file := _file_of(name):
        tree = ast.parse(file.read_text())
        yield f"{'#' * level} {name}"
        yield ast.get_docstring(tree) or ""
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and file.name == "__init__.py" and (node.module or "").startswith(name):
                for alias in node.names:
                    yield from _described(f"{node.module}.{alias.name}", level + 1)
            elif isinstance(node, Definition):
                yield from _definition(node, level + 1)
    elif file := _file_of(name.rpartition(".")[0]):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, Definition) and node.name == name.rpartition(".")[2]:
                yield from _definition(node, level)


def _is_overload(node: Definition) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def _file_of(name: str) -> Path | None:
    path = ROOT / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _definition(node: Definition, level: int) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text is None or node.name.startswith("_"):
        return
    members = [each for each in node.body if isinstance(each, Definition) and not _is_overload(each)]
    start = [each for each in members if each.name == "__init__"]
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(node, ast.ClassDef)]
    node.body = [*fields, *start, ast.Expr(ast.Constant(...))]
    for each in start:
        each.body = [ast.Expr(ast.Constant(...))]
    yield f"{'#' * level} {node.name}"
    yield f"```python\n{ast.unparse(node)}\n```"
    yield text
    if isinstance(node, ast.ClassDef):
        for each in members:
            yield from _definition(each, level + 1)
