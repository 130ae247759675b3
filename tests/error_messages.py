"""The messages of all errors of the tree, read from the code; the tests compare the page on errors with them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import TypeVar

from tarshards import errors

PACKAGE = Path(errors.__file__).parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TarshardsError)]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = TypeVar("Found")
#: Errors that become errors of the tree with the same message: their classes, where they are raised, and as what.
WRAPPED = [
    (["UnresolvedError"], ["tar/elsewhere"], ["TarError"]),
    (["ValueError"], ["formats/mds", "samples/lines", "samples/rows", "verbs/create", "verbs/jsonl"], ["SampleError"]),
    (["Failure"], ["run/samples/runners"], ["OpError"]),
    (
        ["ValueError", "TypeError"],
        [
            f"samples/codecs/{name}"
            for name in ("__init__", "array", "basic", "image", "npy", "media/audio", "media/video")
        ],
        ["DecodeError", "EncodeError"],
    ),
]
#: A part of a message that may have more texts than this is written as ….
MOST_TEXTS = 4


@cache
def messages() -> dict[str, dict[str, str]]:
    """Return the messages of each class of the tree, in the order of the tree, each with a place that raises it.

    … stands for what differs. A message that comes from elsewhere as a whole, such as from another error, is left out.
    """
    return {kind.__name__: code().messages(kind.__name__) for kind in KINDS}


@cache
def wrapped() -> list[tuple[list[str], dict[str, str]]]:
    """Return the messages of WRAPPED, with the classes of the tree that may have them."""
    return [(kinds, code().messages(name, modules)) for names, modules, kinds in WRAPPED for name in names]


@cache
def code() -> Code:
    """Return the code of the package; to read it takes a second, so no module of tests does so when it is imported."""
    return Code()


class Code:
    """The functions, calls and constants of the package, by name, and the texts that an expression may give."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[str, list[Function], ast.Call]]] = defaultdict(list)
        self._functions: dict[str, list[tuple[str, list[Function]]]] = defaultdict(list)
        self._constants: dict[str, list[tuple[str, ast.expr]]] = defaultdict(list)
        self._sources: dict[tuple[str, str], str] = {}
        self._known: dict[tuple[str | int, ...], list[str]] = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            module = str(path.relative_to(PACKAGE))
            tree = ast.parse(path.read_text())
            for name, value in assigned(tree):
                self._constants[name].append((module, value))
            self._read(tree, module, [])

    def _read(self, node: ast.AST, module: str, scope: list[Function]) -> None:
        if isinstance(node, Function):
            scope = [*scope, node]
            self._functions[node.name].append((module, scope))
        elif isinstance(node, ast.Call):
            self.calls[called(node)].append((module, scope, node))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            source = node.module.removeprefix("tarshards.").replace(".", "/")
            self._sources |= {(module, each.asname or each.name): f"{source}.py" for each in node.names}
        for child in ast.iter_child_nodes(node):
            self._read(child, module, scope)

    def messages(self, kind: str, modules: Collection[str] = ()) -> dict[str, str]:
        """Return the messages that a class is called with, each with a place; *modules* restricts the places."""
        found: dict[str, str] = {}
        for module, scope, call in self.calls[kind]:
            is_check = bool(scope) and scope[-1].name.endswith("spec")  # of an argument, which nothing wraps
            if call.args and (not modules or (module.removesuffix(".py") in modules and not is_check)):
                for text in self.texts(call.args[0], module, scope):
                    if re.search(r"[^\W_]", text):
                        found.setdefault(text, f"{module}:{call.lineno}")
        return found

    def texts(self, node: ast.expr, module: str, scope: list[Function]) -> list[str]:
        """Return the texts that an expression may give, with … for the parts that are not known."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, module, scope) + self.texts(other, module, scope)
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.texts(value, module, scope)]
            case ast.JoinedStr(values=values):
                return joined([self._part(value, module, scope) for value in values])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined([self._part(left, module, scope), self._part(right, module, scope)])
            case ast.Call(func=ast.Attribute(value=value, attr="format")):
                return [re.sub(r"\{[^{}]*\}", "…", text) for text in self.texts(value, module, scope)]
            case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                is_called = isinstance(node, ast.Call)
                question = (name, is_called, module, *(each.lineno for each in scope if not is_called))
                if question not in self._known:
                    self._known[question] = ["…"]  # the answer to a question that needs itself
                    found = self._returned(name, module) if is_called else self._named(name, module, scope)
                    texts = dict.fromkeys(text for where in found for text in self.texts(*where))
                    self._known[question] = list(texts) or ["…"]
                return self._known[question]
        return ["…"]

    def _part(self, node: ast.expr, module: str, scope: list[Function]) -> list[str]:
        """Return the texts of a part of a message: those of an expression, or only … where they are many."""
        if isinstance(node, ast.FormattedValue):
            node = node.value
        texts = list(dict.fromkeys(self.texts(node, module, scope)))
        return texts if len(texts) <= MOST_TEXTS else ["…"]

    def _returned(self, name: str, module: str) -> Iterator[tuple[ast.expr, str, list[Function]]]:
        """Yield what the function of a name returns."""
        for there, scope in self._own(self._functions[name], name, module):
            for node in ast.walk(scope[-1]):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield node.value, there, scope

    def _named(self, name: str, module: str, scope: list[Function]) -> Iterator[tuple[ast.expr, str, list[Function]]]:
        """Yield what a name may stand for: a variable, an argument, or a constant of a module."""
        for depth in range(len(scope), 0, -1):
            function, around = scope[depth - 1], scope[:depth]
            values = [value for variable, value in assigned(function) if variable == name]
            names = [each.arg for each in function.args.args]
            if name in names:
                place = names.index(name) - (names[0] in ("self", "cls"))
                for there, where, call in self._callers(function.name, module):
                    yield from ((each, there, where) for each in call.args[place : place + 1])
                    yield from ((word.value, there, where) for word in call.keywords if word.arg == name)
            for value in values:
                yield value, module, around
            if values or name in names:
                return
        yield from ((value, there, []) for there, value in self._own(self._constants[name], name, module))

    def _own(self, found: list[tuple[str, Found]], name: str, module: str) -> list[tuple[str, Found]]:
        """Return those of *found* that a name stands for in a module: its own, those it imports, or the only one."""
        homes = (module, self._sources.get((module, name)))
        return [each for each in found if each[0] in homes] or (found if len(found) == 1 else [])

    def _callers(self, name: str, module: str) -> list[tuple[str, list[Function], ast.Call]]:
        """Return the calls of a function of a module, in all modules if no other function has its name."""
        return [each for each in self.calls[name] if each[0] == module or len(self._functions[name]) == 1]


def called(node: ast.Call) -> str:
    """Return the name of the function that a call names."""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def assigned(tree: ast.Module | Function) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module or a function assigns, with their values."""
    for node in ast.walk(tree) if isinstance(tree, Function) else tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def joined(parts: list[list[str]]) -> list[str]:
    """Return the texts of parts one after the other; a run of … is one."""
    return [re.sub(r"…(…|\.\.\.)*", "…", "".join(each)) for each in islice(product(*parts), MOST_TEXTS**2)]
