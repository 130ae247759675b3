"""The messages of all errors of the tree, read from the code; the site and the tests use them."""

from __future__ import annotations

import ast
from pathlib import Path

from tarshards import errors

PACKAGE = Path(errors.__file__).parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TarshardsError)]


def messages() -> dict[str, list[str]]:
    """Return the messages of each class of the tree, in the order of the tree, sorted; … stands for what differs."""
    found: dict[str, set[str]] = {kind.__name__: set() for kind in KINDS}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in found:
                    found[name] |= {text for text in texts_of(node.args[0], constants) if text.strip("…: ()'")}
    return {kind: sorted(texts, key=str.lower) for kind, texts in found.items() if texts}


def texts_of(node: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    """Return what an expression may give, with … for the parts that are not literal."""
    if isinstance(node, ast.IfExp):
        return texts_of(node.body, constants) + texts_of(node.orelse, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return texts_of(constants[node.id], {})
    return [text_of(node)]


def text_of(node: ast.expr) -> str:
    """Return the text of an expression that gives one, with … for the parts that are not literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"
