"""Indexed shards as a map-style dataset: samples by number, decoded and mapped when they are read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, Generic, Self, overload

import numpy as np

from tarshards.index.access import SampleSequence
from tarshards.storage.expressions import find_shards
from tarshards.storage.remote import Remote, with_options
from tarshards.stream.op import BoundOp
from tarshards.stream.other_names import explains, no_attribute
from tarshards.stream.sample_ops import ItemOfShards, SampleOps
from tarshards.stream.sources import dataset_digest
from tarshards.stream.stream import Stream

#: What to use instead of the ops of a stream that change the number of samples or their order.
_INSTEAD = {
    "batched": "a DataLoader makes batches of it, and __getitems__(numbers) returns several samples",
    "filter": "[mask] and [numbers] select samples",
    "select": "[mask] and [numbers] select samples",
    "shuffle": "DataLoader(..., shuffle=True) permutes it",
}


class IndexedShards(SampleOps, SampleSequence, Generic[ItemOfShards]):
    """The samples of indexed shards as a map-style dataset: ``[i]``, ``["key"]``, slices and other parts, ``len``.

    A sample is read when it is accessed: only its bytes, and of these only *fields* (a list of names, or words in one
    string) if given. Each field that *lazy* names is a ``MemberFile``, which reads only the bytes that are requested
    from it. Nothing is cached. A slice, a list or array of numbers, or a boolean mask selects a part, which is again
    such a dataset. Local shards are mapped; remote ones are read by range requests, several at once for the batches of
    a DataLoader. The object can be pickled, inherited by forked processes and shared by threads. *index_dir* and
    *remote* are as for ``Opening``.

    ``decode``, ``map``, ``to_tuple`` and the other ops of ``Stream`` that turn each sample into one return a dataset
    that applies them to every sample it reads; without ``decode``, fields are bytes. With ``map(f, rng=True)``, a
    sample gets the same random numbers each time it is read; *seed* and *epoch*, given there, determine them. The
    dataset works with torch's DataLoader and samplers, and wherever a map-style dataset is expected.

    A faulty sample, such as one with a duplicate field, has a number, but reading it raises SampleError. ``find`` and
    ``locate`` return the number of the first sample with a key, which may be faulty; ``["key"]`` raises SampleError if
    several samples have the key.

    Raises ShardIndexError if a shard has no index or is compressed, or if the size of a local shard differs from that
    in its index. Indexes are loaded, and compared with their shards, at first use; a stale one raises ShardIndexError
    then. With a manifest (``train.shards.json``), which has the numbers of samples, the other errors are also raised
    only at first use. A shard in which no sample has one of *fields* raises SampleError at first use; without a
    manifest, the first shard is opened at once.
    """

    ops: tuple[BoundOp, ...] = ()

    @explains
    def __init__(
        self,
        urls: Any,
        *,
        fields: str | Iterable[str] | None = None,
        lazy: str | Iterable[str] | None = None,
        remote: Remote | None = None,
        index_dir: str | PathLike[str] | None = None,
        max_ratio: float | None = None,
    ):
        shards = find_shards(urls, with_options(remote, max_ratio=max_ratio), index_dir=index_dir)
        super().__init__(shards, fields=fields, lazy=lazy)

    def __repr__(self) -> str:
        """Identify the dataset, by the same text in every process: Grain compares it with the text in a state."""
        own = repr(self._own).encode() if isinstance(self._own, range) else self._own.astype("<i8").tobytes()
        digest = dataset_digest(self.urls, self.counts.astype("<i8").tobytes() + own)
        ops = "".join(f".{op.label}" for op in self.ops)
        return f"IndexedShards({len(self)} samples of {len(self.urls)} shards, digest {digest}){ops}"

    def _then(self, op: BoundOp) -> IndexedShards[Any]:
        for name in ("drop_none", "on_error"):
            if op.options.get(name):
                raise TypeError(f"{name}= leaves samples out, which have numbers here; ShardDataset takes it")
        dataset: Any = copy.copy(self)
        dataset.ops = (*self.ops, op)
        return dataset

    @overload  # type: ignore[override]
    def __getitem__(self, index: int | str) -> ItemOfShards: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and not self.ops:  # at once, since super() takes a sixth of the time
            return self.read(*self._numbers(index))
        found = super().__getitem__(index)
        if not self.ops or isinstance(found, IndexedShards):
            return found
        [result] = self._after_ops([found])
        return result

    def __getitems__(self, numbers: Iterable[int]) -> list[ItemOfShards]:  # type: ignore[override]
        return list(self._after_ops(super().__getitems__(numbers)))

    def __iter__(self) -> Iterator[ItemOfShards]:  # type: ignore[override]
        return iter(self._after_ops(super().__iter__()))

    def _after_ops(self, samples: Iterable[Any]) -> Iterable[Any]:
        """Return the results of the ops for *samples*."""
        for op in self.ops:
            samples = op.run(samples, 0, 0, None)
        return samples

    def __getattr__(self, name: str) -> Any:
        words = no_attribute("map-style IndexedShards", name)
        if name in _INSTEAD or (name in vars(Stream) and not name.startswith("_")):
            words += f": {_INSTEAD.get(name, 'a Stream of the shards has it')}"
        raise AttributeError(words, name=name, obj=self)
