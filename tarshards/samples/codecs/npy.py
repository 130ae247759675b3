"""Read the header of a .npy file."""

from __future__ import annotations

import math
import re
from io import BytesIO
from typing import NamedTuple

import numpy as np

from tarshards.errors import DecodeError
from tarshards.samples.retry_parse import retry_parse

MAGIC = b"\x93NUMPY"
HEAD = 128  # bytes of the header that numpy writes before an array with few axes
MAX_HEADER = 1 << 16  # bytes; numpy's own limit is 10,000 characters
MAX_EXTENT = 1 << 40  # elements of an array, counting empty axes as length 1

# A header as numpy writes it for a plain dtype: its length, the dtype, the order and the shape. Without numpy's parser,
# which is Python's own, it takes a tenth of the time.
EXTENT = rb"(?:0|[1-9]\d{0,17})"
PLAIN = re.compile(
    MAGIC + rb"\x01\0(..)\{'descr': '([<>|][a-zA-Z]\d*)', 'fortran_order': (False|True), "
    rb"'shape': \((|%b,|%b(?:, %b)+)\), \} {0,999}\n" % (EXTENT, EXTENT, EXTENT),
    re.DOTALL,
)


class ArrayHeader(NamedTuple):
    """The dtype and shape of an array, and the bytes before its elements, which follow in C order."""

    dtype: np.dtype
    shape: tuple[int, ...]
    prefix: bytes


def is_npy(field: str) -> bool:
    """Return whether *field* is named as one of .npy files."""
    return field.rpartition(".")[2].lower() == "npy"


def parse_header(payload: bytes, size: int | None = None) -> ArrayHeader:
    """Read the header of a .npy file (numpy.lib.format), or of one of *size* bytes, which begins with *payload*.

    Raises DecodeError if there is none, if the number of elements differs from it, or if their order is not C's.
    """
    size = len(payload) if size is None else size
    try:
        (shape, is_fortran, dtype), head = retry_parse(_read_header, payload)
    except Exception as exc:  # numpy falls back to Python's tokenizer, which raises any error
        raise DecodeError(f"not a .npy file: {exc}") from exc
    if dtype.hasobject or (is_fortran and len(shape) > 1):
        raise DecodeError("an array of Python objects or in Fortran order; decoded() reads the latter")
    if not dtype.itemsize or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise DecodeError(f"not a .npy file: an array of {dtype} and shape {shape}")
    if size - head != dtype.itemsize * math.prod(shape) or math.prod(filter(None, shape)) > MAX_EXTENT:
        raise DecodeError(f"{size - head} bytes are not {dtype} of shape {shape}, as its header says")
    return ArrayHeader(dtype, shape, payload[:head])


class UsualHeaders:
    """The headers of HEAD bytes that numpy writes before arrays whose rows have this dtype and shape.

    They differ in the number of rows alone, so that comparing takes a fraction of the time of parsing.

    >>> usual = UsualHeaders(np.dtype("<u2"), ())
    >>> data = BytesIO()
    >>> np.save(data, np.zeros(70, "<u2"))
    >>> usual.rows(data.getvalue()[:HEAD], len(data.getvalue()))
    70
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]):
        self.row: int = dtype.itemsize * math.prod(shape)
        form = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': (%d,"
        self.form: bytes = MAGIC + b"\x01\0" + (HEAD - 10).to_bytes(2, "little") + form.encode()
        self.end: bytes = f"{','.join(f' {extent}' for extent in shape)}), }}".encode()

    @classmethod
    def like(cls, head: bytes) -> UsualHeaders | None:
        """Return those of arrays with rows like that of the header *head*, None if it is none."""
        try:
            (shape, _, dtype), _ = _read_header(head)
        except Exception:  # as parse_header
            return None
        return cls(dtype, shape[1:])

    def rows(self, head: bytes, size: int) -> int | None:
        """Return the rows of a file of *size* bytes that begins with *head*; None unless that is its usual header."""
        rows, rest = divmod(size - HEAD, self.row) if self.row else (0, 1)
        usual = (self.form % rows + self.end).ljust(HEAD - 1) + b"\n"
        return rows if head == usual and not rest else None


def rows_in_header(beginning: bytes) -> int:
    """Return the extent of the first axis in the header at the *beginning* of a .npy file; 1 without axes."""
    try:
        (shape, _, _), _ = retry_parse(_read_header, beginning)
    except Exception as exc:
        raise DecodeError(f"not a .npy file: {exc}") from exc
    return shape[0] if shape else 1


def _read_header(payload: bytes) -> tuple[tuple[tuple[int, ...], bool, np.dtype], int]:
    """Return the shape, whether the order is Fortran's, the dtype, and the size of the header in bytes."""
    if plain := PLAIN.match(payload):
        length, dtype, is_fortran, shape = plain.groups()
        if plain.end() == 10 + int.from_bytes(length, "little"):
            return (
                tuple(map(int, re.findall(rb"\d+", shape))),
                is_fortran == b"True",
                np.dtype(dtype.decode()),
            ), plain.end()
    from numpy.lib import format

    stream = BytesIO(payload[:MAX_HEADER])
    version = format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the .npy format")
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    return read(stream), stream.tell()
