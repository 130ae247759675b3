"""Conditions on columns: ``Condition`` with the meaning that it has for samples; no file is read, no code is run.

Arrow compares whole columns: with each other, with constants, and with lists of these. Comparisons joined by ``and``,
``or`` and ``not`` are what selections of millions of samples consist of, and Arrow gives Python's results for them. For
all other conditions, and where Arrow fails (mixed types, integers beyond 64 bits), each row is evaluated like a sample.
What columns do not keep of samples is refused by name: see ``_check``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import chain, compress, repeat
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import OpError
from tarshards.index.access import SampleSequence
from tarshards.index.columns import KEY, load_tables
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import Compiler, Condition, RefusedError, dotted_name, is_null_test, shard_of
from tarshards.samples.ledger import ErrorPolicy, error_handler

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
NULLABLE = {"json", "jsn", "mp", "msg", "msgpack", "cbor"}  # fields that a sample can have, with null in them


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
    names = condition.names()
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
            number, sample = map(int, shards.shards.in_shards(rows[row]))
            key = shards.shards.index(number).key(sample)
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
    of_samples = _check(condition, arrays)
    try:
        found = _mask(condition.tree, arrays)
    except Exception as error:
        if not of_samples and isinstance(error, Unlike):
            raise _unasked(condition, condition.tree) from None
        if not of_samples:  # dates and others that no sample has have Arrow's meaning alone
            reason = f"{condition.expression!r} fails: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise OpError(reason) from error
        values = {name: columns[name] if each is None else each.to_pylist() for name, each in arrays.items()}
        return _by_rows(condition, values, rows, among, fail)
    if isinstance(found, pa.Scalar):
        met = np.full(rows, found.as_py() is True)
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


def _unasked(condition: Condition, node: ast.AST) -> RefusedError:
    reason = "cannot be asked of columns; give a function of a sample, or fields= to read samples"
    return RefusedError(f"{condition.expression!r}: {ast.unparse(node)} {reason}")


def _check(condition: Condition, columns: Mapping[str, Any]) -> bool:
    """Return whether all *columns* that a condition names have types that samples have.

    Raises RefusedError for what may differ between a sample and its columns: objects, which have null there for what a
    sample lacks, other than in a test for null; text made from fractions, and methods that are given some, since
    columns of both kinds of numbers have fractions only; whether values are identical; and whether a sample has a field
    that can be null.
    """
    types = require("pyarrow", extra="arrow").types
    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    kept = types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_string, types.is_binary

    def kind_of(node: ast.AST) -> Any:
        """Return the type of the values in a column, or in its lists; null if *node* names no column."""
        column = columns.get(dotted_name(node) or "")
        kind = require("pyarrow", extra="arrow").null() if column is None else column.type
        while any(test(kind) for test in lists):
            kind = kind.value_type
        return kind

    of_samples = True
    tested: set[ast.AST] = set()
    for node in ast.walk(condition.tree):
        is_refused = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, *pair in zip(node.ops, sides, sides[1:]):
                is_tested = is_null_test(op, *pair)
                is_refused |= isinstance(op, ast.Is | ast.IsNot) and not is_tested
                if is_tested and len(sides) == 2:
                    tested |= {*pair}
        elif isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute)
            name = "" if is_method else getattr(node.func, "id", "")
            if name == "has":
                field = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                is_refused = field not in columns or field in NULLABLE or field in (KEY, "key", "shard")
            arguments = node.args[1:] if is_method or name == "int" else node.args if name == "str" else []
            is_refused |= any(types.is_floating(kind_of(each)) for each in chain(*map(ast.walk, arguments)))
        elif not any(test(kind_of(node)) for test in kept):
            of_samples = False
            is_refused = types.is_nested(columns[dotted_name(node) or ""].type) and node not in tested
        elif isinstance(node, ast.Subscript | ast.comprehension):
            is_refused = True
        if is_refused:
            raise _unasked(condition, node)
    return of_samples


class Unlike(Exception):
    """Arrow's result might differ from Python's."""


def _mask(node: ast.expr, columns: Mapping[str, Any]) -> Any:
    """Return which rows meet *node*: booleans and nulls in an array of Arrow, or if it names nothing, in a scalar.

    Raises Unlike for what Arrow does not evaluate.
    """
    pa, compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
    if _names_nothing(node):
        return pa.scalar(Compiler("").test(node)({}), pa.bool_())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return compute.invert(_mask(node.operand, columns))
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        sides = [node.left, *node.comparators]
        links = [ast.Compare(left, [op], [right]) for op, left, right in zip(node.ops, sides, sides[1:])]
        node = ast.BoolOp(ast.And(), list[ast.expr](links))
    if isinstance(node, ast.BoolOp):
        join = compute.or_kleene if isinstance(node.op, ast.Or) else compute.and_kleene
        return reduce(join, (_mask(each, columns) for each in node.values))
    if isinstance(node, ast.Compare):
        return _compared(node.ops[0], node.left, node.comparators[0], columns)
    found = _value(node, columns)
    if not pa.types.is_boolean(found.type):
        raise Unlike
    return found


def _value(node: ast.expr, columns: Mapping[str, Any]) -> Any:
    """Return the value of *node* in each row, an array of Arrow, or if it names nothing, Python's value."""
    pa = require("pyarrow", extra="arrow")
    if _names_nothing(node):
        return Compiler("").value(node)({})
    if isinstance(node, ast.Name | ast.Attribute):
        column = columns[dotted_name(node) or ""]
        if column is None or pa.types.is_binary(column.type) or column.type == pa.uint64():
            raise Unlike
        return column
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "has":
        (field,) = node.args
        return require("pyarrow.compute", extra="arrow").is_valid(columns[ast.literal_eval(field)])
    if isinstance(node, ast.Compare):
        return _mask(node, columns)
    raise Unlike


def _names_nothing(node: ast.expr) -> bool:
    return not any(isinstance(each, ast.Name) for each in ast.walk(node))


def _compared(op: ast.cmpop, left: ast.expr, right: ast.expr, columns: Mapping[str, Any]) -> Any:
    """Return the comparison of two nodes in each row; at least one of them names a column."""
    pa, compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
    pair = [_value(each, columns) for each in (left, right)]
    arrays = [each for each in pair if isinstance(each, pa.Array | pa.ChunkedArray)]
    if is_null_test(op, left, right):
        found = compute.is_null(arrays[0])
    elif any(each is None for each in pair) or any(pa.types.is_null(array.type) for array in arrays):
        return pa.nulls(len(arrays[0]), pa.bool_())
    elif isinstance(op, ast.In | ast.NotIn):
        found = _contained(*pair)
    elif any(isinstance(each, list | tuple | set) for each in pair):
        raise Unlike  # Arrow would take them for columns
    else:
        return getattr(compute, COMPARED[type(op)])(*pair)
    return compute.invert(found) if isinstance(op, ast.NotIn | ast.NotEq | ast.IsNot) else found


def _contained(left: Any, right: Any) -> Any:
    """Return whether *left* is in *right*: values in a list of such, or a text in texts."""
    pa, compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
    if isinstance(left, str):
        return compute.match_substring(right, left)
    if not isinstance(right, list | tuple | set):
        raise Unlike
    wanted = {pa.int64(): int, pa.string(): str}.get(left.type)
    if {wanted} | {*map(type, right)} != {wanted}:
        raise Unlike
    found = compute.is_in(left, value_set=pa.array(right, left.type))
    return compute.if_else(compute.is_valid(left), found, None)
