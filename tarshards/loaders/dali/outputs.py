"""The outputs of a pipeline as arrays of torch, numpy or cupy, sharing DALI's memory where DALI does not reuse it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import numpy as np

from tarshards.samples.codecs.registry import require

ArrayLibrary = Literal["torch", "numpy", "cupy"]

CPU = 1  # DLPack's type of a device


def output_to_arrays(output: Any, library: ArrayLibrary, *, share: bool) -> Any:
    """Return one array for an output of a pipeline, or a list of arrays if the shapes of the samples differ.

    Without *share* the arrays are copies: DALI's older executors overwrite an output in a later run. Arrays of cupy are
    on the GPU, so outputs on the CPU are copied there.
    """
    if library == "numpy" and hasattr(output, "as_cpu"):
        output = output.as_cpu()
    if output.is_dense_tensor():
        return _tensor_to_array(output.as_tensor(), library, share)
    return [_tensor_to_array(output[i], library, share) for i in range(len(output))]


def numpy_to_array(array: np.ndarray, library: ArrayLibrary) -> Any:
    """Return *array*, which did not pass through a pipeline, as an array of *library*."""
    if library == "torch":
        return require("torch", extra="torch").from_numpy(array)
    return _cupy().asarray(array) if library == "cupy" else array


def _tensor_to_array(tensor: Any, library: ArrayLibrary, share: bool) -> Any:
    if library == "numpy":
        return np.asarray(tensor) if share else np.array(tensor)
    if library == "torch":
        shared = require("torch", extra="torch").from_dlpack(tensor)
        return shared if share else shared.clone()
    cupy = _cupy()
    if tensor.__dlpack_device__()[0] == CPU:
        return cupy.asarray(np.asarray(tensor))
    shared = cupy.from_dlpack(tensor)
    return shared if share else shared.copy()


def _cupy() -> Any:
    try:
        return import_module("cupy")
    except ModuleNotFoundError as error:
        cure = "pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
        raise ModuleNotFoundError(f"cupy is missing: {cure}", name=error.name) from error
