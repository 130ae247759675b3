"""The interface of readers: the bytes of one field go in, its part of a batch comes out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.samples.payloads import Payloads

Batch = Any  # an array with a row for each sample, or a list with an element for each


class Reader:
    """Reads one field: ``open`` is called once, then for each batch ``make``, ``read``, perhaps in parts, and ``join``.

    A payload is the bytes of the field in one sample. Readers keep nothing between batches: threads share them, and
    they can be pickled. A subclass overrides the methods that it needs; ``decode`` alone is enough.
    """

    is_quick = False  # whether a batch takes only a few copies, without draws, so that threads are not worth it
    takes_values = False  # whether ``decode`` also takes what ops have made of the field

    def learns(self, field: str) -> bool:
        """Return whether ``open`` needs the first payload of *field*."""
        return False

    def open(self, field: str, payload: bytes) -> Reader:
        """Return the reader for *field*, whose first payload is given; raise DecodeError if it cannot be read."""
        return self

    def at(self, epoch: int) -> Reader:
        """Return the reader for this *epoch*: another one where what it makes changes with the epoch."""
        return self

    def make(self, count: int) -> Batch:
        """Return an empty batch of *count* samples, for ``read`` to fill."""
        return [None] * count

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Read *payloads* into the rows of *batch*; return the errors by row.

        *draws* are the random numbers of the samples (see ``draws_of``). A row that failed may hold anything. If a
        batch is an array, several threads may call this at once, each for other rows of it. This and ``join`` raise
        OSError if payloads lie in a mapped file that has shrunk.
        """

        failed = {}
        for i, payload in enumerate(payloads):
            try:
                batch[i] = self.decode(payload)
            except Exception as exc:
                failed[i] = failure(exc)
        return failed

    def read_each(self, payloads: Iterable[bytes], read: Callable[[int, bytes], None]) -> dict[int, DecodeError]:
        """Call ``read(row, payload)`` for each of *payloads*, where ``decode`` is not enough; return the errors."""
        failed = {}
        for row, payload in enumerate(payloads):
            try:
                read(row, payload)
            except Exception as exc:
                failed[row] = failure(exc)
        return failed

    def decode(self, payload: bytes) -> Any:
        """Decode one payload."""
        raise NotImplementedError

    def join(self, batch: Batch) -> Any:
        """Return the batch as the user gets it; the rows that failed are no longer in it."""
        return batch

    def join_in(self, batch: Batch, empty: Callable[[int, np.dtype], np.ndarray]) -> Any:
        """Do what ``join`` does; ``empty(count, dtype)`` returns an array in memory that is reused."""
        return self.join(batch)


class ArrayReader(Reader):
    """A reader whose part of a batch is one array, with a row for each sample; type checkers tell it from others."""

    if TYPE_CHECKING:

        def make(self, count: int) -> np.ndarray: ...

        def join(self, batch: np.ndarray) -> np.ndarray: ...


def sides_of(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the height and width of *size*, one number or both; raise ValueError or TypeError for anything else."""
    if size is None:
        return None
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"size={size} must be one number or a pair, height and width")
    return whole_number("size", sides[0], 1), whole_number("size", sides[1], 1)


def failure(exc: Exception) -> DecodeError:
    """Return the DecodeError for an exception that a decoder raised."""
    # The caller raises one that names the sample.
    return exc.with_traceback(None) if isinstance(exc, DecodeError) else DecodeError.because(exc)


def stack(values: list[Any], pad: Any = None) -> Any:
    """Return one array if *values* are numbers, or arrays or tensors of one dtype and shape; else return the list.

    With *pad*, arrays of different shapes are padded with it at the end of each axis.

    >>> stack([1, 2]), stack(["a"]), stack([np.ones(1), np.ones(2)], pad=0).tolist()
    (array([1, 2]), ['a'], [[1.0, 0.0], [1.0, 1.0]])
    """
    if values and all(isinstance(value, (bool, int, float, np.number, np.bool_)) for value in values):
        numbers = np.array(values)
        return values if numbers.dtype.hasobject else numbers  # objects: integers beyond 64 bits
    if (torch := sys.modules.get("torch")) and values and all(isinstance(value, torch.Tensor) for value in values):
        with suppress(TypeError, RuntimeError):  # of a dtype that numpy lacks, or not in main memory
            values = [value.detach().numpy() for value in values]
    if not values or not all(isinstance(value, np.ndarray) for value in values):
        return values
    if len({value.dtype for value in values}) > 1 or len({value.ndim for value in values}) > 1:
        return values
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    if pad is None:
        return values
    shape = np.max([value.shape for value in values], axis=0)
    padded = np.full((len(values), *shape), pad, values[0].dtype)
    for row, value in zip(padded, values):
        row[tuple(slice(side) for side in value.shape)] = value
    return padded
