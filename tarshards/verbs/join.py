"""Parallel shards -> samples with the fields of all, joined by key, such as features that were computed later."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tarshards.errors import OpenError, SampleError, ShardIndexError, UrlError
from tarshards.samples.grouping import read_shard
from tarshards.samples.keys import Sample, is_reserved, no_partner
from tarshards.samples.ledger import ErrorPolicy, Ledger, Reject, reject_or_raise
from tarshards.samples.seen_keys import SeenKeys
from tarshards.storage.expressions import Shard, find_shards, spec_name
from tarshards.verbs.sort import GIB, merge_sort

if TYPE_CHECKING:
    from tarshards.index.access import SampleSequence

MISSING = "fail", "skip", "ignore"
CONFLICT = "fail", "first", "last"
TWICE = "duplicate key"
ENTRY = 200  # bytes of memory for a sample of an indexed input, with its key and overhead

OpenIndexed = Callable[[SeenKeys], "list[IndexedInput] | None"]


def join_shards(
    inputs: Sequence[Any],
    *,
    missing: str = "fail",
    conflict: str = "fail",
    memory: int = GIB,
    tmpdir: str | None = None,
    on_error: ErrorPolicy = None,
    names: Sequence[str] | None = None,
    reject: Reject | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the shard expressions *inputs*, joined by key as in ``join_samples``.

    Error messages call the inputs by *names*, by default by their expressions. Errors of shards are as in
    ``read_samples``; if *on_error* is a ledger, it counts the samples that are left out as filtered by "missing".
    Raises UrlError if stdin is more than one of the inputs.

    Once the orders of the inputs differ, samples of the inputs after the first are looked up by index, provided that
    all of these inputs are indexed, no index marks faulty samples, and the indexes fit into half of *memory*. Otherwise
    all inputs are sorted.
    """
    shards = list(map(find_shards, inputs))
    if sum(shard.url == "-" for shard in chain.from_iterable(shards)) > 1:
        raise UrlError("stdin can be only one of the inputs", url="-")
    ledger = Ledger.of(on_error)
    read = partial(read_shard, ledger=ledger)

    def open_indexed(taken: SeenKeys) -> list[IndexedInput] | None:
        from tarshards.index.access import SampleSequence
        from tarshards.index.inventory import has_index, has_ranges

        if shards[0][0].keep_headers or not all(
            all(has_index(each)) and has_ranges(each[0].location()) for each in shards[1:]
        ):
            return None
        indexed = [SampleSequence(each) for each in shards[1:]]
        for each in indexed:
            for number in range(len(each.urls)):
                each.shards.open(number)  # raises for a stale index, which may lack keys
        if sum(map(len, indexed)) * ENTRY > memory // 2 or any(each.has_faults() for each in indexed):
            return None
        return [IndexedInput(each, taken) for each in indexed]

    join = Join(names or list(map(spec_name, inputs)), missing, conflict, reject, ledger.leave_out)
    return _merge([_read(each, read) for each in shards], join, open_indexed, memory, tmpdir)


def _read(shards: Iterable[Shard], read: Callable[[Shard], Iterator[Sample]]) -> Iterator[Sample]:
    for shard in shards:
        yield from read(shard)


def join_samples(
    inputs: Sequence[Iterable[Sample]],
    *,
    names: Sequence[str] | None = None,
    missing: str = "fail",
    conflict: str = "fail",
    memory: int = GIB,
    tmpdir: str | None = None,
    reject: Reject | None = None,
    leave_out: Callable[[str], Any] | None = None,
) -> Iterator[Sample]:
    """Yield one sample for each key, with its fields from all *inputs*, in the order of the first input.

    While the orders of the inputs agree, one sample of each is held in memory. The rest is sorted within about *memory*
    bytes, with the excess spilled to *tmpdir*.

    *missing* says what to do with a key that some input lacks: raise an error ("fail"), leave its samples out ("skip"),
    or yield a sample with the available fields ("ignore"); keys that the first input lacks come last. *leave_out* is
    called with "missing" for each sample of an input that is left out. *conflict* says what to do with a field that
    several inputs have: raise an error ("fail"), or take it from the "first" or the "last" of them. Errors are
    SampleErrors, raised or passed to *reject* with the sample; a duplicate key in an input is always raised. Raises
    ValueError for other values of *missing* and *conflict*.

    >>> images, labels = [{"__key__": "a", "jpg": b""}, {"__key__": "b", "jpg": b""}], [{"__key__": "b", "cls": 1}]
    >>> list(join_samples([images, labels], missing="skip"))
    [{'__key__': 'b', 'jpg': b'', 'cls': 1}]
    """
    names = names or [f"input {number}" for number in range(1, len(inputs) + 1)]
    join = Join(names, missing, conflict, reject, leave_out or (lambda name: None))
    return _merge([iter(samples) for samples in inputs], join, None, memory, tmpdir)


