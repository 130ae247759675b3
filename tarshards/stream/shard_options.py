"""The keywords of datasets of shards, as one value: how shards are opened, what an epoch is, and which part to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import cleandoc, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from tarshards.epoch.epoch_options import EpochOptions
from tarshards.epoch.world import World
from tarshards.index.opening_options import Opening
from tarshards.stream.other_names import explained

P = ParamSpec("P")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")
Part = TypeVar("Part", Opening, EpochOptions)


@dataclass(frozen=True)
class ShardOptions(EpochOptions, Opening):
    """The arguments of a dataset of shards, as given; ``opening`` and ``epoch`` check them.

    *urls* is a shard expression or a list of them, and *world* is the rank and worker that reads. The other fields are
    those of ``Opening`` and ``EpochOptions``.
    """

    urls: Any
    world: World | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check nothing; the parts check their own arguments."""

    @property
    def opening(self) -> Opening:
        """How the shards are opened; raises like ``Opening``."""
        return self._part(Opening)

    @property
    def epoch(self) -> EpochOptions:
        """What an epoch is; raises like ``EpochOptions``."""
        return self._part(EpochOptions)

    def _part(self, kind: type[Part]) -> Part:
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Return a decorator for a method that accepts the arguments of the dataclass *options* but receives one value.

    The method has the signature, also for type checkers, and the errors of one that declares these arguments itself.
    The docstrings of the base classes of *options* are appended to its docstring.
    """

    def decorate(method: Callable[[Owner, Options], Result]) -> Callable[Concatenate[Owner, P], Result]:
        @wraps(method)
        def with_options(owner: Owner, /, *args: P.args, **given: P.kwargs) -> Result:
            try:
                value = options(*args, **given)
            except TypeError as error:
                named = TypeError(str(error).replace(f"{options.__qualname__}.__init__", method.__qualname__))
                raise explained(named) from None
            return method(owner, value)

        own, taken = signature(method), signature(options)
        parameters = [*own.parameters.values()][:1] + [*taken.parameters.values()]
        with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        described = (method, *options.__bases__)  # type: ignore[attr-defined]
        with_options.__doc__ = "\n\n".join(cleandoc(each.__doc__) for each in described if each.__doc__)
        return with_options

    return decorate
