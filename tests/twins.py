"""Compiled kernels and their twins in Python, called with the same arguments to see that they give the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import tee
from typing import Any

import numpy as np
from programs import load_kernel


def pair(name: str) -> Pair:
    """Return the kernel *name* and its twin; skip the test where there is no compiler to make the kernel."""
    return Pair(*(load_kernel(f"tarshards.kernels._{name}{twin}") for twin in ("", "_py")))


class Pair:
    """A kernel and its twin, or two things that they made: what is asked of the pair is asked of both.

    They must give equal results, or errors of the same class and, but for arguments of a wrong type, the same words. A
    result is the kernel's, or the pair of both where an object is made. An argument that is itself a pair is split,
    arrays are copied and then compared, and iterators are read by both.
    """

    def __init__(self, kernel: Any, twin: Any):
        self.kernel, self.twin = kernel, twin

    def __getattr__(self, name: str) -> Any:
        mine, its = getattr(self.kernel, name), getattr(self.twin, name)
        return Pair(mine, its) if callable(mine) else _joined(mine, its)

    def __len__(self) -> int:
        return _joined(len(self.kernel), len(self.twin))

    def __call__(self, *arguments: Any) -> Any:
        of_kernel, of_twin = zip(*map(_split, arguments)) if arguments else ((), ())
        result, error = _outcome(self.kernel, of_kernel)
        other, its_error = _outcome(self.twin, of_twin)
        assert _words(error) == _words(its_error), arguments
        for mine, its in zip(of_kernel, of_twin):
            if isinstance(mine, np.ndarray | dict):
                assert _plain(mine) == _plain(its)
        if error is not None:
            raise error
        return _joined(result, other)


def _split(argument: Any) -> tuple[Any, Any]:
    if isinstance(argument, Pair):
        return argument.kernel, argument.twin
    if isinstance(argument, list) and any(isinstance(item, Pair) for item in argument):
        return tuple(map(list, zip(*map(_split, argument))))
    if isinstance(argument, Iterator):
        return tee(argument)
    return argument, argument.copy() if isinstance(argument, np.ndarray | dict) else argument


def _outcome(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def _words(error: Exception | None) -> tuple[type, Any]:
    return type(error), None if isinstance(error, TypeError | OverflowError | None) else error.args


def _joined(result: Any, other: Any) -> Any:
    if type(result) is not type(other):
        return Pair(result, other)
    assert _plain(result) == _plain(other)
    return result


def _plain(result: Any) -> Any:
    """Return what equal results have in common: the bytes of arrays; numbers beside an error mean nothing."""
    if isinstance(result, tuple) and any(isinstance(part, Exception) for part in result):
        return [repr(part) for part in result if not isinstance(part, int)]
    return result.tobytes() if isinstance(result, np.ndarray) else result
