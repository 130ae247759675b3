"""Conditions on columns: ``Condition`` by Arrow's compute functions; no file is read, no code is run.

Constants, functions and nulls have the same meaning as for samples. Columns are evaluated whole, including operands of
``and`` and ``or`` that do not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import OpError, TarshardsError
from tarshards.index.access import SampleSequence
from tarshards.index.columns import KEY, load_columns
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import Compiler, Condition, Evaluate, RefusedError, shard_of

COMPARED = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
COMPUTED = {ast.Add: "add_checked", ast.Sub: "subtract_checked", ast.Mult: "multiply_checked"}
METHODS = {"lower": "utf8_lower", "upper": "utf8_upper", "strip": "utf8_trim_whitespace"}
PATTERNS = {"startswith": "starts_with", "endswith": "ends_with"}


def names_of(condition: Condition) -> set[str] | None:
    """Return the names in a condition besides functions; None if only samples can answer it.

    >>> names_of(Condition("len(text) > 3 and has('score')")) == {"text", "score"}, names_of(Condition("fields['a']"))
    (True, None)
    """
    names, own = set[str](), set[ast.AST]()
    for node in ast.walk(condition.tree):
        if isinstance(node, ast.comprehension | ast.Subscript):
            return None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            own.add(node.func)
            if node.func.id == "has":
                names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.Name) and node not in own:
            names.add(node.id)
    return names


def by_columns(shards: SampleSequence, condition: Condition) -> NDArray[np.bool_] | None:
    """Return which samples of *shards* meet a condition by their columns; None if it names none of these.

    Raises ShardIndexError if some of its names are columns and others are not, OpError if it fails, and
    ValueError for a condition that columns cannot answer.
    """
    names = names_of(condition)
    if not names or not (wanted := names - {"key", "shard"}):
        return None
    table = load_columns(shards, sorted(wanted) + [KEY] * ("key" in names))
    if table is None:
        return None
    columns = {name: table.column(name) for name in table.column_names}
    if "key" in names:
        columns["key"] = columns[KEY]
    if "shard" in names:
        pa = require("pyarrow", extra="arrow")
        bases = pa.array([shard_of({"__url__": url}) for url in shards.urls])
        columns["shard"] = bases.take(pa.array(np.repeat(np.arange(len(bases)), shards.counts)))
    return meets(condition, columns, len(table))


def meets(condition: Condition, columns: dict[str, Any], rows: int) -> NDArray[np.bool_]:
    """Return which of the *rows* of Arrow's *columns* meet a condition; the errors are those of ``by_columns``."""
    compiler = ColumnCompiler(condition.expression, columns)
    try:
        found = compiler.test(condition.tree)(columns)
    except (TarshardsError, RefusedError):
        raise
    except Exception as error:
        reason = f"{condition.expression!r} fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise OpError(reason) from error
    if not compiler.is_array(found):
        return np.full(rows, found is True)
    return compiler.compute.fill_null(found, False).to_numpy(zero_copy_only=False)


