"""Ops as methods; ``Stream`` and ``IndexedShards`` share those that turn each sample into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol

from tarshards.samples.keys import Sample
from tarshards.samples.ledger import error_handler
from tarshards.stream import ops
from tarshards.stream.op import BoundOp, traits_of
from tarshards.stream.other_names import explains

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # that of Python 3.11 has no defaults

    Item = TypeVar("Item", covariant=True, default=Any)
    ItemOfShards = TypeVar("ItemOfShards", covariant=True, default=Sample)
else:
    from typing import TypeVar

    Item = TypeVar("Item")  # the type of the samples of a dataset, after its ops
    ItemOfShards = TypeVar("ItemOfShards")  # the same where they are dicts before its ops

P = ParamSpec("P")
Owner = TypeVar("Owner")
Converted = TypeVar("Converted", covariant=True)


class HasOps(Protocol[Converted]):
    """What has ops as methods, for type checkers; *Converted* is the same with samples of any type."""

    def _then(self, op: BoundOp) -> Converted: ...


def method_of(function: Callable[Concatenate[Any, P], Iterable[Any]]) -> Callable[Concatenate[Owner, P], Owner]:
    """Return an op as a method that checks the arguments and passes the bound op to the method ``_then``.

    For type checkers and editors, it has the parameters of the op and returns the type that it is called on, with the
    same type of samples.
    """

    @explains
    @wraps(function)
    def method(self: Any, /, *args: P.args, **options: P.kwargs) -> Any:
        function((), *args, **options)  # checks the arguments; its samples are never requested
        if "on_error" in options and "on_error" in traits_of(function).context:
            policy: Any = options["on_error"]
            options["on_error"] = error_handler(policy)
        return self._then(BoundOp(function, args, options))

    return method


def converting_method_of(
    function: Callable[Concatenate[Any, P], Iterable[Any]],
) -> Callable[Concatenate[HasOps[Converted], P], Converted]:
    """Return an op as ``method_of`` does, one whose results may be of other types than its samples."""
    method: Any = method_of(function)
    return method


class SampleOps:
    """The ops that turn each sample into one, as methods; subclasses define ``_then``, which adds an op."""

    map: Final = converting_method_of(ops.map)
    map_fields: Final = method_of(ops.map_fields)
    keep_fields: Final = method_of(ops.keep_fields)
    rename_fields: Final = method_of(ops.rename_fields)
    select_fields: Final = method_of(ops.select_fields)
    to_tuple: Final = converting_method_of(ops.to_tuple)
    map_tuple: Final = converting_method_of(ops.map_tuple)
    decode: Final = method_of(ops.decode)
    add_source: Final = method_of(ops.add_source)
    shrink_images: Final = method_of(ops.shrink_images)

    def _then(self, op: BoundOp) -> Any:
        raise NotImplementedError