class Join:
    """Joins the samples of one key: one from each input, or None for an input that lacks it.

    Raises ValueError for other values of *missing* and *conflict* than ``join_samples`` has.
    """

    def __init__(
        self,
        names: Sequence[str],
        missing: str,
        conflict: str,
        reject: Reject | None,
        leave_out: Callable[[str], Any],
    ):
        if missing not in MISSING or conflict not in CONFLICT:
            raise ValueError(f"missing is {', '.join(MISSING)} and conflict {', '.join(CONFLICT)}")
        self.names = names
        self.missing = missing
        self.conflict = conflict
        self.reject = reject
        self.leave_out = leave_out

    def __call__(self, parts: Sequence[Sample | None]) -> Iterator[Sample]:
        """Yield the joined sample, if there is one."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) and self.missing == "skip":
            for _ in present:
                self.leave_out("missing")
            return
        try:
            if len(present) < len(parts) and self.missing == "fail":
                lacking = " and ".join(name for name, part in zip(self.names, parts) if part is None)
                raise SampleError(no_partner(present[0]["__key__"], lacking)).at(present[0])
            sample = self.united(present)
        except SampleError as error:
            reject_or_raise(self.reject, present[0], error)
        else:
            yield sample

    def united(self, parts: list[Sample]) -> Sample:
        """Return one sample with the fields of all *parts*.

        Raises SampleError for a field that several of them have, if ``conflict`` is "fail".
        """
        united: Sample = {}
        for part in parts:
            for field, value in part.items():
                if field not in united or (self.conflict == "last" and not is_reserved(field)):
                    united[field] = value
                elif self.conflict == "fail" and not is_reserved(field):
                    raise SampleError(f"{part.get('__url__')} has this field too", field=field).at(parts[0])
        return united


def _merge(
    inputs: list[Iterator[Sample]], join: Join, open_indexed: OpenIndexed | None, memory: int, tmpdir: str | None
) -> Iterator[Sample]:
    """Yield the joined samples; once the orders differ, look them up in the inputs that *open_indexed* may return."""
    taken = SeenKeys()
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
        indexed = open_indexed and open_indexed(taken)
        yield from (_look_up(rests[0], indexed, taken, join) if indexed else _sort(rests, taken, join, memory, tmpdir))
    finally:
        for samples in inputs:
            if isinstance(samples, Generator):
                samples.close()  # now, even if a traceback still refers to it


def _take(taken: SeenKeys, *parts: Sample | None) -> None:
    """Add the key of *parts* to *taken*; raise SampleError if it is a duplicate."""
    sample = next(part for part in parts if part is not None)
    if sample["__key__"] in taken:
        raise SampleError(TWICE).at(sample)
    taken.add(sample["__key__"])


def _sort(
    rests: list[Iterator[Sample]], taken: SeenKeys, join: Join, memory: int, tmpdir: str | None
) -> Iterator[Sample]:
    """Join by sorting all samples by key, then sorting the results back into the order of the inputs."""
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
                    raise SampleError(TWICE).at(sample)
                parts[number] = sample
                first = first or (number, index)
            yield from ((first, sample) for sample in join(parts))

    yield from map(itemgetter(1), merge_sort(joined(), memory=memory, tmpdir=tmpdir))


def _look_up(rest: Iterable[Sample], indexed: list[IndexedInput], taken: SeenKeys, join: Join) -> Iterator[Sample]:
    """Join the *rest* of the first input with the *indexed* inputs, then the samples whose keys it lacks."""
    firsts = chain([(0, rest)], ((number, other.rest()) for number, other in enumerate(indexed, 1)))
    for number, samples in firsts:
        for sample in samples:
            try:
                others = [other.take(sample["__key__"]) for other in indexed[number:]]
            except (OpenError, ShardIndexError) as error:
                reject_or_raise(join.reject, sample, error)
                continue
            if number == 0 and not any(others):
                _take(taken, sample)  # otherwise an indexed input has marked its sample as taken
            yield from join([*[None] * number, sample, *others])


class IndexedInput:
    """An input whose shards are indexed: finds its samples by key, and records which ones were taken.

    Samples with keys in *taken* count as taken. Raises SampleError for a duplicate key.
    """

    def __init__(self, shards: SampleSequence, taken: SeenKeys):
        import numpy as np

        if (key := shards.repeated_key()) is not None:
            raise SampleError(TWICE, url=shards.names[0], key=key)
        self.shards = shards
        self.untaken: Any = ~np.fromiter(taken.which(shards.shards.each_key()), bool, len(shards))

    def take(self, key: str) -> Sample | None:
        """Return the sample with this *key*, None if there is none; raise SampleError if it was taken before."""
        try:
            index = self.shards.find(key)
        except KeyError:
            return None
        if not self.untaken[index]:
            raise SampleError(TWICE, key=key)
        self.untaken[index] = False
        return self.shards[index]

    def rest(self) -> Iterator[Sample]:
        """Yield the samples that were not taken."""
        for index in self.untaken.nonzero()[0].tolist():
            if self.untaken[index]:
                yield self.shards[index]
