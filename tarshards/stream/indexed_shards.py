"""Indexed shards as a map-style dataset: samples by number, decoded and mapped when they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Self

from tarshards.index.access import SampleSequence
from tarshards.stream.op import BoundOp
from tarshards.stream.other_names import explains, no_attribute
from tarshards.stream.sample_ops import SampleOps
from tarshards.stream.sources import dataset_digest
from tarshards.stream.stream import Stream

#: Alternatives to the ops of a stream that change the number of samples or their order.
_INSTEAD = {
    "batched": "a DataLoader makes batches of it, and __getitems__(numbers) returns several samples",
    "filter": "[mask] and [numbers] are the samples that they name",
    "select": "[mask] and [numbers] are the samples that they name",
    "shuffle": "DataLoader(..., shuffle=True) permutes it",
}


class IndexedShards(SampleOps, SampleSequence):
    """The samples of indexed shards, one after the other, as a map-style dataset: ``[i]``, ``["key"]``, parts, ``len``.

    A sample is read when it is asked for: only its bytes, and of these only *fields* (a list of names, or words in one
    string) if given. Those that *lazy* names are each a ``MemberFile``, which reads only what is asked for.
    Nothing is cached. A slice, a list or array of numbers, or a mask of True and False, gives a part, which is again
    such a dataset. Local shards are mapped; remote ones are read by range requests, several at once for the batches of
    a DataLoader. The object can be pickled, inherited by forked processes and shared by threads. *index_dir* and
    *remote* are as for ``Opening``.

    ``decode``, ``map``, ``to_tuple`` and the other ops of ``Stream`` that turn each sample into one return a dataset
    whose samples go through them; without ``decode``, fields are bytes. With ``map(f, rng=True)`` a sample
    gets the same random numbers each time it is read, by the *seed* and *epoch* given there. The dataset works with
    torch's DataLoader and samplers, and wherever a map-style dataset is expected.

    A sample at fault, such as one with a duplicate field, has its number, but reading it raises SampleError. ``find``
    and ``locate`` give the number of the first sample of a key, which may be at fault; ``["key"]`` raises SampleError
    for a key that several samples have.

    Raises ShardIndexError if a shard has no index, is compressed, or, if local, has another size than its index says.
    Indexes are loaded, and compared with their shards, when first needed, and a stale one raises ShardIndexError then.
    With a manifest (``train.shards.json``), which gives the number of samples, all of these errors come when first
    needed. A shard without any of *fields* in a sample raises SampleError; without a manifest, the first does at once.
    """

    ops: tuple[BoundOp, ...] = ()

    __init__ = explains(SampleSequence.__init__)

    def __repr__(self) -> str:
        """Tell datasets apart, in all processes alike: Grain compares it with that in a state."""
        own = repr(self._own).encode() if isinstance(self._own, range) else self._own.astype("<i8").tobytes()
        digest = dataset_digest(self.urls, self.counts.astype("<i8").tobytes() + own)
        ops = "".join(f".{op.label}" for op in self.ops)
        return f"IndexedShards({len(self)} samples of {len(self.urls)} shards, digest {digest}){ops}"

    def _then(self, op: BoundOp) -> Self:
        for name in ("drop_none", "on_error"):
            if op.options.get(name):
                raise TypeError(f"{name}= leaves samples out, and here a number has its sample; ShardDataset takes it")
        dataset = copy.copy(self)
        dataset.ops = (*self.ops, op)
        return dataset

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not self.ops or isinstance(found, IndexedShards):
            return found
        [made] = self._made([found])
        return made

    def __getitems__(self, numbers: Iterable[int]) -> list[Any]:
        return list(self._made(super().__getitems__(numbers)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made(super().__iter__()))

    def _made(self, samples: Iterable[Any]) -> Iterable[Any]:
        """Return what the ops make of *samples*."""
        for op in self.ops:
            samples = op.run(samples, 0, 0, None)
        return samples

    def __getattr__(self, name: str) -> Any:
        words = no_attribute("map-style IndexedShards", name)
        if name in _INSTEAD or (name in vars(Stream) and not name.startswith("_")):
            words += f": {_INSTEAD.get(name, 'a Stream of the shards has it')}"
        raise AttributeError(words, name=name, obj=self)
