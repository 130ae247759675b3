"""A selection of the samples of a dataset, made before an epoch begins, so that a plan covers only these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from hashlib import blake2b
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tarshards.epoch.epoch_options import Tail
from tarshards.epoch.plan import Order, PlannedEpoch
from tarshards.errors import OpError, TarshardsError, check_function, shortened
from tarshards.index.access import SampleReader, SampleSequence, gap_of
from tarshards.parallel.calls import TASKS, bounded_map, check_sent
from tarshards.parallel.forks import cached_property
from tarshards.samples.conditions import Condition
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, error_handler
from tarshards.samples.lines import lacking_keys, read_keys

Predicate = Callable[[Sample], Any]
Keys = str | PathLike[str] | Iterable[str]


class Selection:
    """Selected samples of shards that have *of* samples each; *numbers* are their numbers over all shards, from 0.

    ``counts`` has the number of selected samples of each shard, int64, and ``fractions`` their share of the shard.
    Raises ValueError for numbers that are out of range.

    >>> selection = Selection([3, 2], [4, 0, 1])
    >>> len(selection), selection.counts.tolist(), selection.locate([0, 0, 1], [0, 1, 0])
    (3, [2, 1], array([0, 1, 1]))
    """

    def __init__(self, of: ArrayLike, numbers: ArrayLike):
        sizes = np.asarray(of, np.int64)
        total = int(sizes.sum())
        chosen = np.asarray(numbers)
        if chosen.size and (chosen.ndim != 1 or chosen.dtype.kind not in "iu"):
            raise ValueError(f"samples are selected by whole numbers, one axis of them, not {shortened(numbers)}")
        chosen = np.unique(chosen.astype(np.int64))
        if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < total:
            wrong = chosen[0] if chosen[0] < 0 else chosen[-1]
            raise ValueError(f"there is no sample {wrong}: there are {total}, numbered from 0")
        self._total, self._first = total, np.cumsum(sizes) - sizes
        self._begin = np.searchsorted(chosen, self._first)
        self.counts: NDArray[np.int64] = np.diff(self._begin, append=len(chosen)).astype(np.int64)
        self.fractions: NDArray[np.float64] = self.counts / np.maximum(sizes, 1)
        self.numbers: NDArray[Any] = chosen.astype(np.min_scalar_type(max(total, 1)))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def digest(self) -> bytes:
        """Identifies the selected samples among all."""
        return blake2b(self.numbers.astype("<i8").tobytes(), digest_size=16).digest()

    @cached_property
    def gap(self) -> float:
        """The average number of samples between two stretches of selected ones."""
        return gap_of(self.numbers.astype(np.int64), self._total)

    def locate(self, shards: ArrayLike, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the numbers in their shards of the selected samples, by their *indices* among those selected there."""
        shards = np.asarray(shards)
        return self.numbers[self._begin[shards] + indices].astype(np.int64) - self._first[shards]


class SelectedPlan(PlannedEpoch):
    """A *plan* over the counts of a *selection*, as samples of whole shards."""

    def __init__(self, plan: PlannedEpoch, selection: Selection):
        self.plan = plan
        self.selection = selection
        self.total: int = plan.total
        self.ranks: int = plan.ranks
        self.tail: Tail = plan.tail

    @property
    def before(self) -> int:
        return self.plan.before

    @property
    def block_and_reach(self) -> tuple[int | None, int]:
        return self.plan.block_and_reach

    @property
    def gap(self) -> float:
        return self.selection.gap

    @property
    def permuted_by(self) -> tuple[int, int] | None:
        return self.plan.permuted_by

    @property
    def order(self) -> Order | None:
        return self.plan.order

    def apart(self) -> SelectedPlan:
        return SelectedPlan(self.plan.apart(), self.selection)

    def __getitem__(self, positions: Any) -> Any:
        shards, indices = self.plan[positions]
        return shards, self.selection.locate(shards, indices)

    def substitutes(self, position: int, among: int | None = None) -> Iterator[tuple[int, int]]:
        for shard, at in self.plan.substitutes(position, among):
            yield shard, int(self.selection.locate(shard, at))

    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> SelectedPlan:
        return SelectedPlan(self.plan.resume(position, ranks, tail), self.selection)

    def state(self, taken: int) -> dict[str, Any]:
        return self.plan.state(taken)


