"""Conditions on the fields of a sample and templates for its key, as typed by users; neither can run other code.

``Compiler`` turns a condition into a function of the values of its names, for one sample; ``index.where`` evaluates it
for columns. Nulls, None in Python, mean the same in both. Operations on null give null: comparisons, sums, functions,
methods, items. ``x is None``, ``x == None`` and ``has`` test for null. ``and``, ``or`` and ``not`` follow SQL: null and
False is False, null or True is True, other combinations with null are null; only true values meet a condition. If
``and`` and ``or`` yield a value, as in ``(x or 0) < 3``, and before ``if``, null counts as false.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tarshards.errors import DecodeError, OpError, SampleError, TarshardsError
from tarshards.samples.codecs import decode_field
from tarshards.samples.fields import find_field, no_field, value_at, value_path
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.retry_parse import retry_parse
from tarshards.storage.location import Location

Evaluate = Callable[[Any], Any]  # takes a function that returns the value of each name

MAX_LENGTH = 1000  # characters; this also limits the depth of nesting
# Items of a sum of texts or lists, and bits of a product of integers; a nested one may double it. Integers of JSON have
# at most 14,300 bits.
MAX_SIZE = 100_000
MAX_TURNS = 10_000  # of all loops together
ASSIGNS = "use == to compare, not ="
METHODS: dict[type, set[str]] = {
    str: {"startswith", "endswith", "lower", "upper", "strip", "split", "count", "find"},
    bytes: {"startswith", "endswith", "count", "find"},
    dict: {"get", "keys", "values", "items"},
}
SEQUENCES = (str, bytes, list, tuple)


class Condition:
    """A condition on a sample in Python's syntax: comparisons, arithmetic and a few functions and methods.

    Names are those of columns: fields, decoded when they are evaluated, also with dots (``seg.png``), and values in
    JSON (``json.score``, null where there is none); and ``key`` and ``shard``. ``fields["jpg;png"]`` is a field whose
    name is not an identifier, or one of alternatives, and ``has("json")`` tests whether a field exists. A comparison
    with null is null, as in SQL, and does not meet the condition. Raises ValueError for an expression that is malformed
    or uses anything else. Calling it raises SampleError for a field that the sample lacks, DecodeError for a field that
    does not decode, and OpError if the expression fails.

    >>> condition = Condition('cls > 3 and json["ok"]')
    >>> condition({"__key__": "a", "cls": b"7", "json": b'{"ok": true}'}), condition({"__key__": "b", "cls": b"3"})
    (True, False)
    """

    def __init__(self, expression: str):
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"an expression has at most {MAX_LENGTH} characters, not {len(expression)}")
        self.expression = expression
        try:
            self.tree: ast.expr = retry_parse(ast.parse, expression.strip(), mode="eval").body
            self._test = Compiler(expression).test(self.tree)
        except RefusedError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = ASSIGNS if _assigns(error) else getattr(error, "msg", error)
            raise ValueError(f"{expression!r} is not an expression: {reason}") from error

    def __reduce__(self) -> Any:
        return Condition, (self.expression,)

    def __call__(self, sample: Sample) -> bool:
        return self.holds(_Names(sample), sample)

    def names(self) -> set[str] | None:
        """Return the names in the condition besides functions; None if only samples can answer it.

        >>> Condition("len(json.text) > 3 and has('a')").names() == {"json.text", "a"}, Condition("fields['a']").names()
        (True, None)
        """
        names, own = set[str](), set[ast.AST]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.comprehension | ast.Subscript):
                return None
            if isinstance(node, ast.Call):
                own.add(node.func)
                if isinstance(node.func, ast.Name) and node.func.id == "has":
                    names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
            elif node not in own and (name := dotted_name(node)) is not None:
                names.add(name)
                own.update(ast.walk(node))
        return names

    def fields(self) -> set[str]:
        """Return the fields of the names in the condition; none if only samples can answer it."""
        return {value_path(name)[0] for name in self.names() or ()}

    def holds(self, names: Any, sample: Sample | None = None) -> bool:
        """Return whether the condition holds of *names*, a mapping of each to its value; *sample* is for errors."""
        try:
            return self._test(names) is True
        except TarshardsError:
            raise
        except Exception as error:
            reason = f"{self.expression!r} fails: {type(error).__name__}: {error}"
            raise OpError(reason).at(sample) from error


def _assigns(error: Exception) -> bool:
    """Return whether the error of Python's parser is that of a single equals sign."""
    if not isinstance(error, SyntaxError) or not error.text or not error.offset:
        return False
    begins = error.text[error.offset - 1 :]
    return "Maybe you meant '=='" in error.msg or (begins.startswith("=") and not begins.startswith("=="))


