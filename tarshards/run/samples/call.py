"""The program that calls one Python function: pickled samples come on stdin, frames of results go to stdout."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from tarshards.errors import SampleError
from tarshards.run.samples.folder import Sample, write_all
from tarshards.run.samples.worker import framed
from tarshards.samples.keys import is_reserved
from tarshards.samples.read import sample_members


def load(name: str) -> Callable[[Any], Any]:
    """Import the function that *name*, ``module:function``, says."""
    module, _, attribute = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def encoded_results(sample: Sample, results: Any) -> list[Sample]:
    """Return what a function made of *sample*, None, a dict or a list of dicts, with all fields encoded."""
    results = [] if results is None else [results] if isinstance(results, dict) else results
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise TypeError(f"the function returned {type(results).__name__}, not a dict, a list of dicts or None")
    encoded: dict[str, Sample] = {}
    for result in results:
        key = result.get("__key__", sample["__key__"])
        if key in encoded:
            raise SampleError("the function returned this key twice", key=key)
        members = sample_members({**result, "__key__": key})
        names = sorted(field for field in result if not is_reserved(field))
        encoded[key] = {"__key__": key, **{field: data for field, (_, data) in zip(names, members)}}
    return list(encoded.values())


def main(name: str) -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # what the function prints is no data
    function, problem = None, None
    try:
        function = load(name)
    except Exception as error:
        problem = f"{name}: {type(error).__name__}: {error}"
    jobs = open(0, "rb", closefd=False)  # noqa: SIM115 - until the end
    while jobs.read(8):
        sample = pickle.load(jobs)
        try:
            results = encoded_results(sample, function(sample)) if function else []
            reply: Any = (problem, results)
        except Exception as error:
            reply = (f"{type(error).__name__}: {error}", [])
        write_all(replies, framed(reply))


if __name__ == "__main__":
    main(sys.argv[1])
