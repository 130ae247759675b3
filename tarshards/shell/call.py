"""The program that calls one Python function: pickled samples come on stdin, pickled results go to stdout."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from tarshards.shell.worker import encoded_results


def load(name: str) -> Callable[[Any], Any]:
    """Import the function that *name*, ``module:function``, says."""
    module, _, attribute = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def main(name: str) -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no data
    function, problem = None, None
    try:
        function = load(name)
    except Exception as error:
        problem = f"{name}: {type(error).__name__}: {error}"
    while True:
        try:
            sample = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            results = encoded_results(sample, function(sample)) if function else []
            reply: Any = (problem, results)
        except Exception as error:
            reply = (f"{type(error).__name__}: {error}", [])
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
