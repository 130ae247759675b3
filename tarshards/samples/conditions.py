"""Conditions on the fields of a sample and templates for its key, as typed by users; neither can run other code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tarshards.errors import DecodeError, OpError, SampleError
from tarshards.samples.codecs import decode_field
from tarshards.samples.fields import find_field, no_field, place
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.retry_parse import retry_parse
from tarshards.storage.compression import without_suffix
from tarshards.storage.location import Location

MAX_LENGTH = 1000  # characters; this also limits the depth of nesting
METHODS = {
    str: {"startswith", "endswith", "lower", "upper", "strip", "split", "count", "find"},
    bytes: {"startswith", "endswith", "count", "find"},
    dict: {"get", "keys", "values", "items"},
}
FUNCTIONS = {function.__name__: function for function in (len, min, max, sum, any, all, abs, int, float, str, bool)}
# Powers, shifts and f-strings are excluded: a few characters of them can exhaust the memory.
SYNTAX = (
    *(ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.IfExp),
    *(ast.Call, ast.Attribute, ast.Subscript, ast.Slice, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Set),
    *(ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.expr_context),
)


class Condition:
    """A condition on a sample in Python's syntax: comparisons, arithmetic and a few functions and methods.

    Names are fields, decoded when they are evaluated, or ``key`` or ``shard``. ``fields["seg.png"]`` is a field whose
    name is not an identifier, and ``has("json")`` tests whether a field exists. Raises ValueError for an expression
    that is malformed or uses anything else. Calling it raises SampleError for a field that the sample lacks,
    DecodeError for a field that does not decode, and OpError if the expression fails.

    >>> condition = Condition('cls > 3 and json["ok"]')
    >>> condition({"__key__": "a", "cls": b"7", "json": b'{"ok": true}'}), condition({"__key__": "b", "cls": b"3"})
    (True, False)
    """

    def __init__(self, expression: str):
        self.expression = expression
        self.tree = _parse(expression)
        self._evaluator: Any = None

    def __call__(self, sample: Sample) -> bool:
        if self._evaluator is None:
            self._evaluator = _evaluator()
        fields = _Fields(sample)
        self._evaluator.names = _Names(sample, fields)
        self._evaluator.functions = {**FUNCTIONS, "has": fields.has}
        try:
            return bool(self._evaluator.eval(self.expression, self.tree.body))
        except (SampleError, DecodeError):
            raise
        except Exception as error:
            reason = f"{self.expression!r} fails: {type(error).__name__}: {error}"
            raise OpError(reason, **place(sample)) from error


def _parse(expression: str) -> ast.Expression:
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"an expression has at most {MAX_LENGTH} characters, not {len(expression)}")
    try:
        tree = retry_parse(ast.parse, expression.strip(), mode="eval")
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an expression: {getattr(error, 'msg', error)}") from error
    for node in nodes:
        if refused := _refused(node):
            raise ValueError(f"{expression!r}: {refused}")
    return tree


def _refused(node: ast.AST) -> str | None:
    """Return what is wrong with *node*, or None."""
    if not isinstance(node, SYNTAX):
        return f"{type(node).__name__} is not allowed"
    if isinstance(node, ast.Attribute) and not any(node.attr in names for names in METHODS.values()):
        return f"no attribute or method {node.attr}; write items as json[{node.attr!r}]"
    if isinstance(node, ast.Name) and node.id.startswith("__"):
        return f"no name {node.id}"
    if isinstance(node, ast.Call):
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            return "functions take positional arguments only"
        if not isinstance(node.func, ast.Attribute) and getattr(node.func, "id", None) not in {*FUNCTIONS, "has"}:
            return f"no function {ast.unparse(node.func)}; known: has {' '.join(FUNCTIONS)}"
    return None


def _evaluator() -> Any:
    from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes  # type: ignore[import-untyped]

    arithmetic = {kind: _of_numbers(DEFAULT_OPERATORS[kind]) for kind in (ast.Mult, ast.Mod)}
    return EvalWithCompoundTypes(operators={**DEFAULT_OPERATORS, **arithmetic}, allowed_attrs=METHODS)


def _of_numbers(operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Prevent *operator* from formatting ("%999999999d" % 1) and from repeating ([[0] * 99999] * 99999)."""

    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes, list, tuple)) or isinstance(right, (str, bytes, list, tuple)):
            raise TypeError("* and % accept numbers only")
        return operator(left, right)

    return checked


class _Fields:
    """The fields of a sample, each decoded on first access."""

    def __init__(self, sample: Sample):
        self._sample = sample
        self._decoded: Sample = {}

    def has(self, field: str) -> bool:
        return find_field(self._sample, [field]) is not None and not is_reserved(field)

    def __getitem__(self, field: str) -> Any:
        if field not in self._decoded:
            if not self.has(field):
                reason = no_field([field], self._sample)
                raise SampleError(f"{reason}; test for it with has({field!r})", **place(self._sample))
            self._decoded[field] = self._decode(field)
        return self._decoded[field]

    def _decode(self, field: str) -> Any:
        value = self._sample[find_field(self._sample, [field]) or field]
        try:
            return decode_field(field, value) if isinstance(value, bytes) else value
        except DecodeError as error:
            raise DecodeError(error.reason, **place(self._sample), field=field) from error


class _Names:
    """The values of the names in a condition."""

    def __init__(self, sample: Sample, fields: _Fields):
        self._known = {"key": sample["__key__"], "shard": shard_of(sample), "fields": fields}
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        return self._known[name] if name in self._known else self._fields[name]


class Template:
    """A template in which ``{name}`` and ``{name:spec}`` are replaced by values.

    *like* holds an example value for every allowed name. Raises ValueError for any other name, a format that does not
    fit its value, and a malformed template.

    >>> Template("{split}/{record:03d}", {"record": 0, "split": ""}).fill({"record": 7, "split": "train"})
    'train/007'
    """

    def __init__(self, template: str, like: Mapping[str, Any]):
        try:
            from string import Formatter

            format, self._names = "", list[str]()
            for literal, name, spec, conversion in Formatter().parse(template):
                format += literal.replace("{", "{{").replace("}", "}}")
                if name is None:
                    continue
                if name not in like or conversion or "{" in (spec or ""):
                    raise ValueError(f"{{{name}}} is not among {', '.join(like)} (a format may follow)")
                format += f"{{{len(self._names)}:{spec}}}"
                self._names.append(name)
            self._format = format.format
            self.fill(like)
        except ValueError as error:
            raise ValueError(f"{template!r}: {error}") from error

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the template, filled with *values*."""
        return self._format(*[values[name] for name in self._names])

    def fill_rows(self, columns: Mapping[str, Iterable[Any]]) -> list[str]:
        """Return the template, filled with each row of *columns*.

        >>> Template("{split}-{record:03d}", {"record": 0, "split": ""}).fill_rows({"record": [7, 8], "split": "ab"})
        ['a-007', 'b-008']
        """
        return list(map(self._format, *(columns[name] for name in self._names)))


def shard_of(sample: Sample) -> str:
    """Return the base name of the sample's shard, without ``.tar`` and compression suffixes.

    >>> shard_of({"__url__": "http://host/d/train-000.tar.zst?token=1"}), shard_of({"__url__": "-"})
    ('train-000', 'stdin')
    >>> shard_of({"__url__": "./a::b.tar"})
    'a::b'
    """
    location = Location.of(sample.get("__url__", ""))
    if location.scheme == "-":
        return "stdin"
    return without_suffix(location.base.rpartition(":")[2] if location.scheme else location.base)
