"""Raw arrays and .npy files of one dtype and shape: no decoding, a batch is one gather."""

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
    """Payloads of one form: the bytes *prefix*, then an array of *dtype* and *shape*."""

    is_quick = True

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], prefix: bytes = b""):
        self.dtype, self.shape, self.prefix = dtype, shape, prefix
        self.size = len(prefix) + dtype.itemsize * math.prod(shape)

    def make(self, count: int) -> np.ndarray:
        """An array of shape (count, *shape)."""
        return np.empty((count, *self.shape), self.dtype)

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Gather the rows."""
        if (payloads.sizes != self.size).any():
            return self.fill(batch, first, payloads, _copy)
        rows, addresses = batch[first : first + len(payloads)], payloads.addresses
        failed: dict[int, DecodeError] = {}
        begun = 0
        while (other := memory.gather(rows[begun:], addresses[begun:], self.prefix)) >= 0:
            begun += other + 1
            failed[begun - 1] = self._other()
        return failed

    def fill(
        self, batch: Batch, first: int, payloads: Payloads, write: Callable[..., None], *more: np.ndarray
    ) -> dict[int, DecodeError]:
        """Call ``write(out, addresses, *more)`` for the payloads that are of the form; return what fails to be."""
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
        """What is not of the form."""
        if not self.prefix and (payloads.sizes == self.size).all():
            return {}
        failed = {
            int(i): DecodeError(f"{payloads.sizes[i]} bytes, where {self._form()} takes {self.size}")
            for i in np.flatnonzero(payloads.sizes != self.size)
        }
        rows = np.flatnonzero(payloads.sizes == self.size)
        addresses = payloads.addresses[rows]
        begun = 0
        while (other := memory.find_other(addresses[begun:], self.prefix)) >= 0:
            begun += other + 1
            failed[int(rows[begun - 1])] = self._other()
        return failed

    def _other(self) -> DecodeError:
        return DecodeError(f"its .npy header is not that of the first, {self._form()}")

    def _form(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Array(Reader):
    """Arrays; the first one determines what was not given."""

    def __init__(self, dtype: Any = None, shape: tuple[int, ...] | None = None):
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.shape = None if shape is None else tuple(shape)
        if self.dtype is not None and (self.dtype.hasobject or not self.dtype.itemsize):
            raise TypeError(f"arrays of {self.dtype} have no safe form in bytes")

    def learns(self, field: str) -> bool:
        """Say whether dtype and shape are to be learned, or how long the header is."""
        return self.dtype is None or self.shape is None or field.rpartition(".")[2] == "npy"

    def open(self, field: str, payload: bytes) -> Rows:
        """Learn the dtype, the shape and where the elements begin."""
        if field.rpartition(".")[2] == "npy":
            rows = Rows(*parse_header(payload))
            for name in "dtype", "shape":
                given, found = getattr(self, name), getattr(rows, name)
                if given is not None and given != found:
                    raise DecodeError(f"an array of {name} {found}, where {given} was asked for")
            return rows
        if self.dtype is None:
            raise TypeError(f"of raw arrays the dtype must be given: array(dtype, shape) for {field}")
        if self.shape is not None:
            return Rows(self.dtype, self.shape)
        if self.dtype.itemsize == 0 or len(payload) % self.dtype.itemsize:
            raise DecodeError(_no_whole_number(len(payload), self.dtype))
        return Rows(self.dtype, (len(payload) // self.dtype.itemsize,))


class Ragged(Reader):
    """Rows of any length; where they lie is held until those that failed are gone, then all are copied."""

    is_quick = True

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype

    def make(self, count: int) -> np.ndarray:
        """Addresses and sizes, of shape (count, 2)."""
        return np.empty((count, 2), np.int64)

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Note where the payloads lie."""
        rows = batch[first : first + len(payloads)]
        rows[:, 0], rows[:, 1] = payloads.addresses.view(np.int64), payloads.sizes
        odd = np.flatnonzero(payloads.sizes % self.dtype.itemsize) if self.dtype.itemsize > 1 else ()
        return {int(i): DecodeError(_no_whole_number(payloads.sizes[i], self.dtype)) for i in odd}

    def join(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Copy the payloads, and say where each begins."""
        return self.join_in(batch, np.empty)

    def join_in(self, batch: Batch, empty: Callable[[int, np.dtype], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Copy the payloads, and say where each begins."""
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

    A ``.npy`` field says both itself; of raw bytes the dtype is needed, and without a shape they are one axis as long
    as the first. Each member must be of the first one's size, and have its very header.
    """
    return Array(dtype, shape)


def ragged(dtype: Any = "u1") -> Reader:
    """Raw bytes of any length (text, token ids) -> (values, offsets): one is ``values[offsets[i]:offsets[i + 1]]``.

    *values* are of *dtype* and of shape (total,), nothing between the samples; *offsets* are int64 of shape (n + 1,).
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"{dtype} has no form in bytes")
    return Ragged(dtype)
