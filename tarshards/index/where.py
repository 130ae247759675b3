"""Conditions on columns: ``Condition`` with the meaning that it has for samples; no file is read, no code is run.

Arrow compares whole columns: with each other, with constants, and with lists of these. Comparisons joined by ``and``,
``or`` and ``not`` are what selections of millions of samples consist of, and Arrow gives Python's results for them. For
all other conditions, and where Arrow fails (mixed types, integers beyond 64 bits), each row is evaluated like a sample.
What columns do not keep of samples is refused by name: see ``ColumnCompiler.check``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import compress, repeat
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import OpError
from tarshards.index.access import SampleSequence
from tarshards.index.columns import KEY, load_tables
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import Compiler, Condition, Evaluate, RefusedError, dotted_name, shard_of
from tarshards.samples.ledger import ErrorPolicy, error_handler

COMPARED = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
NULLABLE = {"json", "jsn", "mp", "msg", "msgpack", "cbor"}  # fields that a sample can have, with null in them


def names_in(condition: Condition) -> set[str] | None:
    """Return the names in a condition besides functions; None if only samples can answer it.

    >>> names_in(Condition("len(json.text) > 3 and has('a')")) == {"json.text", "a"}, names_in(Condition("fields['a']"))
    (True, None)
    """
    names, own = set[str](), set[ast.AST]()
    for node in ast.walk(condition.tree):
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


def by_columns(
    shards: SampleSequence,
    condition: Condition,
    *,
    among: Callable[[], NDArray[np.bool_]] | None = None,
    on_error: ErrorPolicy = None,
) -> NDArray[np.bool_] | None:
    """Return which samples of *shards* meet a condition by their columns; None if it names none of these.

    Samples that *among* does not return do not meet it. Raises ShardIndexError if some of its names are columns and
    others are not, and ValueError for a condition that columns cannot answer. Of a sample for which it fails, an
    OpError is raised, or goes to *on_error*.
    """
    names = names_in(condition)
    if not names or not (wanted := names - {"key", "shard"}):
        return None
    tables = load_tables(shards, sorted(wanted) + [KEY] * ("key" in names))
    if tables is None:
        return None
    handle = error_handler(on_error)
    ends = np.cumsum(shards.counts)
    chosen = np.ones(int(ends[-1]), np.bool_) if among is None else among()
    alike: dict[Any, list[int]] = {}  # shards by the types of their columns, which are evaluated together
    for number, table in enumerate(tables):
        alike.setdefault(tuple(table.schema.types), []).append(number)
    for numbers in alike.values():
        table = require("pyarrow", extra="arrow").concat_tables([tables[number] for number in numbers])
        rows = np.concatenate([np.arange(ends[number] - shards.counts[number], ends[number]) for number in numbers])
        columns = {name: table.column(name) for name in table.column_names}
        if "key" in names:
            columns["key"] = _keys(shards, numbers, columns.pop(KEY))
        if "shard" in names:
            columns["shard"] = [
                base
                for number in numbers
                for base in repeat(shard_of({"__url__": shards.urls[number]}), int(shards.counts[number]))
            ]

        def fail(row: int, error: OpError, rows: NDArray[np.int64] = rows) -> None:
            number = int(np.searchsorted(ends, rows[row], "right"))
            key = shards.shards.index(number).key(int(rows[row] - ends[number] + shards.counts[number]))
            located = OpError(error.reason, url=shards.shards.names[number], key=key)
            located.__cause__ = error.__cause__
            if handle is None:
                raise located
            handle(located)

        chosen[rows] = meets(condition, columns, len(rows), among=chosen[rows], fail=fail)
    return chosen


def _keys(shards: SampleSequence, numbers: list[int], column: Any) -> Any:
    """Return the keys of some shards; from their indexes, if some are no Unicode, which columns cannot hold."""
    compute = require("pyarrow.compute", extra="arrow")
    if not compute.any(compute.match_substring(column, "\ufffd")).as_py():
        return column
    return [key for number in numbers for key in shards.shards.index(number).keys]


def _raise(row: int, error: OpError) -> NoReturn:
    raise error


def meets(
    condition: Condition,
    columns: Mapping[str, Any],
    rows: int,
    *,
    among: NDArray[np.bool_] | None = None,
    fail: Callable[[int, OpError], None] = _raise,
) -> NDArray[np.bool_]:
    """Return which of the *rows* of *columns*, Arrow's or lists of text, meet a condition; *among* these, if given.

    The errors are those of ``by_columns``; *fail* is called with a row for which the condition fails, and the error.
    """
    pa, compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        try:
            arrays[name] = _plain(column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column))
        except UnicodeEncodeError:  # a name of bytes that are no Unicode
            arrays[name] = None
    compiler = ColumnCompiler(condition.expression, arrays)
    of_samples = compiler.check(condition.tree)
    test = compiler.test(condition.tree)
    try:
        found = test(arrays)
    except Exception as error:
        if not of_samples and isinstance(error, Unlike):
            raise compiler.unasked(condition.tree) from None
        if not of_samples:  # dates and others that no sample has have Arrow's meaning alone
            reason = f"{condition.expression!r} fails: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise OpError(reason) from error
        values = {name: columns[name] if each is None else each.to_pylist() for name, each in arrays.items()}
        return _by_rows(condition, values, rows, among, fail)
    if not compiler.is_array(found):
        met = np.full(rows, found is True)
    else:
        met = compute.fill_null(found, False).to_numpy(zero_copy_only=False)
    return met if among is None else met & among


def _by_rows(
    condition: Condition,
    values: Mapping[str, list[Any]],
    rows: int,
    among: NDArray[np.bool_] | None,
    fail: Callable[[int, OpError], None],
) -> NDArray[np.bool_]:
    """Return what ``meets`` does, each row evaluated like a sample."""
    met = np.zeros(rows, np.bool_)
    every = zip(range(rows), zip(*values.values()) if values else repeat(()))
    for row, each in every if among is None else compress(every, among.tolist()):
        try:
            met[row] = condition.holds(_Row(zip(values, each)))
        except OpError as error:
            fail(row, error)
    return met


class _Row(dict[str, Any]):
    """The values of a row, by the names of columns."""

    @property
    def fields(self) -> _Row:
        return self

    def has(self, field: str) -> bool:
        return self[field] is not None


def _plain(column: Any) -> Any:
    """Return a column with one type for whole numbers, one for others and one for text, if it has other such types."""
    pa = require("pyarrow", extra="arrow")
    types, kind = pa.types, column.type
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if types.is_integer(kind):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:  # rows have Python's integers
            return column
    if types.is_floating(kind):
        return column.cast(pa.float64())
    if types.is_large_binary(kind) or types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    return column.cast(pa.string()) if types.is_large_string(kind) or types.is_string_view(kind) else column


class Unlike(Exception):
    """Arrow's result might differ from Python's."""


def _unlike(columns: Mapping[str, Any]) -> NoReturn:
    raise Unlike


class ColumnCompiler(Compiler):
    """Compiles conditions on *columns*, Arrow's arrays by name, None for those that Arrow cannot hold.

    Functions of nodes that Arrow does not evaluate raise Unlike.
    """

    def __init__(self, expression: str, columns: Mapping[str, Any]):
        super().__init__(expression)
        self.pa: Any = require("pyarrow", extra="arrow")
        self.compute: Any = require("pyarrow.compute", extra="arrow")
        self.columns = columns

    def unasked(self, node: ast.AST) -> RefusedError:
        reason = "cannot be asked of columns; give a function of a sample, or fields= to read samples"
        return self.refused(f"{ast.unparse(node)} {reason}")

    def check(self, tree: ast.expr) -> bool:
        """Return whether all columns that *tree* names have types that samples have.

        Raises RefusedError for what may differ between a sample and its columns: objects, which have null there for
        what a sample lacks, other than in a test for null; text made from fractions, and methods that are given some,
        since columns of both kinds of numbers have fractions only; whether values are identical; and whether a sample
        has a field that can be null.
        """
        of_samples = True
        tested: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                for op, *pair in zip(node.ops, sides, sides[1:]):
                    nulls = [isinstance(each, ast.Constant) and each.value is None for each in pair]
                    if isinstance(op, ast.Is | ast.IsNot) and not any(nulls):
                        raise self.unasked(node)
                    if any(nulls) and isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and len(sides) == 2:
                        tested |= {*pair}
            elif isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                is_method = isinstance(node.func, ast.Attribute)
                arguments = node.args[1:] if is_method or name == "int" else node.args if name == "str" else []
                within = [each for argument in arguments for each in ast.walk(argument)]
                if any(self._has_fractions(dotted_name(each)) for each in within):
                    raise self.unasked(node)
            elif not self._is_value(name := dotted_name(node)):
                of_samples = False
                if self.pa.types.is_nested(self.columns[name or ""].type) and node not in tested:
                    raise self.unasked(node)
        return of_samples

    def _is_value(self, name: str | None) -> bool:
        """Return whether samples have values like those of the column of a *name*, if there is one."""
        types = self.pa.types
        tests = types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_string, types.is_binary
        kind = self._innermost(name)
        return kind is None or any(test(kind) for test in tests)

    def _has_fractions(self, name: str | None) -> bool:
        kind = self._innermost(name)
        return kind is not None and bool(self.pa.types.is_floating(kind))

    def _innermost(self, name: str | None) -> Any:
        """Return the type of the values in a column, or in its lists; None if there is no column of a *name*."""
        column, types = self.columns.get(name or ""), self.pa.types
        kind = None if column is None else column.type
        while kind is not None and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            kind = kind.value_type
        return kind

    def value(self, node: ast.AST) -> Evaluate:
        value = super().value(node)
        is_has = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "has"
        is_simple = isinstance(node, ast.Name | ast.Attribute | ast.Compare) or is_has
        names_none = not any(isinstance(each, ast.Name) for each in ast.walk(node))
        return value if is_simple or names_none else _unlike

    def _name(self, node: ast.Name) -> Evaluate:
        super()._name(node)
        return self.dotted(node.id)

    def dotted(self, name: str) -> Evaluate:
        def named(columns: Mapping[str, Any]) -> Any:
            column = columns[name]
            if column is None or self.pa.types.is_binary(column.type) or column.type == self.pa.uint64():
                raise Unlike
            return column

        return named

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.pa.Array | self.pa.ChunkedArray)

    def truth(self, value: Any) -> Any:
        if not self.is_array(value):
            return super().truth(value)
        if not self.pa.types.is_boolean(value.type):
            raise Unlike
        return value

    def negate(self, truth: Any) -> Any:
        return self.compute.invert(truth) if self.is_array(truth) else super().negate(truth)

    def is_null(self, value: Any) -> Any:
        return self.compute.is_null(value) if self.is_array(value) else super().is_null(value)

    def join(self, truths: Iterable[Any], decisive: bool) -> Any:
        join = self.compute.or_kleene if decisive else self.compute.and_kleene

        def joined(left: Any, right: Any) -> Any:
            if not (self.is_array(left) or self.is_array(right)):
                return super(ColumnCompiler, self).join([left, right], decisive)
            return join(*(self.pa.scalar(each, self.pa.bool_()) if each is None else each for each in (left, right)))

        return reduce(joined, truths)

    def choose(self, test: Evaluate, body: Evaluate, otherwise: Evaluate) -> Evaluate:
        return _unlike

    def compared(self, op: ast.cmpop) -> Callable[[Any, Any], Any]:
        of_values = super().compared(op)

        def compared(*pair: Any) -> Any:
            arrays = [value for value in pair if self.is_array(value)]
            if not arrays:
                return of_values(*pair)
            if any(value is None for value in pair) or any(self.pa.types.is_null(array.type) for array in arrays):
                return self.pa.nulls(len(arrays[0]), self.pa.bool_())
            return self._contained(op, *pair) if isinstance(op, ast.In | ast.NotIn) else self._ordered(op, *pair)

        return compared

    def _ordered(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(left, list | tuple | set) or isinstance(right, list | tuple | set):
            raise Unlike  # Arrow would take them for columns
        return getattr(self.compute, COMPARED[type(op)])(left, right)

    def _contained(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        """Return whether *left* is in *right*: values in a list of such, or a text in texts."""
        if self.is_array(left) and isinstance(right, list | tuple | set):
            wanted = {self.pa.int64(): int, self.pa.string(): str}.get(left.type)
            if {wanted} | {*map(type, right)} != {wanted}:
                raise Unlike
            found = self.compute.is_in(left, value_set=self.pa.array(right, left.type))
            found = self.compute.if_else(self.compute.is_valid(left), found, None)
        elif isinstance(left, str) and self.is_array(right):
            found = self.compute.match_substring(right, left)
        else:
            raise Unlike
        return found if isinstance(op, ast.In) else self.negate(found)

    def has(self, node: ast.Call) -> Evaluate:
        (field,) = node.args
        name = field.value if isinstance(field, ast.Constant) else None
        if name not in self.columns or name in NULLABLE or name in (KEY, "key", "shard"):
            raise self.unasked(node)
        return lambda columns: self.compute.is_valid(columns[name])

    def _subscript(self, node: ast.expr) -> Evaluate:
        raise self.unasked(node)

    _listcomp = _generatorexp = _subscript
