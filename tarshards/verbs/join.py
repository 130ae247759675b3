"""Parallel shards -> samples with the fields of all, joined by key: columns that were made later, or are kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tarshards.errors import OpenError, SampleError, TarshardsError, UrlError
from tarshards.samples.fields import place
from tarshards.samples.keys import is_reserved
from tarshards.samples.ledger import Ledger
from tarshards.samples.read import Sample, read_shard
from tarshards.storage.expressions import Shard, expand_shards, spec_name
from tarshards.verbs.sort import GIB, merge_sort

if TYPE_CHECKING:
    from tarshards.index.access import IndexedShards

MISSING = "fail", "skip", "ignore"
CONFLICT = "fail", "first", "last"
TWICE = "this key comes twice"
ENTRY = 200  # bytes of memory for a sample in an index and a table, and for what comes with it

Reject = Callable[[Sample, TarshardsError], Any]
Tables = Callable[[set[str]], "list[Table] | None"]


def merge_shards(
    inputs: Sequence[Any],
    *,
    missing: str = "fail",
    conflict: str = "fail",
    memory: int = GIB,
    tmpdir: str | None = None,
    on_error: Callable[[Exception], Any] | None = None,
    allow_pipe: bool = False,
    reject: Reject | None = None,
    skipped: Counter[str] | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the shard expressions *inputs* joined by key, as ``merge_samples`` does.

    From where their orders differ the samples of the inputs after the first are looked up by index, where all have one
    and these fit into half of the *memory*. Errors of shards are as in ``read_samples``.
    """
    shards = [expand_shards(spec) for spec in inputs]
    if sum(shard.url == "-" for shard in chain.from_iterable(shards)) > 1:
        raise UrlError("stdin is read once, as one input", url="-")
    ledger = Ledger.of(on_error)

    def tables(taken: set[str]) -> list[Table] | None:
        from tarshards.index.access import IndexedShards
        from tarshards.index.sidecar import has_index

        if not all(has_index([shard.url for each in shards[1:] for shard in each])):
            return None
        indexed = [IndexedShards(each) for each in shards[1:]]
        if sum(map(len, indexed)) * ENTRY > memory // 2:
            return None
        return [Table(each, taken) for each in indexed]

    return merge_samples(
        [_read(each, ledger, allow_pipe) for each in shards],
        names=list(map(spec_name, inputs)),
        missing=missing,
        conflict=conflict,
        memory=memory,
        tmpdir=tmpdir,
        reject=reject,
        skipped=skipped,
        tables=tables,
    )


def _read(shards: list[Shard], ledger: Ledger, allow_pipe: bool) -> Iterator[Sample]:
    for shard in shards:
        yield from read_shard(shard.url, ledger=ledger, allow_pipe=allow_pipe)


def merge_samples(
    inputs: Sequence[Iterable[Sample]],
    *,
    names: Sequence[str] | None = None,
    missing: str = "fail",
    conflict: str = "fail",
    memory: int = GIB,
    tmpdir: str | None = None,
    reject: Reject | None = None,
    skipped: Counter[str] | None = None,
    tables: Tables | None = None,
) -> Iterator[Sample]:
    """Yield for each key one sample with the fields that it has in all *inputs*, in the order of the first input.

    One sample of each input is held while their orders agree. From there on the rest is sorted within about *memory*
    bytes, what is more in *tmpdir*; or the inputs after the first are looked up in what *tables* makes.

    A key that not all inputs have is *missing*: an error ("fail"), left out and counted in *skipped* ("skip"), or a
    sample of the fields there are ("ignore"); those that the first input lacks come last. A field that several have is
    in *conflict*: an error ("fail"), or that of the "first" or the "last" input counts. Errors are SampleErrors, raised
    or given to *reject* with the sample. A key that comes twice in an input is always raised.

    >>> images, labels = [{"__key__": "a", "jpg": b""}, {"__key__": "b", "jpg": b""}], [{"__key__": "b", "cls": 1}]
    >>> list(merge_samples([images, labels], missing="skip"))
    [{'__key__': 'b', 'jpg': b'', 'cls': 1}]
    """
    if missing not in MISSING or conflict not in CONFLICT:
        raise ValueError(f"missing is {', '.join(MISSING)} and conflict {', '.join(CONFLICT)}")
    names = names or [f"input {number}" for number in range(1, len(inputs) + 1)]
    join = Join(names, missing, conflict, reject, Counter() if skipped is None else skipped)
    return _merge([iter(samples) for samples in inputs], join, tables, memory, tmpdir)


