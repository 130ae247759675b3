"""Many samples at once, by field: an import makes them from columns and ``TarWriter.write_batch`` packs them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tarshards.samples.keys import Sample


class PackedSamples(NamedTuple):
    """The members of whole samples with these *keys*, as ``pack_members`` packs them, from the shard *url*."""

    keys: list[str]
    members: memoryview
    url: str


class FieldColumn(NamedTuple):
    """The bytes of one field in many samples; those of a row are ``data[offsets[row]:offsets[row + 1]]``.

    *offsets* is a memoryview of int64, one more than there are rows. *valid* has a byte for each row, 1 if the row has
    the field and else 0; None if all rows have it.
    """

    field: str
    offsets: memoryview
    data: Any
    valid: bytes | None = None

    @classmethod
    def of(cls, field: str, values: Sequence[bytes | None]) -> FieldColumn:
        """Return the column of *values*; None in place of a value means that the row has no such field.

        >>> column = FieldColumn.of("txt", [b"a", None, b"bc"])
        >>> column.offsets.tolist(), column.data, column.valid
        ([0, 1, 1, 3], b'abc', b'\\x01\\x00\\x01')
        """
        valid = bytes(value is not None for value in values) if None in values else None
        held: Sequence[bytes] = values if valid is None else [value or b"" for value in values]  # type: ignore
        return cls(field, memoryview(array("q", accumulate(map(len, held), initial=0))), b"".join(held), valid)

    def rows(self, begin: int, end: int) -> FieldColumn:
        """Return the rows from *begin* to *end*."""
        valid = None if self.valid is None else self.valid[begin:end]
        return FieldColumn(self.field, self.offsets[begin : end + 1], self.data, valid)

    def next_row(self, row: int) -> int:
        """Return the number of the first row from *row* on that has the field; -1 if there is none."""
        return row if self.valid is None else self.valid.find(1, row)


class SampleBatch(NamedTuple):
    """Samples with these *keys*, each with the fields that *columns* have for its row; the columns' fields differ."""

    keys: list[str]
    url: str
    columns: list[FieldColumn]

    def rows(self, begin: int, end: int) -> SampleBatch:
        """Return the samples from *begin* to *end*."""
        if (begin, end) == (0, len(self.keys)):
            return self
        return SampleBatch(self.keys[begin:end], self.url, [column.rows(begin, end) for column in self.columns])

    def sample(self, row: int) -> Sample:
        """Return the sample of a row."""
        sample: Sample = {"__key__": self.keys[row], "__url__": self.url}
        for field, offsets, data, valid in self.columns:
            if valid is None or valid[row]:
                sample[field] = bytes(memoryview(data)[offsets[row] : offsets[row + 1]])
        return sample
