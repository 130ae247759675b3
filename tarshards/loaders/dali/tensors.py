"""The outputs of a pipeline as arrays of torch, numpy or cupy, shared where DALI lets go of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from tarshards.samples.codecs.registry import require

Arrays = Literal["torch", "numpy", "cupy"]


def batch_of(names: Iterable[str], outputs: Sequence[Any], arrays: Arrays, *, share: bool) -> dict[str, Any]:
    """Name the outputs; each becomes one array, or where the samples' shapes differ a list of them.

    Without *share*, the arrays are copies: pipelines of DALI's older executors use the memory of outputs again.
    """
    return {name: _convert(output, arrays, share) for name, output in zip(names, outputs, strict=True)}


def _convert(output: Any, arrays: Arrays, share: bool) -> Any:
    if isinstance(output, np.ndarray):  # what never was in the pipeline
        return require("torch", extra="torch").from_numpy(output) if arrays == "torch" else output
    if arrays == "numpy" and hasattr(output, "as_cpu"):
        output = output.as_cpu()
    if output.is_dense_tensor():
        return _to_array(output.as_tensor(), arrays, share)
    return [_to_array(output[i], arrays, share) for i in range(len(output))]


def _to_array(tensor: Any, arrays: Arrays, share: bool) -> Any:
    if arrays == "numpy":
        return np.asarray(tensor) if share else np.array(tensor)
    if arrays == "torch":
        made = require("torch", extra="torch").from_dlpack(tensor)
        return made if share else made.clone()
    made = require("cupy", extra="dali").from_dlpack(tensor)
    return made if share else made.copy()
