"""Batches of arrays to torch tensors, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

from tarshards.samples.codecs.registry import require


def move(batches: Generator[dict[str, Any], None, None], device: str) -> Generator[dict[str, Any], None, None]:
    """Yield the batches with their arrays of numbers as tensors on *device*; other values stay unchanged.

    On the CPU a tensor shares its array's memory. For a GPU it is copied from pinned memory on a separate stream, while
    the GPU computes the previous batch; the stream that is current when the batch is taken waits for it.
    """
    torch = require("torch", extra="torch")
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f'device="{device}": torch finds no GPU; device="cpu" gives tensors in main memory')
    stream = None if target.type == "cpu" else torch.cuda.Stream(target)
    with closing(batches):
        for batch in batches:
            if stream is None:
                yield {field: _tensor(value) for field, value in batch.items()}
                continue
            with torch.cuda.stream(stream):
                moved = {field: _tensor(value, target) for field, value in batch.items()}
            current = torch.cuda.current_stream(target)
            current.wait_stream(stream)
            for value in moved.values():
                for part in value if isinstance(value, tuple) else (value,):
                    if isinstance(part, torch.Tensor):
                        part.record_stream(current)
            yield moved


def tensors(batch: Any, *, pinned: bool = False) -> Any:
    """Return a collated batch with tensors, *pinned* if requested, instead of arrays of numbers, also in lists.

    A tensor shares its array's memory, unless it is pinned.
    """
    import numpy as np
    import torch

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return (
                [convert(each) for each in value]
                if value and isinstance(value[0], np.ndarray | torch.Tensor)
                else value
            )
        value = _tensor(value)
        return value.pin_memory() if pinned and isinstance(value, torch.Tensor) else value

    if isinstance(batch, dict):
        return {field: convert(value) for field, value in batch.items()}
    return tuple(convert(value) for value in batch) if isinstance(batch, tuple) else convert(batch)


def _tensor(value: Any, device: Any = None) -> Any:
    import numpy as np
    import torch

    if isinstance(value, tuple):  # a ragged column
        return tuple(_tensor(part, device) for part in value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    array = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])  # copies a read-only array
    tensor = torch.from_numpy(array)
    return tensor if device is None else tensor.pin_memory().to(device, non_blocking=True)