class ColumnCompiler(Compiler):
    """Compiles conditions on *columns*, Arrow's arrays by name."""

    def __init__(self, expression: str, columns: dict[str, Any]):
        super().__init__(expression)
        self.pa: Any = require("pyarrow", extra="arrow")
        self.compute: Any = require("pyarrow.compute", extra="arrow")
        self.columns = columns

    def unasked(self, node: ast.AST) -> RefusedError:
        reason = "cannot be asked of columns; give a function of a sample, or fields= to read samples"
        return self.refused(f"{ast.unparse(node)} {reason}")

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.pa.Array | self.pa.ChunkedArray)

    def by_arrays(self, of_arrays: Callable[..., Any], of_values: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function *of_arrays* where an argument is one, *of_values* otherwise; null where one is null."""

        def applied(*values: Any) -> Any:
            arrays = [value for value in values if self.is_array(value)]
            if not arrays:
                return of_values(*values)
            if type(None) in map(type, values) or any(self.pa.types.is_null(array.type) for array in arrays):
                return self.pa.nulls(len(arrays[0]))
            return of_arrays(*values)

        return applied

    def truth(self, value: Any) -> Any:
        """Return the truth of *value* as in Python: False for 0, and for empty texts and lists."""
        if not self.is_array(value):
            return super().truth(value)
        kind, types, compute = value.type, self.pa.types, self.compute
        if types.is_boolean(kind):
            return value
        if types.is_null(kind):
            return value.cast(self.pa.bool_())
        if types.is_string(kind) or types.is_large_string(kind):
            return compute.not_equal(value, "")
        if types.is_list(kind):
            return compute.not_equal(compute.list_value_length(value), 0)
        return compute.not_equal(value, 0)

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
        return lambda columns: self._chosen(test(columns), body(columns), otherwise(columns))

    def _chosen(self, truth: Any, body: Any, otherwise: Any) -> Any:
        if not self.is_array(truth):
            return body if truth else otherwise
        return self.compute.if_else(self.compute.fill_null(truth, False), body, otherwise)

    def _boolop(self, node: ast.BoolOp) -> Evaluate:
        values = [*map(self.value, node.values)]

        def chosen(columns: dict[str, Any]) -> Any:
            *others, found = (value(columns) for value in values)
            for value in reversed(others):
                pair = (value, found) if isinstance(node.op, ast.Or) else (found, value)
                found = self._chosen(self.truth(value), *pair)
            return found

        return chosen

    def signed(self, node: ast.UnaryOp) -> Callable[[Any], Any]:
        negative = isinstance(node.op, ast.USub)
        return self.by_arrays(
            lambda value: self.compute.negate_checked(value) if negative else value, super().signed(node)
        )

    def arithmetic(self, node: ast.BinOp) -> Callable[[Any, Any], Any]:
        def computed(left: Any, right: Any) -> Any:
            if type(node.op) in COMPUTED:
                return getattr(self.compute, COMPUTED[type(node.op)])(left, right)
            if isinstance(node.op, ast.Div):
                return self.compute.divide_checked(self._as_float(left), self._as_float(right))
            return self._divided(left, right, node)

        return self.by_arrays(computed, super().arithmetic(node))

    def _as_float(self, value: Any) -> Any:
        return value.cast(self.pa.float64()) if self.is_array(value) else float(value)

    def _divided(self, left: Any, right: Any, node: ast.BinOp) -> Any:
        """Return the quotient or remainder of whole numbers, rounded down."""
        compute = self.compute
        for value in (left, right):
            kind = value.type if self.is_array(value) else self.pa.scalar(value).type
            if not self.pa.types.is_integer(kind):
                raise self.unasked(node)
        quotient = compute.divide_checked(left, right)
        rest = compute.subtract_checked(left, compute.multiply_checked(quotient, right))
        differ = compute.xor(compute.less(rest, 0), compute.less(right, 0))
        lower = compute.and_(compute.not_equal(rest, 0), differ).cast(self.pa.int64())
        if isinstance(node.op, ast.FloorDiv):
            return compute.subtract_checked(quotient, lower)
        return compute.add_checked(rest, compute.multiply_checked(lower, right))

    def compared(self, op: ast.cmpop, node: ast.Compare) -> Callable[[Any, Any], Any]:
        def computed(left: Any, right: Any) -> Any:
            if type(op) in COMPARED:
                return getattr(self.compute, COMPARED[type(op)])(left, right)
            if not isinstance(op, ast.In | ast.NotIn):
                raise self.unasked(node)
            if self.is_array(left) and isinstance(right, list | tuple | set):
                found = self.compute.is_in(left, value_set=self.pa.array(right))
                found = self.compute.if_else(self.compute.is_valid(left), found, None)
            elif isinstance(left, str) and self.is_array(right):
                found = self.compute.match_substring(right, left)
            else:
                raise self.unasked(node)
            return found if isinstance(op, ast.In) else self.negate(found)

        return self.by_arrays(computed, super().compared(op, node))

    def function(self, name: str, node: ast.Call) -> Callable[..., Any]:
        def computed(*values: Any) -> Any:
            if name in ("min", "max") and len(values) > 1:
                return getattr(self.compute, f"{name}_element_wise")(*values, skip_nulls=False)
            if len(values) != 1:
                raise self.unasked(node)
            (value,) = values
            if name == "len":
                is_list = self.pa.types.is_list(value.type)
                return self.compute.list_value_length(value) if is_list else self.compute.utf8_length(value)
            if name == "abs":
                return self.compute.abs_checked(value)
            if name == "bool":
                return self.truth(value)
            if name == "float":
                return value.cast(self.pa.float64())
            raise self.unasked(node)

        return self.by_arrays(computed, super().function(name, node))

    def method(self, name: str, node: ast.Call) -> Callable[..., Any]:
        def computed(value: Any, *arguments: Any) -> Any:
            if self.is_array(value) and name in METHODS and not arguments:
                return getattr(self.compute, METHODS[name])(value)
            if self.is_array(value) and name in PATTERNS and [*map(type, arguments)] == [str]:
                return getattr(self.compute, PATTERNS[name])(value, arguments[0])
            raise self.unasked(node)

        return self.by_arrays(computed, super().method(name, node))

    def has(self, node: ast.Call) -> Evaluate:
        (field,) = node.args
        if not isinstance(field, ast.Constant) or field.value not in self.columns:
            raise self.unasked(node)
        return lambda columns: self.compute.is_valid(columns[field.value])

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Evaluate:
        values = [*map(self.value, node.elts)]

        def listed(columns: dict[str, Any]) -> list[Any]:
            found = [value(columns) for value in values]
            if any(map(self.is_array, found)):
                raise self.unasked(node)
            return found

        return listed

    _tuple = _set = _list

    def _subscript(self, node: ast.expr) -> Evaluate:
        raise self.unasked(node)

    _listcomp = _generatorexp = _subscript