def dotted_name(node: ast.AST) -> str | None:
    """Return the name with dots that *node* is, such as ``json.score``; None if it is something else.

    >>> dotted_name(ast.parse("json.a.b", mode="eval").body), dotted_name(ast.parse("json['a'].b", mode="eval").body)
    ('json.a.b', None)
    """
    if isinstance(node, ast.Attribute):
        first = dotted_name(node.value)
        return None if first is None else f"{first}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


class RefusedError(ValueError):
    """An expression uses a construct that conditions do not allow."""


def truth_of(value: Any) -> bool | None:
    """Return whether a value is true, None if it is null."""
    return None if value is None else bool(value)


def join_truths(truths: Iterable[Any], decisive: bool) -> bool | None:
    """Return *decisive* if one of *truths* is, otherwise None if one of them is, otherwise the opposite.

    >>> join_truths([True, None], True), join_truths([True, None], False), join_truths([False, None], False)
    (True, None, False)
    """
    found: bool | None = not decisive
    for truth in truths:
        if truth is decisive:
            return decisive
        if truth is None:
            found = None
    return found


class Compiler:
    """Turns the nodes of an expression into functions of the values of its names; refuses all but a few kinds.

    Powers, shifts and f-strings are excluded: a few characters of them can exhaust the memory.
    """

    def __init__(self, expression: str):
        self.expression = expression

    def refused(self, reason: str) -> RefusedError:
        return RefusedError(f"{self.expression!r}: {reason}")

    def test(self, node: ast.expr) -> Evaluate:
        """Return a function that says whether *node* is true: True, False, or None for null."""
        if isinstance(node, ast.BoolOp):
            tests, decisive = [*map(self.test, node.values)], isinstance(node.op, ast.Or)
            return lambda names: join_truths((test(names) for test in tests), decisive)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated, denied = _of_values(operator.not_), self.test(node.operand)
            return lambda names: negated(denied(names))
        if isinstance(node, ast.IfExp):
            return _choice(*map(self.test, (node.test, node.body, node.orelse)))
        value = self.value(node)
        return lambda names: truth_of(value(names))

    def value(self, node: ast.AST) -> Evaluate:
        """Return a function that evaluates *node*."""
        compiled: Callable[[Any], Evaluate] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        if compiled is None:
            raise self.refused(f"{type(node).__name__} is not allowed")
        return compiled(node)

    def _constant(self, node: ast.Constant) -> Evaluate:
        return lambda names: node.value

    def _name(self, node: ast.Name) -> Evaluate:
        if node.id.startswith("__"):
            raise self.refused(f"no name {node.id}")
        return lambda names: names[node.id]

    def _list(self, node: ast.List) -> Evaluate:
        values = [*map(self.value, node.elts)]
        return lambda names: [value(names) for value in values]

    def _tuple(self, node: ast.Tuple) -> Evaluate:
        values = [*map(self.value, node.elts)]
        return lambda names: tuple([value(names) for value in values])

    def _set(self, node: ast.Set) -> Evaluate:
        values = [*map(self.value, node.elts)]
        return lambda names: {value(names) for value in values}

    def _boolop(self, node: ast.BoolOp) -> Evaluate:
        decisive = isinstance(node.op, ast.Or)
        *values, last = map(self.value, node.values)

        def first(names: Any) -> Any:
            for value in values:
                found = value(names)
                if bool(found) is decisive:
                    return found
            return last(names)

        return first

    def _unaryop(self, node: ast.UnaryOp) -> Evaluate:
        if isinstance(node.op, ast.Not):
            return self.test(node)
        if type(node.op) not in SIGNS:
            raise self.refused(f"{type(node.op).__name__} is not allowed")
        function, value = _of_values(SIGNS[type(node.op)]), self.value(node.operand)
        return lambda names: function(value(names))

    def _binop(self, node: ast.BinOp) -> Evaluate:
        if type(node.op) not in ARITHMETIC:
            raise self.refused(f"{type(node.op).__name__} is not allowed")
        function, left, right = _of_values(ARITHMETIC[type(node.op)]), self.value(node.left), self.value(node.right)
        return lambda names: function(left(names), right(names))

    def _compare(self, node: ast.Compare) -> Evaluate:
        nodes = [node.left, *node.comparators]
        values = [*map(self.value, nodes)]
        links = [_link(*each) for each in zip(node.ops, nodes, nodes[1:])]
        if len(links) == 1:
            (link,), (left, right) = links, values
            return lambda names: link(left(names), right(names))

        def each(names: Any) -> Iterator[Any]:
            left = values[0](names)
            for link, value in zip(links, values[1:]):
                right = value(names)
                yield truth_of(link(left, right))
                left = right

        return lambda names: join_truths(each(names), False)

    def _ifexp(self, node: ast.IfExp) -> Evaluate:
        return _choice(self.test(node.test), self.value(node.body), self.value(node.orelse))

    def _attribute(self, node: ast.Attribute) -> Evaluate:
        name = dotted_name(node)
        if name is None or "__" in name:
            raise self.no_attribute(node)
        first, *path = name.split(".")  # a field, a value in one, or in what a loop is at
        return lambda names: value_at(names[first], path) if first in names else names[name]

    def no_attribute(self, node: ast.Attribute) -> RefusedError:
        return self.refused(f"no attribute or method {node.attr}; write items as json[{node.attr!r}]")

    def _call(self, node: ast.Call) -> Evaluate:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self.refused("functions take positional arguments only")
        operands = node.args
        if isinstance(node.func, ast.Attribute):
            if not any(node.func.attr in names for names in METHODS.values()):
                raise self.no_attribute(node.func)
            function, operands = _method(node.func.attr), [node.func.value, *operands]
        elif isinstance(node.func, ast.Name) and node.func.id == "has":
            if len(operands) != 1:
                raise self.refused("has takes one field")
            field = self.value(operands[0])
            return lambda names: names.fields.has(field(names))
        elif isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            function = _of_values(FUNCTIONS[node.func.id])
        else:
            raise self.refused(f"no function {ast.unparse(node.func)}; known: has {' '.join(FUNCTIONS)}")
        values = [*map(self.value, operands)]
        return lambda names: function(*[value(names) for value in values])

    def _subscript(self, node: ast.Subscript) -> Evaluate:
        item, value, index = _of_values(operator.getitem), self.value(node.value), self.value(node.slice)
        return lambda names: item(value(names), index(names))

    def _slice(self, node: ast.Slice) -> Evaluate:
        parts = [None if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        return lambda names: slice(*[part and part(names) for part in parts])

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> Evaluate:
        """Return a function that makes the list of a comprehension; a loop over null is empty."""
        value, bound = self.value(node.elt), set[str]()
        loops = []
        for loop in node.generators:
            targets = [each for each in ast.walk(loop.target) if not isinstance(each, ast.expr_context)]
            if loop.is_async or not all(isinstance(each, ast.Name | ast.Tuple | ast.List) for each in targets):
                raise self.refused(f"no loop over {ast.unparse(loop.target)}")
            bound.update(each.id for each in targets if isinstance(each, ast.Name))
            loops.append((loop.target, self.value(loop.iter), [*map(self.test, loop.ifs)]))

        def turns(names: _Names, loops: list[Any]) -> Iterator[Any]:
            (target, values, tests), *inner = loops
            items = values(names)
            for item in () if items is None else items:
                names.turns += 1
                if names.turns > MAX_TURNS:
                    raise ValueError(f"loops have at most {MAX_TURNS} turns")
                _bind(names, target, item)
                if all(test(names) for test in tests):
                    if inner:
                        yield from turns(names, inner)
                    else:
                        yield value(names)

        def listed(names: _Names) -> list[Any]:
            hidden = {name: names[name] for name in bound if name in names}
            found = list(turns(names, loops))
            for name in bound:
                names.pop(name, None)
            names.update(hidden)
            return found

        return listed

    _generatorexp = _listcomp


def _bind(names: _Names, target: Any, value: Any) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    else:
        for each, item in zip(target.elts, value, strict=True):
            _bind(names, each, item)


def _choice(test: Evaluate, body: Evaluate, otherwise: Evaluate) -> Evaluate:
    return lambda names: body(names) if test(names) else otherwise(names)


def is_null_test(op: ast.cmpop, left: ast.expr, right: ast.expr) -> bool:
    """Return whether a comparison is one with ``None`` in the expression, which tests for null."""
    is_test = isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
    return is_test and any(isinstance(each, ast.Constant) and each.value is None for each in (left, right))


def _link(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Callable[[Any, Any], Any]:
    """Return a function that compares the values of *left* and *right*."""
    if is_null_test(op, left, right):
        return operator.is_ if isinstance(op, ast.Eq | ast.Is) else operator.is_not
    function = COMPARISONS[type(op)]
    return function if isinstance(op, ast.Is | ast.IsNot) else _of_values(function)


def _method(name: str) -> Callable[..., Any]:
    def call(value: Any, *arguments: Any) -> Any:
        if value is None or (arguments and arguments[0] is None):
            return None
        if name not in METHODS.get(type(value), ()):
            raise TypeError(f"{type(value).__name__} has no method {name}")
        return getattr(value, name)(*arguments)

    return call


def _of_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap *function* to return null if an argument is null."""

    def applied(*values: Any) -> Any:
        for value in values:
            if value is None:
                return None
        return function(*values)

    return applied


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Prevent *function* from formatting ("%999999999d" % 1) and from repeating ([[0] * 99999] * 99999)."""

    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, SEQUENCES) or isinstance(right, SEQUENCES):
            raise TypeError("* and % accept numbers only")
        return function(left, right)

    return checked


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, SEQUENCES) and isinstance(right, SEQUENCES) and len(left) + len(right) > MAX_SIZE:
        raise ValueError(f"+ makes texts and lists of at most {MAX_SIZE} items")
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_SIZE:
        raise ValueError(f"* makes integers of at most {MAX_SIZE} bits")
    return left * right


