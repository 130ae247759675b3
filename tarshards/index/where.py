"""Conditions on columns: the language of ``Condition`` by Arrow's compute functions; no file is read, no code is run.

A comparison with null is null, as in SQL: a sample whose value is null meets neither it nor its negation. Constants and
functions mean what they mean for samples.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import OpError, TarshardsError
from tarshards.index.access import IndexedShards
from tarshards.index.columns import KEY, load_columns
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import FUNCTIONS, Condition, shard_of

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
    """Return the names in a condition besides functions; None where it can only be asked of samples.

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


def by_columns(shards: IndexedShards, condition: Condition) -> NDArray[np.bool_] | None:
    """Return which samples of *shards* meet a condition by their columns; None where it names none of these.

    Raises ShardIndexError where some of its names are columns and others are not, OpError where it fails, and
    ValueError for what cannot be asked of columns.
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
    pa = require("pyarrow", extra="arrow")
    evaluation = _Evaluation(condition.expression, columns)
    try:
        found = evaluation.truth(evaluation.of(condition.tree.body))
    except TarshardsError:
        raise
    except (pa.ArrowException, ArithmeticError) as error:
        reason = f"{condition.expression!r} fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise OpError(reason) from error
    if isinstance(found, bool):
        return np.full(rows, found)
    return evaluation.compute.fill_null(found, False).to_numpy(zero_copy_only=False)


class _Evaluation:
    """The values of the nodes of an expression: Arrow's arrays, or constants of Python."""

    def __init__(self, expression: str, columns: dict[str, Any]):
        self.pa, self.compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
        self.expression, self.columns = expression, columns

    def of(self, node: ast.AST) -> Any:
        visit: Callable[[Any], Any] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        if visit is None:
            raise self.refused(node)
        return visit(node)

    def refused(self, node: ast.AST) -> ValueError:
        return ValueError(
            f"{self.expression!r}: {ast.unparse(node)} cannot be asked of columns; give a function of a sample, or "
            "fields= to read samples"
        )

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.pa.Array | self.pa.ChunkedArray)

    def truth(self, value: Any) -> Any:
        """Return *value* as booleans, as Python has it: numbers besides 0, texts and lists besides empty ones."""
        if not self.is_array(value):
            return bool(value)
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

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        return self.columns[node.id]

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        values = [self.of(item) for item in node.elts]
        if any(map(self.is_array, values)):
            raise self.refused(node)
        return values

    _tuple = _set = _list

    def _boolop(self, node: ast.BoolOp) -> Any:
        join = self.compute.and_kleene if isinstance(node.op, ast.And) else self.compute.or_kleene
        result, *others = (self.truth(self.of(value)) for value in node.values)
        for other in others:
            if self.is_array(result) or self.is_array(other):
                result = join(result, other)
            else:
                result = result and other if isinstance(node.op, ast.And) else result or other
        return result

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.of(node.operand)
        if isinstance(node.op, ast.Not):
            found = self.truth(value)
            return self.compute.invert(found) if self.is_array(found) else not found
        if isinstance(node.op, ast.UAdd):
            return value
        return self.compute.negate_checked(value) if self.is_array(value) else -value

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.of(node.left), self.of(node.right)
        if not (self.is_array(left) or self.is_array(right)):
            raise self.refused(node)
        if type(node.op) in COMPUTED:
            return getattr(self.compute, COMPUTED[type(node.op)])(left, right)
        if isinstance(node.op, ast.Div):
            return self.compute.divide_checked(self._as_float(left), self._as_float(right))
        return self._divided(left, right, node)

    def _as_float(self, value: Any) -> Any:
        return value.cast(self.pa.float64()) if self.is_array(value) else float(value)

    def _divided(self, left: Any, right: Any, node: ast.BinOp) -> Any:
        """Return the quotient or remainder of whole numbers, rounded down."""
        compute = self.compute
        for value in (left, right):
            kind = value.type if self.is_array(value) else self.pa.scalar(value).type
            if not self.pa.types.is_integer(kind):
                raise self.refused(node)
        quotient = compute.divide_checked(left, right)
        rest = compute.subtract_checked(left, compute.multiply_checked(quotient, right))
        differ = compute.xor(compute.less(rest, 0), compute.less(right, 0))
        lower = compute.and_(compute.not_equal(rest, 0), differ).cast(self.pa.int64())
        if isinstance(node.op, ast.FloorDiv):
            return compute.subtract_checked(quotient, lower)
        return compute.add_checked(rest, compute.multiply_checked(lower, right))

    def _compare(self, node: ast.Compare) -> Any:
        operands = [self.of(value) for value in (node.left, *node.comparators)]
        pairs = zip(node.ops, operands, operands[1:])
        results = [self._compared(op, left, right, node) for op, left, right in pairs]
        found = results[0]
        for other in results[1:]:
            found = self.compute.and_kleene(found, other)
        return found

    def _compared(self, op: ast.cmpop, left: Any, right: Any, node: ast.Compare) -> Any:
        compute = self.compute
        negative = isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn)
        if isinstance(op, ast.In | ast.NotIn):
            if self.is_array(left) and isinstance(right, list):
                found = compute.is_in(left, value_set=self.pa.array(right))
                found = compute.if_else(compute.is_valid(left), found, None)
            elif isinstance(left, str) and self.is_array(right):
                found = compute.match_substring(right, left)
            else:
                raise self.refused(node)
            return compute.invert(found) if negative else found
        if not (self.is_array(left) or self.is_array(right)):
            raise self.refused(node)
        if left is None or right is None:
            if type(op) not in (ast.Eq, ast.NotEq, ast.Is, ast.IsNot):
                raise self.refused(node)
            value = right if left is None else left
            return compute.is_valid(value) if negative else compute.is_null(value)
        if type(op) not in COMPARED:
            raise self.refused(node)
        return getattr(compute, COMPARED[type(op)])(left, right)

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.compute.if_else(self.truth(self.of(node.test)), self.of(node.body), self.of(node.orelse))

    def _call(self, node: ast.Call) -> Any:
        compute = self.compute
        if isinstance(node.func, ast.Attribute):
            value, arguments = self.of(node.func.value), [self.of(argument) for argument in node.args]
            if self.is_array(value) and node.func.attr in METHODS and not arguments:
                return getattr(compute, METHODS[node.func.attr])(value)
            if self.is_array(value) and node.func.attr in PATTERNS and [*map(type, arguments)] == [str]:
                return getattr(compute, PATTERNS[node.func.attr])(value, arguments[0])
            raise self.refused(node)
        name = getattr(node.func, "id", "")
        if name == "has":
            if (
                len(node.args) != 1
                or not isinstance(node.args[0], ast.Constant)
                or node.args[0].value not in self.columns
            ):
                raise self.refused(node)
            return compute.is_valid(self.columns[node.args[0].value])
        arguments = [self.of(argument) for argument in node.args]
        if not any(map(self.is_array, arguments)):
            return FUNCTIONS[name](*arguments)
        if name in ("min", "max") and len(arguments) > 1:
            return getattr(compute, f"{name}_element_wise")(*arguments, skip_nulls=False)
        if len(arguments) != 1:
            raise self.refused(node)
        (value,) = arguments
        if name == "len":
            is_list = self.pa.types.is_list(value.type)
            return compute.list_value_length(value) if is_list else compute.utf8_length(value)
        if name == "abs":
            return compute.abs_checked(value)
        if name == "bool":
            return self.truth(value)
        if name == "float":
            return value.cast(self.pa.float64())
        raise self.refused(node)
