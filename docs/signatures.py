"""An extension of mkdocstrings for the docstrings and signatures of this project."""

from __future__ import annotations

import re
from inspect import Parameter as Argument
from inspect import signature
from typing import Any

import griffe

from tarshards.stream.shard_options import ShardOptions

#: An example of a docstring: a line that begins with >>>, and those up to the next empty line.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Signatures(griffe.Extension):
    """Shows the examples of docstrings as code, and the arguments of a dataset of shards one by one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if any(str(decorator.value) == "takes(ShardOptions)" for decorator in func.decorators):
            first, *_ = func.parameters
            arguments = signature(ShardOptions).parameters.values()
            func.parameters = griffe.Parameters(first, *map(shown, arguments))


def shown(argument: Argument) -> griffe.Parameter:
    """Return an argument of ShardOptions as a signature shows it; a function by its name."""
    default = None if argument.default is Argument.empty else argument.default
    return griffe.Parameter(
        argument.name,
        annotation=str(argument.annotation),
        kind=griffe.ParameterKind[argument.kind.name.lower()],
        default=None if argument.default is Argument.empty else getattr(default, "__name__", repr(default)),
    )
