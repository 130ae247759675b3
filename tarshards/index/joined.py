"""Samples with the fields of parallel shards added, such as fields that were made later or are stored separately."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import SampleError, UrlError, visible
from tarshards.index.access import Fan, SampleReader, SampleSequence
from tarshards.samples.keys import Sample, is_reserved, no_partner

if TYPE_CHECKING:
    from tarshards.index.readahead import Numbers

Read = Callable[[int, int], Sample]  # reads a sample by the numbers of its shard and itself


class JoinedShards(SampleReader):
    """The samples of *left*, each with the fields of the sample of the same key in the corresponding shard of *right*.

    Both have the same number of shards, and the nth of one corresponds to the nth of the other, which may have more
    samples, in any order: these are left out, a warning says how many, and the ledger counts them. Raises UrlError for
    different numbers of shards; reading a sample raises SampleError if it has no partner, or both have a field of
    the same name.
    """

    def __init__(self, left: SampleReader, right: SampleSequence):
        if len(left.urls) != len(right.urls):
            raise UrlError(f"cannot join {len(left.urls)} shards with {len(right.urls)}", url=right.names[0])
        self.left = left
        self.right = right
        self.urls: list[str] = left.urls
        self.names: list[str] = left.names
        self.counts: np.ndarray = left.counts
        self.sizes: np.ndarray = left.sizes
        self.reserved: int = left.reserved
        surplus = right.counts - left.counts
        count = int(np.maximum(surplus, 0).sum())
        self.unpaired: int = left.unpaired + count
        if count:
            import logging

            reason = f"joined for some of its samples only; at least {count} have no partner and are left out"
            name = visible(right.names[int(surplus.argmax())])
            logging.getLogger("tarshards").warning("%s: %s", name, reason)

    @property
    def sequences(self) -> list[SampleSequence]:
        return self.left.sequences

    @contextmanager
    def ahead(
        self, upcoming: Iterator[Numbers], *, block: int | None, reach: int, processes: int, gap: float
    ) -> Iterator[JoinedShards]:
        fan = Fan(upcoming, 2, lambda number, numbers: numbers)  # partners have the same numbers, mostly
        options: Any = {"block": block, "reach": reach, "processes": 2 * processes, "gap": gap}
        reader = copy.copy(self)
        with (
            self.left.ahead(fan.numbers(0), **options) as reader.left,
            self.right.ahead(fan.numbers(1), **options) as reader.right,
        ):
            yield reader

    def read(self, shard: int, sample: int) -> Sample:
        return self._join(self.left.read, self.right.read, shard, sample)

    def read_aside(self, shard: int, sample: int) -> Sample:
        return self._join(self.left.read_aside, self.right.read_aside, shard, sample)

    def _join(self, left: Read, right: Read, shard: int, sample: int) -> Sample:
        result = left(shard, sample)
        extra = right(shard, self._partner(shard, sample, result["__key__"]))
        for field, value in extra.items():
            if is_reserved(field):
                continue
            if field in result:
                raise SampleError(
                    f"{self.right.names[shard]} has this field too; select the fields to join with fields=",
                    url=self.names[shard],
                    key=result["__key__"],
                    field=field,
                )
            result[field] = value
        return result

    def _partner(self, shard: int, sample: int, key: str) -> int:
        """Return the number, in its shard, of the sample with *key*; usually both samples have the same number."""
        index = self.right.shards.index(shard)
        if sample < len(index) and index.key(sample) == key and sample not in index.faults:
            return sample
        if key not in index.numbers:
            raise SampleError(no_partner(key, self.right.names[shard]), url=self.names[shard], key=key)
        return index.numbers[key]

    def is_remote(self) -> bool:
        return self.left.is_remote() or self.right.is_remote()

    def verify(self) -> None:
        self.left.verify()
        self.right.verify()