class Join:
    """What becomes of the samples of one key, one of each input or None."""

    def __init__(self, names: Sequence[str], missing: str, conflict: str, reject: Reject | None, skipped: Counter[str]):
        self.names, self.missing, self.conflict = names, missing, conflict
        self.reject, self.skipped = reject, skipped

    def __call__(self, parts: Sequence[Sample | None]) -> Iterator[Sample]:
        """Yield the sample that *parts* make, if they make one."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) and self.missing == "skip":
            self.skipped["samples that not all inputs have"] += 1
            return
        try:
            if len(present) < len(parts) and self.missing == "fail":
                lacking = " and ".join(name for name, part in zip(self.names, parts) if part is None)
                raise SampleError(f"no sample of this key in {lacking}", **place(present[0]))
            sample = self.united(present)
        except SampleError as error:
            self.refuse(present[0], error)
        else:
            yield sample

    def united(self, parts: list[Sample]) -> Sample:
        """Return a sample with the fields of *parts*."""
        united: Sample = {}
        for part in parts:
            for field, value in part.items():
                if field not in united or (self.conflict == "last" and not is_reserved(field)):
                    united[field] = value
                elif self.conflict == "fail" and not is_reserved(field):
                    raise SampleError(f"{part.get('__url__')} has this field too", **place(parts[0]), field=field)
        return united

    def refuse(self, sample: Sample, error: TarshardsError) -> None:
        """Raise *error*, or leave *sample* out."""
        if self.reject is None:
            raise error
        self.reject(sample, error)


def _merge(
    inputs: list[Iterator[Sample]], join: Join, tables: Tables | None, memory: int, tmpdir: str | None
) -> Iterator[Sample]:
    taken: set[str] = set()
    try:
        while True:
            parts = [next(samples, None) for samples in inputs]
            keys = {None if part is None else part["__key__"] for part in parts}
            if len(keys) > 1:
                break
            if None in keys:
                return
            _take(taken, *parts)
            yield from join(parts)
        rests: list[Iterator[Sample]] = [chain([part] if part else [], samples) for part, samples in zip(parts, inputs)]
        looked_up = tables and tables(taken)
        yield from (
            _look_up(rests[0], looked_up, taken, join) if looked_up else _sort(rests, taken, join, memory, tmpdir)
        )
    finally:
        for samples in inputs:
            if isinstance(samples, Generator):
                samples.close()  # at once, also where a traceback still holds it


def _take(taken: set[str], *parts: Sample | None) -> None:
    """Add the key of *parts* to those that were taken; raise SampleError where it is one of them."""
    sample = next(part for part in parts if part is not None)
    if sample["__key__"] in taken:
        raise SampleError(TWICE, **place(sample))
    taken.add(sample["__key__"])


def _sort(
    rests: list[Iterator[Sample]], taken: set[str], join: Join, memory: int, tmpdir: str | None
) -> Iterator[Sample]:
    """Join by sorting all by key, and again by where each stood."""
    pairs = (
        (sample["__key__"], (number, index, sample))
        for number, rest in enumerate(rests)
        for index, sample in enumerate(rest)
    )

    def joined() -> Iterator[tuple[Any, Sample]]:
        for key, group in groupby(merge_sort(pairs, memory=memory, tmpdir=tmpdir), key=itemgetter(0)):
            parts: list[Sample | None] = [None] * len(rests)
            first = None
            for _, (number, index, sample) in group:
                if parts[number] is not None or key in taken:
                    raise SampleError(TWICE, **place(sample))
                parts[number] = sample
                first = first or (number, index)
            yield from ((first, sample) for sample in join(parts))

    yield from map(itemgetter(1), merge_sort(joined(), memory=memory, tmpdir=tmpdir))


def _look_up(rest: Iterable[Sample], tables: list[Table], taken: set[str], join: Join) -> Iterator[Sample]:
    """Join the *rest* of the first input with what *tables* have; then what only they have."""
    firsts = chain([(0, rest)], ((number, table.rest()) for number, table in enumerate(tables, 1)))
    for number, samples in firsts:
        for sample in samples:
            try:
                others = [table.take(sample["__key__"]) for table in tables[number:]]
            except OpenError as error:
                join.refuse(sample, error)
                continue
            if number == 0 and not any(others):
                _take(taken, sample)  # of the others the tables know that they were taken
            yield from join([*[None] * number, sample, *others])


class Table:
    """The samples of indexed shards by key, and which of them have not been taken, as those of *taken* have been.

    Raises SampleError for a key that comes twice.
    """

    def __init__(self, shards: IndexedShards, taken: set[str]):
        import numpy as np

        if (key := shards.repeated_key()) is not None:
            raise SampleError(TWICE, url=shards.names[0], key=key)
        self.shards = shards
        self.untaken = np.fromiter((key not in taken for key in shards.keys), bool, len(shards))

    def take(self, key: str) -> Sample | None:
        """Read the sample of *key*, or return None where there is none; raise SampleError where it was taken before."""
        try:
            index = self.shards.find(key)
        except KeyError:
            return None
        if not self.untaken[index]:
            raise SampleError(TWICE, key=key)
        self.untaken[index] = False
        return self.shards[index]

    def rest(self) -> Iterator[Sample]:
        """Read the samples that have not been taken."""
        for index in self.untaken.nonzero()[0].tolist():
            if self.untaken[index]:
                yield self.shards[index]
