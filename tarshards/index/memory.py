"""The bytes of many samples by their addresses in memory, and the kernels that work on them without the GIL.

The kernels are in C (``_rows.c``, ``_pixels.c``), or if these are not compiled, their twins in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tarshards import kernels


class Payloads:
    """The bytes of one field of several samples: of sample i, sizes[i] bytes at addresses[i], int64 and uint64.

    *held* are the objects that own them. A mapping among these cannot be closed while it is referred to. Only the
    kernels may touch its bytes: if its file has shrunk, they raise OSError.

    >>> payloads = Payloads.within(b"cat;dog", [4, 0], [3, 3])
    >>> list(payloads), payloads[1:][0]
    ([b'dog', b'cat'], b'cat')
    """

    def __init__(self, held: Any, addresses: np.ndarray, sizes: np.ndarray):
        self.held: Any = held
        self.addresses: np.ndarray = addresses
        self.sizes: np.ndarray = sizes

    @classmethod
    def of(cls, datas: Iterable[Any]) -> Payloads:
        """Return *datas*, bytes or other buffers, as payloads."""
        views = [memoryview(data).cast("B") for data in datas]
        return cls(views, np.array([*map(address_of, views)], np.uint64), np.array([*map(len, views)], np.int64))

    @classmethod
    def within(cls, buffer: Any, starts: Any, sizes: Any) -> Payloads:
        """Return the *sizes* bytes at *starts* of a buffer; raise ValueError if they are not in it."""
        view = memoryview(buffer).cast("B")
        starts, sizes = np.asarray(starts, np.int64), np.ascontiguousarray(sizes, np.int64)
        if starts.min(initial=0) < 0 or sizes.min(initial=0) < 0 or (sizes > len(view) - starts).any():
            raise ValueError("a payload lies outside its buffer")
        return cls(view, starts.astype(np.uint64) + np.uint64(address_of(view)), sizes)

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
        return Payloads(self.held, self.addresses[index], self.sizes[index])


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of *view*, 0 if it has none."""
    if not len(view):
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
