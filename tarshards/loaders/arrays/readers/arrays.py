"""Raw arrays and .npy files of one dtype and shape, or of any length: a batch is one copy of many payloads.

A field is one of .npy files by its name. Raw arrays have no header: a payload that has one, by its name or its first
bytes, is refused, since its elements would be those of the header.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tarshards import kernels
from tarshards.errors import DecodeError
from tarshards.loaders.arrays.readers.reader import ArrayReader, Batch, Reader
from tarshards.samples.codecs.npy import HEAD, MAGIC, MAX_HEADER, ArrayHeader, UsualHeaders, is_npy, parse_header
from tarshards.samples.codecs.registry import FAMILY_OF_EXTENSION
from tarshards.samples.payloads import Payloads

# Extensions of files with headers, or of compressed ones.
FORMATS = frozenset(("gz", "npz", "pt", "pth", "pkl", "pickle", "pyd", "ten", "tb", "tenbin", "mp", "msg", "msgpack"))
FORMATS |= {"cbor"} | FAMILY_OF_EXTENSION.keys()


class Rows(ArrayReader):
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

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Copy the arrays into the rows."""
        if (payloads.sizes != self.size).any():
            return self.fill(batch, payloads, _copy)
        addresses = payloads.addresses
        failed: dict[int, DecodeError] = {}
        begun = 0
        while (other := kernels.rows.gather(batch[begun:], addresses[begun:], self.prefix)) >= 0:
            begun += other + 1
            failed[begun - 1] = self._other_header()
        return failed

    def fill(
        self, batch: Batch, payloads: Payloads, write: Callable[..., None], *more: np.ndarray
    ) -> dict[int, DecodeError]:
        """Call ``write(rows, addresses, *more)`` for the payloads of this form; return the errors of the others.

        *more* are arrays with a row for each of the *payloads*. Addresses are those of the elements, after the prefix.
        """
        failed = self._others(payloads)
        addresses = payloads.addresses + np.uint64(len(self.prefix))
        if not failed:
            write(batch, addresses, *more)
            return failed
        good = np.delete(np.arange(len(payloads)), list(failed))
        part = np.empty((len(good), *batch.shape[1:]), batch.dtype)
        write(part, addresses[good], *(values[good] for values in more))
        batch[good] = part
        return failed

    def _others(self, payloads: Payloads) -> dict[int, DecodeError]:
        """Return the errors of payloads with another size or prefix."""
        if not self.prefix and (payloads.sizes == self.size).all():
            return {}
        failed = {i: self._other_size(payloads, i) for i in np.flatnonzero(payloads.sizes != self.size).tolist()}
        rows = np.flatnonzero(payloads.sizes == self.size)
        addresses = payloads.addresses[rows]
        begun = 0
        while (other := kernels.rows.find_other(addresses[begun:], self.prefix)) >= 0:
            begun += other + 1
            failed[int(rows[begun - 1])] = self._other_header()
        return failed

    def _other_size(self, payloads: Payloads, row: int) -> DecodeError:
        if not self.prefix and payloads[row : row + 1].beginnings(len(MAGIC)) == [MAGIC]:
            return _unnamed()
        return DecodeError(f"{payloads.sizes[row]} bytes instead of {self.size} for {self.form}")

    def _other_header(self) -> DecodeError:
        return DecodeError(f"its .npy header differs from that of the first sample, {self.form}")

    @property
    def form(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Array(ArrayReader):
    """Arrays of one dtype and shape, which the first payload determines if they were not given."""

    def __init__(self, dtype: Any = None, shape: tuple[int, ...] | None = None):
        self.dtype: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
        self.shape: tuple[int, ...] | None = None if shape is None else tuple(shape)
        if self.dtype is not None and (self.dtype.hasobject or not self.dtype.itemsize):
            raise TypeError(f"arrays of {self.dtype} have no safe form in bytes")

    def learns(self, field: str) -> bool:
        """Return whether dtype or shape, or the header of .npy files, come from the first payload."""
        return self.dtype is None or self.shape is None or is_npy(field)

    def open(self, field: str, payload: bytes) -> Rows:
        """Return the reader of payloads with the dtype, shape and header of this one."""
        if is_npy(field):
            return Rows(*header_as(payload, dtype=self.dtype, shape=self.shape))
        if self.dtype is None:
            raise TypeError(f"of raw arrays the dtype must be given: array(dtype, shape) for {field}")
        check_raw(field, self.dtype)
        if self.shape is not None:
            return Rows(self.dtype, self.shape)
        if self.dtype.itemsize > 1 and payload.startswith(MAGIC):
            raise _unnamed()
        if len(payload) % self.dtype.itemsize:
            raise DecodeError(_no_whole_number(len(payload), self.dtype))
        return Rows(self.dtype, (len(payload) // self.dtype.itemsize,))


class Ragged(Reader):
    """Arrays of any length: a batch holds their addresses until ``join``, which copies those that did not fail.

    Rows of *shape* are the elements that are counted. Those of .npy files, which have a *header*, are of the dtype and
    the *shape* of the first.
    """

    is_quick = True

    def __init__(self, dtype: np.dtype | None, shape: tuple[int, ...] = (), header: bool = False):
        self.given = dtype
        self.dtype: np.dtype[Any] = np.dtype(np.uint8) if dtype is None else dtype
        self.shape = shape
        self.header = header
        self.row: int = self.dtype.itemsize * math.prod(shape)
        self.usual: UsualHeaders = UsualHeaders(self.dtype, shape)

    def learns(self, field: str) -> bool:
        """Return whether dtype and shape of the rows are in the header of a .npy file."""
        return is_npy(field)

    def open(self, field: str, payload: bytes) -> Ragged:
        """Return the reader of rows as those of the first payload."""
        if not is_npy(field):
            check_raw(field, self.dtype)
            return Ragged(self.dtype)
        dtype, shape, _ = header_as(payload, dtype=self.given)
        if 0 in shape[1:]:
            raise DecodeError(f"an array of shape {shape} has rows without elements")
        return Ragged(dtype, shape[1:], True)

    def make(self, count: int) -> np.ndarray:
        """Return an array for addresses and sizes, of shape (count, 2)."""
        return np.empty((count, 2), np.int64)

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Keep the addresses and sizes of the elements of the payloads."""
        batch[:, 0], batch[:, 1] = payloads.addresses.view(np.int64), payloads.sizes
        failed: dict[int, DecodeError] = {}
        if self.header:
            skipped = np.zeros(len(payloads), np.int64)
            for i, (head, size) in enumerate(zip(payloads.beginnings(HEAD), payloads.sizes.tolist())):
                try:
                    usual = self.usual.rows(head, size) is not None
                    skipped[i] = HEAD if usual else self._header_size(payloads, i, head)
                except DecodeError as error:
                    failed[i] = error
            batch[:, 0] += skipped
            batch[:, 1] -= skipped
        elif self.dtype.itemsize > 1:
            for i in np.flatnonzero(payloads.sizes % self.dtype.itemsize).tolist():
                failed[i] = DecodeError(_no_whole_number(payloads.sizes[i], self.dtype))
            failed |= {i: _unnamed() for i in payloads.find_beginning(MAGIC)}
        return failed

    def _header_size(self, payloads: Payloads, row: int, head: bytes) -> int:
        """Return the size of the header of a .npy file that begins with *head*."""
        try:
            header = parse_header(head, int(payloads.sizes[row]))
        except DecodeError:  # a longer one, perhaps
            (head,) = payloads[row : row + 1].beginnings(MAX_HEADER)
            header = parse_header(head, int(payloads.sizes[row]))
        if header.dtype != self.dtype or header.shape[1:] != self.shape:
            first = Rows(self.dtype, self.shape).form
            raise DecodeError(
                f"its rows are {header.dtype} of shape {header.shape[1:]}, and those of the first {first}"
            )
        return len(header.prefix)

    def cut(self, batch: np.ndarray, begins: np.ndarray, most: np.ndarray) -> None:
        """Keep of each array the rows from the one at *begins* on, and at *most* so many."""
        skipped = begins * self.row
        batch[:, 0] += skipped
        batch[:, 1] = np.clip(batch[:, 1] - skipped, 0, most * self.row)

    def counts(self, batch: np.ndarray) -> np.ndarray:
        """Return the number of rows of each array."""
        return batch[:, 1] // self.row

    def join(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return all payloads end to end, and the offset of each."""
        return self.join_in(batch, np.empty)

    def join_in(self, batch: Batch, empty: Callable[[int, np.dtype], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return all payloads end to end, and the offset of each."""
        addresses, sizes = batch.T.copy()
        offsets = np.zeros(len(batch) + 1, np.int64)
        np.cumsum(self.counts(batch), out=offsets[1:])
        values = empty(int(offsets[-1]) * math.prod(self.shape), self.dtype)
        kernels.rows.pack(values, addresses.view(np.uint64), sizes)
        return values.reshape(-1, *self.shape), offsets


def header_as(payload: bytes, **given: Any) -> ArrayHeader:
    """Return the header of a .npy file; raise DecodeError unless it has what is *given* of it."""
    header = parse_header(payload)
    for name, value in given.items():
        if value is not None and value != (found := getattr(header, name)):
            raise DecodeError(f"the array has the {name} {found}, and {value} was requested")
    return header


def check_raw(field: str, dtype: np.dtype) -> None:
    """Raise TypeError if *field* is in a format whose bytes are no elements of *dtype*; all are bytes."""
    extension = field.rpartition(".")[2]
    if dtype.itemsize > 1 and extension in FORMATS:
        cure = "decoded(), another reader or a function reads it; array('u1') and ragged('u1') give its bytes"
        raise TypeError(f"{field} is no raw array of {dtype}: .{extension} is a format; {cure}")


def _unnamed() -> DecodeError:
    return DecodeError("a .npy file, in a field of raw arrays: its name has to end in .npy")


def _no_whole_number(size: int, dtype: np.dtype) -> str:
    return f"{size} bytes are no whole number of {dtype}"


def _copy(out: np.ndarray, addresses: np.ndarray) -> None:
    kernels.rows.gather(out, addresses, b"")


def array(dtype: Any = None, shape: tuple[int, ...] | None = None) -> ArrayReader:
    """Raw bytes, or ``.npy`` files, of one dtype and shape -> an array of shape (n, *shape).

    A ``.npy`` field says both itself. Raw bytes need a dtype; without a shape they are of one axis, as long as the
    first sample's. All samples must have the size of the first and, in ``.npy``, its header.
    """
    return Array(dtype, shape)


def ragged(dtype: Any = None) -> Reader:
    """Raw bytes, or ``.npy``, of any length (token ids) -> (values, offsets), the samples end to end.

    Sample i is ``values[offsets[i]:offsets[i + 1]]``. *values* is an array of *dtype* and shape (total,), of the rows
    of ``.npy`` (total, ...); *offsets* is int64, shape (n + 1,). Without a *dtype*, raw bytes are uint8, and arrays in
    ``.npy`` have that of the first. All ``.npy`` must have rows of one dtype and shape.
    """
    if dtype is None:
        return Ragged(None)
    dtype = np.dtype(dtype)
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(f"{dtype} has no form in bytes")
    return Ragged(dtype)
