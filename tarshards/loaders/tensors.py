"""Batches of arrays to torch tensors, on the CPU or on a GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tarshards.samples.codecs.registry import require


class OnHost:
    """Makes tensors of the arrays of numbers in batches, which share their memory; other values stay unchanged."""

    empty = None  # arrays need no other memory

    def begin(self, batch: dict[str, Any]) -> Any:
        """Begin to make the tensors of a batch, in any thread."""
        return {field: _tensor(value) for field, value in batch.items()}

    def end(self, begun: Any) -> dict[str, Any]:
        """Return the tensors of a batch, in the thread of the consumer."""
        return begun

    def close(self) -> None:
        """Wait until no memory of a batch is read any more."""


class Copying(NamedTuple):
    """A batch that is being copied to a GPU, until the *event*, from the tensors in *sources*."""

    batch: dict[str, Any]
    sources: dict[str, Any]
    event: Any


class OnGpu(OnHost):
    """Copies batches to a GPU, on a stream of its own, which threads that make them have begun beforehand.

    The stream that is current where a batch is taken waits for it. Arrays from ``empty``, in pinned memory, are copied
    from where they are; they are referred to until they have been.
    """

    def __init__(self, device: Any):
        import torch

        self._stream: Any = torch.cuda.Stream(device)
        self._device: Any = self._stream.device
        self._taken: deque[Copying] = deque()  # some may not have been copied yet

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:  # type: ignore[override]
        """Return an array in pinned memory."""
        import torch

        with torch.cuda.device(self._device):
            memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
        interface = {"shape": shape, "typestr": dtype.str, "data": (memory.data_ptr(), False), "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__=interface, memory=memory))  # its views refer to it

    def begin(self, batch: dict[str, Any]) -> Copying:
        import torch

        with torch.cuda.stream(self._stream):
            sources = {field: _each(_pinned, _tensor(value)) for field, value in batch.items()}
            copies = {field: _each(self._copy, value) for field, value in sources.items()}
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copying(copies, sources, event)

    def _copy(self, tensor: Any) -> Any:
        return tensor.to(self._device, non_blocking=True)

    def end(self, begun: Copying) -> dict[str, Any]:
        import torch

        current = torch.cuda.current_stream(self._device)
        current.wait_event(begun.event)
        for value in begun.batch.values():
            _each(lambda tensor: tensor.record_stream(current), value)
        self._taken.append(begun)
        while self._taken and self._taken[0].event.query():
            self._taken.popleft()
        return begun.batch

    def close(self) -> None:
        while self._taken:
            self._taken.popleft().event.synchronize()


def on_device(device: Any) -> OnHost:
    """Return what makes tensors on *device*; raise RuntimeError if torch finds no GPU, and it is one."""
    torch = require("torch", extra="torch")
    target = torch.device(device)
    if target.type == "cpu":
        return OnHost()
    if not torch.cuda.is_available():
        raise RuntimeError(f'device="{device}": torch finds no GPU; device="cpu" gives tensors in main memory')
    return OnGpu(target)


def move(batches: Generator[dict[str, Any], None, None], device: Any) -> Generator[dict[str, Any], None, None]:
    """Yield *batches* as tensors on *device*."""
    with closing(on_device(device)) as target, closing(batches):
        for batch in batches:
            yield target.end(target.begin(batch))


def tensors(batch: Any, *, pinned: bool = False) -> Any:
    """Return a collated batch with tensors, *pinned* if requested, instead of arrays of numbers, also in lists.

    A tensor shares its array's memory, unless it is pinned.
    """
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


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, tuple):  # a ragged column
        return tuple(map(_tensor, value))
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))  # copies a read-only array


def _pinned(tensor: Any) -> Any:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def _each(function: Any, value: Any) -> Any:
    """Return *function* of a tensor, or of each in a tuple; other values unchanged."""
    import torch

    if isinstance(value, tuple):
        return tuple(_each(function, part) for part in value)
    return function(value) if isinstance(value, torch.Tensor) else value
