"""The bytes of many samples by their addresses in memory, and the kernels that work on them without the GIL.

The kernels are in C (``_rows.c``, ``_pixels.c``), or if these are not compiled, their twins in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tarshards import kernels

__all__ = [
    "Buffers",
    "Payloads",
    "address_of",
]


class Buffers:
    """References to buffers (bytes, mappings, arrays), with their addresses and lengths.

    A mapping among them cannot be closed while it is referred to. Only the kernels may touch its bytes: if its file has
    shrunk, they raise OSError.
    """

    def __init__(self, buffers: Iterable[Any]):
        self.views: list[memoryview[int]] = [memoryview(buffer).cast("B") for buffer in buffers]
        self.addresses: Any = np.array([address_of(view) for view in self.views], np.uint64)
        self.lengths: Any = np.array([len(view) for view in self.views], np.int64)

    def __len__(self) -> int:
        return len(self.views)


class Payloads:
    """The bytes of one field of several samples: of sample i, sizes[i] bytes at starts[i] of buffer number[i].

    Raises ValueError if they are outside their buffer.

    >>> payloads = Payloads(Buffers([b"cat;dog", b"bird"]), [0, 1, 0], [4, 0, 0], [3, 4, 3])
    >>> list(payloads), payloads[1:][0]
    ([b'dog', b'bird', b'cat'], b'bird')
    """

    def __init__(self, buffers: Buffers, number: Any, starts: Any, sizes: Any):
        number, starts = np.asarray(number, np.int64), np.asarray(starts, np.int64)
        self.buffers: Any = buffers
        self.number: Any = number
        self.sizes: Any = np.ascontiguousarray(sizes, np.int64)
        if not (len(number) == len(starts) == len(self.sizes)):
            raise ValueError("number, starts and sizes differ in length")
        if len(self) and not (number.min() >= 0 and number.max() < len(buffers)):
            raise ValueError("a payload's buffer number is out of range")
        rest = buffers.lengths[number] - starts
        if len(self) and not (starts.min() >= 0 and self.sizes.min() >= 0 and (self.sizes <= rest).all()):
            raise ValueError("a payload lies outside its buffer")
        self.addresses: Any = buffers.addresses[number] + starts.astype(np.uint64)

    @classmethod
    def of(cls, datas: Iterable[Any]) -> Payloads:
        """Return *datas*, bytes or other buffers, as payloads."""
        buffers = Buffers(datas)
        return cls(buffers, np.arange(len(buffers)), np.zeros(len(buffers), np.int64), buffers.lengths)

    @classmethod
    def known(cls, buffers: Any, number: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> Payloads:
        """Return payloads known to be inside *buffers*, without a check; addresses are uint64, sizes int64."""
        payloads = object.__new__(cls)
        payloads.buffers, payloads.number, payloads.addresses, payloads.sizes = buffers, number, addresses, sizes
        return payloads

    def __len__(self) -> int:
        return len(self.sizes)

    def beginnings(self, size: int) -> list[bytes]:
        """Return copies of the first *size* bytes of each payload, or of all that it has.

        Raises OSError if a payload is in a mapped file that has shrunk.
        """
        sizes = np.minimum(self.sizes, size)
        data, ends = self._joined(sizes), np.cumsum(sizes)
        return [data[begin:end] for begin, end in zip((ends - sizes).tolist(), ends.tolist())]

    def find_beginning(self, prefix: bytes) -> list[int]:
        """Return the rows of the payloads that begin with *prefix*; the errors are those of ``beginnings``."""
        if prefix not in self._joined(np.minimum(self.sizes, len(prefix))):
            return []
        return [row for row, beginning in enumerate(self.beginnings(len(prefix))) if beginning == prefix]

    def _joined(self, sizes: np.ndarray) -> bytes:
        """Return the first *sizes* bytes of the payloads, end to end."""
        out = np.empty(int(sizes.sum()), np.uint8)
        kernels.rows.pack(out, self.addresses, sizes)
        return out.tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Return a copy of one payload; for a slice or an array of indices, Payloads.

        Raises OSError if the payload is in a mapped file that has shrunk.
        """
        if isinstance(index, (int, np.integer)):
            return kernels.rows.copy_bytes(int(self.addresses[index]), int(self.sizes[index]))
        return Payloads.known(self.buffers, self.number[index], self.addresses[index], self.sizes[index])


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of *view*, 0 if it has none."""
    if not len(view):
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
