"""Raw arrays and .npy files of one dtype and shape, or of any length: a batch is one copy of many payloads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tarshards.errors import DecodeError
from tarshards.index import memory
from tarshards.index.memory import Payloads
from tarshards.loaders.arrays.readers.reader import Batch, Reader
from tarshards.samples.codecs.npy import parse_header


class Rows(Reader):
    """Payloads that all are the bytes *prefix* (the header of a .npy file), then an array of *dtype* and *shape*."""

    is_quick = True

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], prefix: bytes = b""):
        self.dtype = dtype
        self.shape = shape
        self.prefix = prefix
        self.size: int = len(prefix) + dtype.itemsize * math.prod(shape)

    def make(self, count: int) -> np.ndarray:
        """Return an array of shape (count, *shape)."""
        return np.empty((count, *self.shape), self.dtype)

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Copy the arrays into the rows."""
        if (payloads.sizes != self.size).any():
            return self.fill(batch, first, payloads, _copy)
        rows, addresses = batch[first : first + len(payloads)], payloads.addresses
        failed: dict[int, DecodeError] = {}
        begun = 0
        while (other := memory.gather(rows[begun:], addresses[begun:], self.prefix)) >= 0:
            begun += other + 1
            failed[begun - 1] = self._other_header()
        return failed

    def fill(
        self, batch: Batch, first: int, payloads: Payloads, write: Callable[..., None], *more: np.ndarray
    ) -> dict[int, DecodeError]:
        """Call ``write(rows, addresses, *more)`` for the payloads of this form; return the errors of the others.

        *more* are arrays with a row for each of the *payloads*. Addresses are those of the elements, after the prefix.
        """
        failed = self._others(payloads)
        addresses = payloads.addresses + np.uint64(len(self.prefix))
        if not failed:
            write(batch[first : first + len(payloads)], addresses, *more)
            return failed
        good = np.delete(np.arange(len(payloads)), list(failed))
        part = np.empty((len(good), *batch.shape[1:]), batch.dtype)
        write(part, addresses[good], *(values[good] for values in more))
        batch[first + good] = part
        return failed

    def _others(self, payloads: Payloads) -> dict[int, DecodeError]:
        """Return the errors of payloads with another size or prefix."""
        if not self.prefix and (payloads.sizes == self.size).all():
            return {}
        failed = {
            int(i): DecodeError(f"{payloads.sizes[i]} bytes instead of {self.size} for {self._form()}")
            for i in np.flatnonzero(payloads.sizes != self.size)
        }
        rows = np.flatnonzero(payloads.sizes == self.size)
        addresses = payloads.addresses[rows]
        begun = 0
        while (other := memory.find_other(addresses[begun:], self.prefix)) >= 0:
            begun += other + 1
            failed[int(rows[begun - 1])] = self._other_header()
        return failed

    def _other_header(self) -> DecodeError:
        return DecodeError(f"its .npy header differs from that of the first sample, {self._form()}")

    def _form(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Array(Reader):
    """Arrays of one dtype and shape, which the first payload determines if they were not given."""

    def __init__(self, dtype: Any = None, shape: tuple[int, ...] | None = None):
        self.dtype: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
        self.shape: tuple[int, ...] | None = None if shape is None else tuple(shape)
        if self.dtype is not None and (self.dtype.hasobject or not self.dtype.itemsize):
            raise TypeError(f"arrays of {self.dtype} have no safe form in bytes")

    def learns(self, field: str) -> bool:
        """Return whether dtype or shape, or the header of .npy files, come from the first payload."""
        return self.dtype is None or self.shape is None or field.rpartition(".")[2] == "npy"

    def open(self, field: str, payload: bytes) -> Rows:
        """Return the reader of payloads with the dtype, shape and header of this one."""
        if field.rpartition(".")[2] == "npy":
            rows = Rows(*parse_header(payload))
            for name in "dtype", "shape":
                given, found = getattr(self, name), getattr(rows, name)
                if given is not None and given != found:
                    raise DecodeError(f"the array has the {name} {found}, and {given} was requested")
            return rows
        if self.dtype is None:
            raise TypeError(f"of raw arrays the dtype must be given: array(dtype, shape) for {field}")
        if self.shape is not None:
            return Rows(self.dtype, self.shape)
        if self.dtype.itemsize == 0 or len(payload) % self.dtype.itemsize:
            raise DecodeError(_no_whole_number(len(payload), self.dtype))
        return Rows(self.dtype, (len(payload) // self.dtype.itemsize,))


class Ragged(Reader):
    """Arrays of any length: a batch holds their addresses until ``join``, which copies those that did not fail."""

    is_quick = True

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype

    def make(self, count: int) -> np.ndarray:
        """Return an array for addresses and sizes, of shape (count, 2)."""
        return np.empty((count, 2), np.int64)

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Keep the addresses and sizes of the payloads."""
        rows = batch[first : first + len(payloads)]
        rows[:, 0], rows[:, 1] = payloads.addresses.view(np.int64), payloads.sizes
        odd = np.flatnonzero(payloads.sizes % self.dtype.itemsize) if self.dtype.itemsize > 1 else ()
        return {int(i): DecodeError(_no_whole_number(payloads.sizes[i], self.dtype)) for i in odd}

    def join(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return all payloads end to end, and the offset of each."""
        return self.join_in(batch, np.empty)

    def join_in(self, batch: Batch, empty: Callable[[int, np.dtype], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return all payloads end to end, and the offset of each."""
        addresses, sizes = batch.T.copy()
        offsets = np.zeros(len(batch) + 1, np.int64)
        np.cumsum(sizes // self.dtype.itemsize, out=offsets[1:])
        values = empty(int(offsets[-1]), self.dtype)
        memory.pack(values, addresses.view(np.uint64), sizes)
        return values, offsets


def _no_whole_number(size: int, dtype: np.dtype) -> str:
    return f"{size} bytes are no whole number of {dtype}"


def _copy(out: np.ndarray, addresses: np.ndarray) -> None:
    memory.gather(out, addresses, b"")


def array(dtype: Any = None, shape: tuple[int, ...] | None = None) -> Reader:
    """Raw bytes, or ``.npy`` files, of one dtype and shape -> an array of shape (n, *shape).

    A ``.npy`` field says both itself. Raw bytes need a dtype; without a shape they are of one axis, as long as the
    first sample's. All samples must have the size of the first and, in ``.npy``, its header.
    """
    return Array(dtype, shape)


def ragged(dtype: Any = "u1") -> Reader:
    """Raw bytes of any length (token ids) -> (values, offsets): sample i is ``values[offsets[i]:offsets[i + 1]]``.

    *values* is an array of *dtype* and shape (total,) with the samples end to end; *offsets* is int64, shape (n + 1,).
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"{dtype} has no form in bytes")
    return Ragged(dtype)
