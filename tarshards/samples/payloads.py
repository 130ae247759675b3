"""The keys of many samples, and the bytes of a field of each by their addresses in memory, which kernels work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, overload

import numpy as np

from tarshards import kernels


class Payloads:
    """The bytes of one field of several samples: of sample i, sizes[i] bytes at addresses[i], int64 and uint64.

    A negative size means that the sample has no such field. *held* are the objects that own the bytes. A mapping among
    these cannot be closed while it is referred to. Only the kernels may touch its bytes: if its file has shrunk, they
    raise OSError.

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
    def joined(cls, values: Sequence[bytes | None]) -> Payloads:
        """Return a copy of *values*, where None means that a sample has no such field.

        >>> payloads = Payloads.joined([b"a", None, b"bc"])
        >>> payloads.sizes.tolist(), payloads[2]
        ([1, -1, 2], b'bc')
        """
        held: Sequence[bytes] = [value or b"" for value in values] if None in values else values  # type: ignore
        sizes = np.fromiter(map(len, held), np.int64, len(held))
        view = memoryview(b"".join(held))
        starts = (np.cumsum(sizes) - sizes).view(np.uint64)
        payloads = cls(view, starts + np.uint64(address_of(view)), sizes)
        return payloads if held is values else payloads.where([value is not None for value in values])

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

    def where(self, has_field: Any) -> Payloads:
        """Return these payloads for the samples that have the field according to an array or list of bools."""
        return Payloads(self.held, self.addresses, np.where(has_field, self.sizes, -1))

    def next_row(self, row: int) -> int:
        """Return the number of the first sample from *row* on that has the field; -1 if there is none."""
        found = np.flatnonzero(self.sizes[row:] >= 0)
        return row + int(found[0]) if len(found) else -1

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


class BatchKeys(Sequence[str]):
    """The keys of a batch, equal to a list of them; *find* returns those of some *numbers* when they are needed.

    ``type(keys)(items)``, by which programs rebuild a sequence, gives a list.
    """

    def __new__(cls, find: Any, numbers: np.ndarray | None = None) -> Any:
        return list(find) if numbers is None else super().__new__(cls)

    def __init__(self, find: Callable[[np.ndarray], list[str]], numbers: np.ndarray):
        self._find, self._numbers = find, numbers

    @classmethod
    def of(cls, keys: Sequence[str]) -> BatchKeys:
        """Return a batch of known *keys*."""
        return cls(lambda numbers: [keys[number] for number in numbers.tolist()], np.arange(len(keys)))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> BatchKeys: ...
    def __getitem__(self, index: Any) -> Any:
        numbers = self._numbers[index]
        return BatchKeys(self._find, numbers) if isinstance(numbers, np.ndarray) else self._find(numbers[None])[0]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._find(self._numbers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, BatchKeys)) and list(self) == list(other)

    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of *view*, 0 if it has none."""
    if not len(view):
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
