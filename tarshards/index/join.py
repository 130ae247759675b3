"""Samples with the fields of parallel shards added: columns that were made later, or are kept apart."""

from __future__ import annotations

from collections import OrderedDict

from tarshards.errors import SampleError, UrlError
from tarshards.index.access import IndexedShards, SampleReader
from tarshards.samples.keys import is_reserved
from tarshards.samples.read import Sample

TABLES = 64  # shards at once of which the keys are looked up


class JoinedShards(SampleReader):
    """The samples of *left*, each with the fields of the sample of its key in the same shard of *right*.

    The two have as many shards, and the nth of one goes with the nth of the other; *right* may have more samples
    there, and in another order. Raises UrlError for other numbers of shards; a sample without partner, and a field
    that both have, are SampleErrors when it is read.
    """

    def __init__(self, left: SampleReader, right: IndexedShards):
        if len(left.urls) != len(right.urls):
            raise UrlError(f"{len(left.urls)} shards cannot be joined with {len(right.urls)}", url=right.names[0])
        self.left, self.right = left, right
        self.urls, self.names, self.counts, self.sizes = left.urls, left.names, left.counts, left.sizes
        self.reserved = left.reserved
        self._tables: OrderedDict[int, dict[str, int]] = OrderedDict()

    def read(self, shard: int, sample: int) -> Sample:
        result = self.left.read(shard, sample)
        extra = self.right.read(shard, self._partner(shard, sample, result["__key__"]))
        for field, value in extra.items():
            if is_reserved(field):
                continue
            if field in result:
                raise SampleError(
                    f"{self.right.names[shard]} has this field too; fields= says which to join",
                    url=self.names[shard],
                    key=result["__key__"],
                    field=field,
                )
            result[field] = value
        return result

    def _partner(self, shard: int, sample: int, key: str) -> int:
        """Return the number in its shard of the sample of *key*: most often the same number."""
        keys = self.right.keys_of(shard)
        if sample < len(keys) and keys[sample] == key:
            return sample
        table = self._tables.get(shard)
        if table is None:
            table = self._tables[shard] = {key: number for number, key in enumerate(keys)}
            if len(self._tables) > TABLES:
                self._tables.popitem(last=False)
        if key not in table:
            raise SampleError(f"no sample of this key in {self.right.names[shard]}", url=self.names[shard], key=key)
        return table[key]

    def is_remote(self) -> bool:
        return self.left.is_remote() or self.right.is_remote()

    def verify(self) -> None:
        self.left.verify()
        self.right.verify()
