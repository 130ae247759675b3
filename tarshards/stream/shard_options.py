"""The keywords of datasets of shards, as one value: how shards are opened, what an epoch is, and whose part it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import cleandoc, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from tarshards.epoch.options import EpochOptions
from tarshards.epoch.world import World
from tarshards.index.options import Opening

P = ParamSpec("P")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")
Part = TypeVar("Part", Opening, EpochOptions)


@dataclass(frozen=True)
class ShardOptions(EpochOptions, Opening):
    """What a dataset of shards is made of, as it was given; its parts are checked.

    *urls* is a shard expression or a list of them, and *world* says which rank and worker reads. The others are those
    of ``Opening`` and ``EpochOptions``.
    """

    urls: Any
    world: World | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check nothing: its parts do."""

    @property
    def opening(self) -> Opening:
        """How the shards are opened; raises what ``Opening`` does."""
        return self._part(Opening)

    @property
    def epoch(self) -> EpochOptions:
        """What an epoch is; raises what ``EpochOptions`` does."""
        return self._part(EpochOptions)

    def _part(self, kind: type[Part]) -> Part:
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Let a method take the arguments of the dataclass *options*, and get them as one value.

    Its signature, its errors and what type checkers see are those of a method that lists them; ``help`` describes the
    classes that *options* consists of, too.
    """

    def decorate(method: Callable[[Owner, Options], Result]) -> Callable[Concatenate[Owner, P], Result]:
        @wraps(method)
        def with_options(owner: Owner, /, *args: P.args, **given: P.kwargs) -> Result:
            try:
                value = options(*args, **given)
            except TypeError as error:
                raise TypeError(str(error).replace(f"{options.__qualname__}.__init__", method.__qualname__)) from None
            return method(owner, value)

        own, taken = signature(method), signature(options)
        parameters = [*own.parameters.values()][:1] + [*taken.parameters.values()]
        with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        described = (method, *options.__bases__)  # type: ignore[attr-defined]
        with_options.__doc__ = "\n\n".join(cleandoc(each.__doc__) for each in described if each.__doc__)
        return with_options

    return decorate
