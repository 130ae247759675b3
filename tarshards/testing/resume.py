"""``check_resume``: whether a loader that is stopped at any batch resumes as if it had not been stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tarshards.testing.chains import Chain, Leg, LoaderFault, Trial, least
from tarshards.testing.runs import Tested
from tarshards.testing.setups import Setup, small_setups, spread

#: The properties that may differ after a resume, and the values that they take.
CHANGES: dict[str, tuple[int, ...]] = {"ranks": (1, 2, 3), "workers": (0, 1, 2, 3), "batch_size": (1, 2, 3)}

World = tuple[Setup, Setup]  #: before a resume, and after it


@dataclass(frozen=True)
class Checked:
    """What a check has run: small worlds, random chains, resumes, and ranks."""

    worlds: int = 0
    chains: int = 0
    resumes: int = 0
    runs: int = 0

    def __str__(self) -> str:
        return f"{self.worlds} worlds, {self.chains} chains, {self.resumes} resumes, {self.runs} runs of a rank"


def check_resume(
    make_loader: Callable[[Setup], Any],
    *,
    changes: Sequence[str] = tuple(CHANGES),
    times: int = 2,
    worlds: int | Sequence[World] | None = 500,
    chains: int = 50,
    seed: int = 0,
    **options: Any,
) -> Checked:
    """Stop a loader in small worlds at every batch, and resume it; raise LoaderFault at the first that is wrong.

    A world is a dataset (up to 3 shards of up to 4 samples) with a setup before the resume (up to 3 ranks, 3 workers
    and 3 samples in a batch) and one after it, which is equal or differs in one of *changes*. A loader is stopped at
    every batch of an epoch, before and after it, resumed, then stopped again and resumed in the first setup: *times*
    resumes in all. Each resume must deliver

    - together with the runs before it, every sample of the epoch as often as an uninterrupted epoch (lost, repeated);
    - then the next epoch (except after the last of several resumes); a pass without batches may come in between;
    - in an equal setup, the same batches in the same order; in another setup, the same order of samples, if the loader
      promises that by ``steady=`` (reordered);
    - all of it without a hang, an error or a refused state.

    A loader is assumed to depend only on its setup and state: equal states in equal setups are resumed once.

    *worlds* of all 14,976 worlds are tested, evenly spaced (None: all), or the given ones; then *chains* random chains
    of larger worlds, drawn by *seed*. The fault that is raised has the shortest chain found that shows it. The other
    options are those of ``Tested``.
    """
    if wrong := set(changes) - set(CHANGES):
        raise ValueError(f"changes are of {', '.join(CHANGES)}, not {', '.join(sorted(wrong))}")
    trial = Trial(Tested(make_loader, **options))
    chosen = worlds if isinstance(worlds, Sequence) else small_worlds(worlds, changes)
    try:
        for number, (before, after) in enumerate(chosen):
            if number and chosen[number - 1][0].shards != before.shards:
                trial.forget()
            explore(trial, before, after, times)
        for number in range(chains):
            follow_random(trial, random.Random(f"{seed}/{number}"), changes)
    except LoaderFault as fault:
        raise least(fault, trial.follow) from None
    return Checked(len(chosen), chains, trial.resumes, trial.runs)


def check_chain(make_loader: Callable[[Setup], Any], chain: Chain | str, **options: Any) -> Checked:
    """Run one chain, such as a fault names; raise LoaderFault if a resume is wrong."""
    trial = Trial(Tested(make_loader, **options))
    trial.follow(Chain.parse(chain) if isinstance(chain, str) else chain)
    return Checked(chains=1, resumes=trial.resumes, runs=trial.runs)


def small_worlds(count: int | None = None, changes: Sequence[str] = tuple(CHANGES)) -> list[World]:
    """Return *count* of the small worlds (None: all), the smallest first.

    Each small setup is paired with itself, and with each setup that differs in one of *changes*.
    """
    worlds = []
    for setup in small_setups():
        worlds.append((setup, setup))
        for name in changes:
            others = (value for value in CHANGES[name] if value != getattr(setup, name))
            worlds += [(setup, setup.with_entry(name, value)) for value in others]
    worlds.sort(key=lambda world: (world[0].total, len(world[0].shards), world[0].shards))
    return worlds if count is None else spread(worlds, count)


def each_world(count: int = 500, changes: Sequence[str] = tuple(CHANGES)) -> Any:
    """Return a pytest mark that parametrizes a test with *world*, for ``check_resume(..., worlds=[world])``."""
    import pytest

    worlds = small_worlds(count, changes)
    names = [f"{before.shards} {before} -> {after}".replace(" ", "-") for before, after in worlds]
    return pytest.mark.parametrize("world", worlds, ids=names)


def explore(trial: Trial, before: Setup, after: Setup, times: int = 2) -> None:
    """Stop at every batch of the first epoch, before and after it, and resume; repeat this from each resume."""

    def go_on(chain: Chain, leg: Leg, left: int) -> None:
        setup = after if len(chain.setups) % 2 else before
        longer = [chain.then(stop, setup) for stop in leg.stops(1)]
        passes = 1 if 1 == left < times else 2
        resumed = [trial.resume(each, leg, root, passes) for each in longer]
        for each, new in zip(longer, resumed) if left > 1 else ():
            go_on(each, new, left - 1)

    root = trial.fresh(before)
    go_on(Chain((before,)), root, times)


def follow_random(trial: Trial, rng: random.Random, changes: Sequence[str]) -> None:
    """Follow a chain of up to six setups with up to 6 shards of 12 samples, 5 ranks, 4 workers, batches of 5."""
    shards = tuple(rng.randrange(13) for _ in range(rng.randrange(6)))
    setup = Setup(
        (*shards, rng.randrange(1, 13)), rng.randrange(1, 6), rng.randrange(5), rng.randrange(1, 6), rng.randrange(1000)
    )
    leg = root = trial.fresh(setup)
    chain = Chain((setup,))
    for _ in range(rng.randrange(1, 6)):
        drawn = {"ranks": rng.randrange(1, 6), "workers": rng.randrange(5), "batch_size": rng.randrange(1, 6)}
        for name in changes:
            if rng.random() < 0.6:
                setup = setup.with_entry(name, drawn[name])
        stops = leg.stops(1)
        chain = chain.then(rng.choice(stops), setup)
        leg = trial.resume(chain, leg, root)
