"""The traits of an op, declared where it is defined and consulted by streams and loaders; ops with their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Context = Literal["epoch", "seed", "on_error"]
Class = Literal["filtered", "discarded"]


class Traits(NamedTuple):
    """The properties of an op.

    - *per_sample*: it gives the same results for the parts of a stream as for the whole, so a loader may run it on one
      batch.
    - *resumable*: it neither holds samples back nor counts them, so the position of the source is also that of the op.
    - *one_for_one*: it yields one result for each sample that it takes.
    - *leaves_out*: if it leaves samples out on purpose, the class in which the ledger counts them.
    - *reads_ahead*: it takes several samples before it yields the first result, and yields or fails them in order.
    - *filters_with*: the option with which it leaves samples out; the ledger counts them as filtered.
    - *gathers*: if it makes one result from several samples, the name of the argument with their number.
    - *context*: the arguments that a stream supplies unless the caller does.
    - *instead*: what to use instead if a loader refuses it.
    """

    per_sample: bool = False
    resumable: bool = False
    one_for_one: bool = False
    leaves_out: Class | None = None
    reads_ahead: bool = False
    filters_with: str = ""
    gathers: str | None = None
    context: tuple[Context, ...] = ()
    instead: str = ""


def op(**traits: Any) -> Callable[[Function], Function]:
    """Return a decorator that declares the traits of an op, the fields of ``Traits``."""

    def declare(function: Function) -> Function:
        function.traits = Traits(**traits)  # type: ignore[attr-defined]
        return function

    return declare


def traits_of(function: Callable[..., Any]) -> Traits:
    """Return the traits that ``op`` declared."""
    traits: Traits = function.traits  # type: ignore[attr-defined]
    return traits


class BoundOp(NamedTuple):
    """An op and its arguments."""

    function: Callable[..., Iterable[Any]]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def traits(self) -> Traits:
        """The traits of the op when it is called with these options."""
        traits = traits_of(self.function)
        if self.options.get(traits.filters_with):
            return traits._replace(one_for_one=False, leaves_out="filtered")
        return traits

    @property
    def is_unordered(self) -> bool:
        """Whether it yields results as they finish, in an order that varies."""
        return self.argument("ordered") is False

    @property
    def label(self) -> str:
        """The op as shown in messages, with the name of its function.

        >>> from tarshards.stream import ops
        >>> BoundOp(ops.filter, (str.isupper,), {}).label
        'filter(isupper)'
        """
        names = [getattr(argument, "__name__", "") for argument in (*self.args, *self.options.values())]
        return f"{self.name}({', '.join(filter(None, names))})"

    def argument(self, name: str) -> Any:
        """Return the value that the caller gave for an argument, or None."""
        return inspect.signature(self.function).bind(None, *self.args, **self.options).arguments.get(name)

    def run(self, samples: Iterable[Any], epoch: int, seed: int, on_error: Any) -> Iterable[Any]:
        """Run the op; pass it *epoch*, *seed* and *on_error* if it takes them, unless the caller gave others."""
        supplied: dict[str, Any] = {"epoch": epoch, "seed": seed, "on_error": on_error}
        options = {name: supplied[name] for name in self.traits.context} | self.options
        return self.function(samples, *self.args, **options)