class SampleChoice(NamedTuple):
    """Which samples to select; see ``Stream.select``."""

    where: str | Predicate | None
    keys: Keys | None
    drop: Keys | None
    fields: str | Iterable[str] | None
    on_error: ErrorPolicy
    executor: Executor | None

    def __call__(self, shards: SampleReader, among: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of the samples *among* are chosen: whole numbers, over all *shards*."""
        if not isinstance(shards, SampleSequence):
            raise TypeError("select comes before join")
        chosen = np.ones(len(among), np.bool_)
        if self.drop is not None:
            chosen &= ~_have(shards, _listed(self.drop, "drop="), among)[0]
        if self.keys is not None:
            wanted = _listed(self.keys, "keys=")
            have, missing = _have(shards, wanted, among)
            if missing:
                raise lacking_keys(sorted(missing), len(wanted))
            chosen &= have
        if self.where is not None:
            by_columns = self._by_columns(shards, among[chosen])
            if by_columns is not None:
                return by_columns[among]
            if self.fields is not None:
                shards = SampleSequence(shards.shards.named, fields=self.fields)
            chosen[chosen] = _meet(shards, self.where, among[chosen], self.on_error, self.executor)
        return chosen

    def _by_columns(self, shards: SampleSequence, among: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Return which samples are among these and meet the condition if it names columns, otherwise None."""
        if not isinstance(self.where, str) or self.fields is not None:
            return None
        from tarshards.index.where import by_columns

        return by_columns(
            shards,
            Condition(self.where),
            among=lambda: np.isin(np.arange(int(shards.counts.sum())), among),
            on_error=self.on_error,
        )


def _listed(keys: Keys, name: str) -> frozenset[str]:
    """Return a list of keys, or those in a file of that name; raise TypeError for anything else in a list."""
    found = frozenset(read_keys(fspath(keys)) if isinstance(keys, str | PathLike) else keys)
    for key in found:
        if not isinstance(key, str):
            raise TypeError(f"{name} is a list of keys, or the name of a file of them, not of {shortened(key)}")
    return found


def _have(
    shards: SampleSequence, keys: frozenset[str], among: NDArray[Any]
) -> tuple[NDArray[np.bool_], Collection[str]]:
    """Return which of the samples *among* have one of *keys*, and the keys that no sample has; by indexes alone."""
    if shards.shards.key_index is not None:
        found = {key: shards.places(key) for key in keys}
        numbers = np.array([number for numbers in found.values() for number in numbers], np.int64)
        return np.isin(among.astype(np.int64), numbers), [key for key, numbers in found.items() if not numbers]
    have, missing = np.zeros(int(shards.counts.sum()), np.bool_), set(keys)
    for number, key in enumerate(shards.shards.each_key()):
        if key in keys:
            have[number] = True
            missing.discard(key)
    return have[among], missing


def _meet(
    shards: SampleSequence,
    where: str | Predicate,
    among: NDArray[Any],
    on_error: ErrorPolicy,
    executor: Executor | None,
) -> NDArray[np.bool_]:
    """Return which of the samples *among* meet *where*; reads each once, in storage order."""
    predicate = Condition(where) if isinstance(where, str) else where
    check_function(predicate, "where=")
    check_sent(predicate, executor, "select")
    handle = error_handler(on_error)
    parts = np.array_split(among, 1 if executor is None else TASKS)
    tasks = [(shards, predicate, part, handle is not None) for part in parts if len(part)]
    judged = map(_judge, tasks) if executor is None else bounded_map(_judge, tasks, executor=executor, window=TASKS)
    answers = [np.zeros(0, np.bool_)]
    for meets, errors in judged:
        for error in errors:
            if handle is None:
                raise error
            handle(error)
        answers.append(meets)
    return np.concatenate(answers)


def _judge(
    task: tuple[SampleSequence, Predicate, NDArray[Any], bool],
) -> tuple[NDArray[np.bool_], list[TarshardsError]]:
    """Return which samples meet the predicate, and the errors of samples; stop at the first if none is allowed."""
    shards, predicate, numbers, goes_on = task
    meets, errors = np.zeros(len(numbers), np.bool_), []
    for at, result in enumerate(shards.read_numbers(numbers)):
        if isinstance(result, dict):
            try:
                meets[at] = bool(predicate(result))
                continue
            except TarshardsError as error:
                result = error
            except Exception as error:
                result = OpError(f"the condition fails: {type(error).__name__}: {error}").at(result)
        errors.append(result)
        if not goes_on:
            break
    return meets, errors
