"""``check_epoch``: whether all ranks together deliver the dataset in an epoch, in equal steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tarshards.testing.chains import Chain, Leg, LoaderFault, Trial, flat, least, numbered, shown
from tarshards.testing.resume import Checked
from tarshards.testing.runs import Run, Tested
from tarshards.testing.setups import Setup, small_setups, spread


def all_numbers(setup: Setup) -> Iterable[int]:
    return range(setup.total)


def check_epoch(
    make_loader: Callable[[Setup], Any],
    *,
    expected: Callable[[Setup], Iterable[int]] = all_numbers,
    setups: int | None = 500,
    **options: Any,
) -> Checked:
    """Take a loader through three epochs in small worlds; raise LoaderFault at the first that is wrong.

    In each epoch, all ranks together must deliver

    - every sample of ``expected(setup)`` (default: all), as often as ``tail=`` promises (lost, repeated);
    - in batches of at most the batch size, as many as ``len(loader)`` says, if it says so (length);
    - in equal steps on all ranks, or with ``tail="exact"`` at most one more on some (uneven);
    - in the same order if another loader is made for the same setup, and for the changes that ``steady=`` names
      (reordered).

    *setups* of all 1,872 setups are tested, evenly spaced (None: all). The other options are those of ``Tested``.
    """
    trial = Trial(Tested(make_loader, **options))
    known = sorted(small_setups(), key=lambda setup: (setup.total, len(setup.shards)))
    chosen = known if setups is None else spread(known, setups)
    try:
        for setup in chosen:
            _check_setup(trial, setup, expected)
    except LoaderFault as fault:
        raise least(fault, lambda chain: _check_setup(trial, chain.setups[0], expected)) from None
    return Checked(worlds=len(chosen), runs=trial.runs)


def _check_setup(trial: Trial, setup: Setup, expected: Callable[[Setup], Iterable[int]]) -> None:
    leg, tested = trial.fresh(setup), trial.tested
    for number in range(trial.PASSES):
        _check_pass(tested, leg, number, Counter(expected(setup)))
    _check_order(leg, tested.run(setup, trial.PASSES))
    for name, value in ("workers", 0), ("batch_size", 1):
        if name in tested.steady and getattr(setup, name) != value:
            _check_order(leg, trial.fresh(setup.with_entry(name, value)).runs)


def _check_pass(tested: Tested, leg: Leg, number: int, due: Counter[int]) -> None:
    setup, where = leg.setup, f"in epoch {number}"
    details = "\n".join(f"rank {rank}: {shown(run.passes[number])}" for rank, run in enumerate(leg.runs))
    steps = [len(run.passes[number]) for run in leg.runs]
    if found := tested.amiss(due, leg.union(number), setup):
        kind, samples = found
        raise LoaderFault(kind, f"{numbered(samples)} {where}", Chain((setup,)), samples, details)
    if max(steps) - min(steps) > (tested.tail == "exact"):
        words = f"steps of the ranks {where}: {' '.join(map(str, steps))}"
        raise LoaderFault("uneven", words, Chain((setup,)), details=details)
    for run in leg.runs:
        batches = run.passes[number]
        if max(map(len, batches), default=0) > setup.batch_size:
            raise LoaderFault(
                "length", f"a batch of more than {setup.batch_size} {where}", Chain((setup,)), details=details
            )
        if run.lengths and run.lengths[number] not in (-1, len(batches)):
            words = f"len() is {run.lengths[number]} {where} of {len(batches)} batches"
            raise LoaderFault("length", words, Chain((setup,)), details=details)


def _check_order(leg: Leg, runs: list[Run]) -> None:
    """Raise LoaderFault unless both give each rank its samples in the same order."""
    for rank, (first, second) in enumerate(zip(leg.runs, runs)):
        for number, (one, other) in enumerate(zip(first.passes, second.passes)):
            if flat(one) != flat(other):
                details = f"rank {rank}, once: {shown(one)}\nrank {rank}, then: {shown(other)}"
                words = f"not in one order in epoch {number}"
                raise LoaderFault("reordered", words, Chain((leg.setup,)), details=details)