def _sum(values: Iterable[Any], start: Any = 0) -> Any:
    if isinstance(start, SEQUENCES):
        raise TypeError("sum accepts numbers only")
    return sum(values, start)


SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Sub: operator.sub,
    ast.Mult: _of_numbers(_multiply),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _of_numbers(operator.mod),
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "sum": _sum,
    "any": lambda values: join_truths(map(truth_of, values), True),
    "all": lambda values: join_truths(map(truth_of, values), False),
    "abs": abs,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}


class _Names(dict[str, Any]):
    """The values of the names in a condition: a sample's fields, decoded on use, and loop variables."""

    def __init__(self, sample: Sample):
        self.sample, self.fields, self.turns = sample, _Fields(sample), 0

    def __missing__(self, name: str) -> Any:
        if name == "key":
            return self.sample["__key__"]
        if name == "shard":
            return shard_of(self.sample)
        return self.fields if name == "fields" else self.fields.value(name)


class _Fields:
    """The fields of a sample, each decoded on first access."""

    def __init__(self, sample: Sample):
        self._sample = sample
        self._decoded: Sample = {}

    def has(self, name: str) -> bool:
        found = find_field(self._sample, name.split(";"))
        if found is not None:
            return not is_reserved(found) and self._sample[found] is not None
        field, path = value_path(name)
        return bool(path) and self.has(field) and value_at(self[field], path) is not None

    def value(self, name: str) -> Any:
        """Return the value of a name that may have dots."""
        if "." not in name:
            return self[name]
        field, path = value_path(name)
        return value_at(self[field], path)

    def __getitem__(self, field: str) -> Any:
        if field not in self._decoded:
            alternatives = field.split(";")
            found = find_field(self._sample, alternatives)
            if found is None or is_reserved(found):
                reason = no_field(alternatives, self._sample)
                raise SampleError(f"{reason}; test for it with has({field!r})").at(self._sample)
            self._decoded[field] = self._decode(found, self._sample[found])
        return self._decoded[field]

    def _decode(self, field: str, value: Any) -> Any:
        try:
            return decode_field(field, value) if isinstance(value, bytes) else value
        except DecodeError as error:
            raise DecodeError(error.reason, field=field).at(self._sample) from error


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
    return location.stem.rpartition(":")[2] if location.scheme else location.stem
