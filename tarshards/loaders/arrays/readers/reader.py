"""What a reader is: bytes of one field in, its part of a batch out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.index.memory import Payloads

Batch = Any  # an array with a row a sample, or a list with an element a sample


class Reader:
    """One field of a batch: ``open`` once, then for each batch ``make``, ``read`` in parts, ``join``.

    A reader holds nothing of a run: threads share it, and it may be pickled. A kind of reader overrides what it needs;
    ``decode`` alone makes one.
    """

    is_quick = False  # whether reading a batch is a few copies, for which threads are not worth it; it has no draws
    takes_values = False  # whether ``decode`` takes what ops have made of a field, too

    def learns(self, field: str) -> bool:
        """Say whether ``open`` needs the first payload of *field*."""
        return False

    def open(self, field: str, payload: bytes) -> Reader:
        """Return the reader for the *field* whose first payload is given; raise DecodeError if none fits."""
        return self

    def at(self, epoch: int) -> Reader:
        """Return the reader for this *epoch*: another one where what it makes changes with the epoch."""
        return self

    def make(self, count: int) -> Batch:
        """Return the batch that *count* samples are read into."""
        return [None] * count

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Read *payloads* into the batch from row *first* on; return what failed, by its number in the payloads.

        *draws* are those of the samples (see draws_of). A row that failed holds anything. Raises OSError where
        payloads lie in a mapped file that has shrunk; so may ``join``.
        """
        failed = {}
        for i, payload in enumerate(payloads):
            try:
                batch[first + i] = self.decode(payload)
            except Exception as exc:
                failed[i] = failure(exc)
        return failed

    def decode(self, payload: bytes) -> Any:
        """Decode one payload."""
        raise NotImplementedError

    def join(self, batch: Batch) -> Any:
        """Return what a user sees of a batch whose failed rows were taken out."""
        return batch

    def join_in(self, batch: Batch, empty: Callable[[int, np.dtype], np.ndarray]) -> Any:
        """Do what ``join`` does; ``empty(count, dtype)`` returns an array in memory that is reused."""
        return self.join(batch)


def sides_of(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the height and width that *size* stands for; raise ValueError or TypeError for what is none."""
    if size is None:
        return None
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"size={size} must be one number or a pair, height and width")
    return whole_number("size", sides[0], 1), whole_number("size", sides[1], 1)


def failure(exc: Exception) -> DecodeError:
    """The DecodeError that a decoder's exception amounts to."""
    if isinstance(exc, DecodeError):
        return exc.with_traceback(None)  # the caller raises one that names the sample
    error = DecodeError(str(exc).strip().partition("\n")[0][:300] or type(exc).__name__)
    error.__cause__ = exc
    return error


def stack(values: list[Any], pad: Any = None) -> Any:
    """Make one array of numbers, or of arrays or tensors of one dtype and shape; of anything else a list.

    Arrays of several shapes are filled up with *pad* at the end of each axis, if it is given.

    >>> stack([1, 2]), stack(["a"]), stack([np.ones(1), np.ones(2)], pad=0).tolist()
    (array([1, 2]), ['a'], [[1.0, 0.0], [1.0, 1.0]])
    """
    if values and all(isinstance(value, (bool, int, float, np.number, np.bool_)) for value in values):
        numbers = np.array(values)
        return values if numbers.dtype.hasobject else numbers  # whole numbers beyond 64 bits
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
