"""Samples of one form -> one batch of that form."""

from __future__ import annotations

import sys
from typing import Any

from tarshards.errors import SampleError


def collate(samples: list[Any]) -> Any:
    """Turn samples of one form into one of that form: dicts and tuples by field, the values of a field together.

    Numbers and arrays of one shape become a numpy array with a leading axis, tensors a tensor; anything else a list.
    Raises ValueError for arrays of different shapes and SampleError for samples of different fields.
    """
    first = samples[0]
    if isinstance(first, dict):
        for sample in samples:
            if sample.keys() != first.keys():
                fields = sorted(sample.keys() ^ first.keys())
                raise SampleError(
                    f"a batch's samples differ in the fields {', '.join(fields)}",
                    url=sample.get("__url__"),
                    key=sample.get("__key__"),
                )
        return {field: _stack([sample[field] for sample in samples], field) for field in first}
    if isinstance(first, tuple):
        return tuple(_stack(list(values), f"element {i}") for i, values in enumerate(zip(*samples, strict=True)))
    return _stack(samples, "sample")


def _stack(values: list[Any], field: str) -> Any:
    import numpy as np

    first = values[0]
    if isinstance(first, (bool, int, float, complex, np.number, np.bool_)):
        return np.array(values)
    if not hasattr(first, "shape"):
        return values
    shapes = {str(tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__ for value in values}
    if len(shapes) > 1:
        raise ValueError(f"{field}: {' and '.join(sorted(shapes))} make no batch; give them one shape, or a collate=")
    if isinstance(first, np.ndarray):
        return np.stack(values)
    return sys.modules["torch"].stack(values)
