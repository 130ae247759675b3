"""Ops as methods; those that turn each sample into one are the same for streams and for ``IndexedShards``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from tarshards.samples.ledger import error_handler
from tarshards.stream import ops
from tarshards.stream.op import BoundOp, traits_of
from tarshards.stream.other_names import explains


def method_of(function: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
    """Return an op as a method, which checks the arguments and gives the op to the method ``_then``."""

    @explains
    @wraps(function)
    def method(self: Any, /, *args: Any, **options: Any) -> Any:
        function((), *args, **options)  # checks the arguments; its samples are never requested
        if "on_error" in options and "on_error" in traits_of(function).context:
            options["on_error"] = error_handler(options["on_error"])
        return self._then(BoundOp(function, args, options))

    return method


class SampleOps:
    """The ops that turn each sample into one, as methods; a subclass defines in ``_then`` how an op is added."""

    map = method_of(ops.map)
    map_fields = method_of(ops.map_fields)
    keep_fields = method_of(ops.keep_fields)
    rename_fields = method_of(ops.rename_fields)
    select_fields = method_of(ops.select_fields)
    to_tuple = method_of(ops.to_tuple)
    map_tuple = method_of(ops.map_tuple)
    decode = method_of(ops.decode)
    add_source = method_of(ops.add_source)
    shrink_images = method_of(ops.shrink_images)

    def _then(self, op: BoundOp) -> Any:
        raise NotImplementedError
