"""Python's parser, called again if other threads have confused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
ATTEMPTS = 100


def retry_parse(parse: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of *parse*, which uses Python's ``ast``.

    Before 3.11.8 and 3.12.2, Python counts the depth of a syntax tree for all threads together: if two threads build
    one at once, one of them may raise SystemError (CPython issue 106905). numpy reads the header of an array in this
    way.

    >>> retry_parse(eval, "1 + 1")
    2
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return parse(*args, **options)
        except SystemError:
            continue
    return parse(*args, **options)
