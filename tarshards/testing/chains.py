"""Chains of resumes: what each may deliver after the earlier ones, and the shortest chain that shows a fault."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tarshards.testing.runs import Batch, Run, Stop, Tested
from tarshards.testing.setups import Setup

WHERE = ("after the resume", "in the epoch after the resume")
#: Seconds to search for the shortest chain: each try with a loader that hangs takes its time limit.
SEARCH = 60


@dataclass(frozen=True)
class Chain:
    """A loader that is stopped and resumed repeatedly: each setup except the last runs to its stop.

    >>> print(Chain.parse("shards=2+1 | ranks=2 workers=0 batch_size=1 stop=0+1 | ranks=1 workers=0 batch_size=3"))
    shards=2+1 seed=0 | ranks=2 workers=0 batch_size=1 stop=0+1 | ranks=1 workers=0 batch_size=3
    """

    setups: tuple[Setup, ...]
    stops: tuple[Stop, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Chain:
        """Return the chain that prints as *text*."""
        known = "shards=2+1 | ranks=2 workers=0 batch_size=1 stop=0+1 | ranks=1 workers=0 batch_size=1"
        parts = [dict(re.findall(r"(\w+)=([\d+]+)", part)) for part in text.split("|")]
        try:
            shards = tuple(int(size) for size in parts[0].pop("shards").split("+"))
            seed = int(parts[0].pop("seed", 0))
            stops = [part.pop("stop").split("+") for part in parts[1:-1]]
            setups = [Setup(shards, seed=seed, **{name: int(value) for name, value in p.items()}) for p in parts[1:]]
            chain = cls(tuple(setups), tuple((int(passes), int(batches)) for passes, batches in stops))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{text!r} is not a chain such as {known!r}") from error
        if not setups:
            raise ValueError(f"{text!r} is not a chain such as {known!r}")
        return chain

    def __str__(self) -> str:
        stops = [f" stop={passes}+{batches}" for passes, batches in self.stops]
        first = f"shards={'+'.join(map(str, self.setups[0].shards))} seed={self.setups[0].seed}"
        return " | ".join([first, *(f"{setup}{stop}" for setup, stop in zip(self.setups, [*stops, ""]))])

    def then(self, stop: Stop, setup: Setup) -> Chain:
        return Chain((*self.setups, setup), (*self.stops, stop))

    def simpler(self) -> Iterator[Chain]:
        """Yield chains that are simpler than this one in one respect, the largest steps first."""
        for i in range(len(self.setups) - 1 if len(self.setups) > 2 else 0):
            yield Chain(self.setups[:i] + self.setups[i + 1 :], self.stops[:i] + self.stops[i + 1 :])
        shards = self.setups[0].shards
        fewer = [shards[:i] + shards[i + 1 :] for i in range(len(shards))] if len(shards) > 1 else []
        fewer += [(*shards[:i], shards[i] + shards[i + 1], *shards[i + 2 :]) for i in range(len(shards) - 1)]
        fewer += [(*shards[:i], size - 1, *shards[i + 1 :]) for i, size in enumerate(shards) if size]
        for sizes in fewer:
            if sum(sizes):
                yield replace(self, setups=tuple(replace(setup, shards=sizes) for setup in self.setups))
        for name, least in ("ranks", 1), ("workers", 0), ("batch_size", 1):
            values = [getattr(setup, name) for setup in self.setups]
            for changed in [
                [least] * len(values),
                *([*values[:i], v - 1, *values[i + 1 :]] for i, v in enumerate(values)),
            ]:
                if changed != values and min(changed) >= least:
                    changes = zip(self.setups, changed)
                    yield replace(self, setups=tuple(replace(setup, **{name: value}) for setup, value in changes))
        for i, (passes, batches) in enumerate(self.stops):
            for stop in [(0, 0), (0, batches), (passes - 1, batches), (passes, batches - 1)]:
                if stop < (passes, batches) and min(stop) >= 0:
                    yield replace(self, stops=(*self.stops[:i], stop, *self.stops[i + 1 :]))


class LoaderFault(AssertionError):
    """A fault of a loader: its *kind*, the *chain* that shows it, and the numbers of the *samples* concerned.

    Kinds: lost, repeated, reordered, uneven (steps of ranks), length (``len`` differs from the pass), refused (a
    state), raised, hung, endless; and those of ``check_shuffle``.
    """

    def __init__(
        self, kind: str, words: str, chain: Chain | None = None, samples: tuple[int, ...] = (), details: str = ""
    ):
        self.kind = kind
        self.words = words
        self.chain = chain
        self.samples = samples
        self.details = details
        lines = [f"{kind}: {words}"]
        if details:
            lines.append(details)
        if chain:
            lines.append(f"chain: {chain}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> Any:
        return LoaderFault, (self.kind, self.words, self.chain, self.samples, self.details)


@dataclass
class Leg:
    """The runs of all ranks of one setup, from one state; *epoch* is the epoch of their first pass.

    *before* are the samples of this epoch that earlier legs delivered. *has_ended*: the previous epoch had ended when
    the state was saved, so the resume began with a pass without batches, which is left out.
    """

    setup: Setup
    runs: list[Run]
    epoch: int = 0
    before: Counter[int] = field(default_factory=Counter)
    has_ended: bool = False

    def union(self, number: int) -> Counter[int]:
        """The samples of a pass over all ranks."""
        return Counter(sample for run in self.runs for sample in run.samples(number))

    def stops(self, passes: int) -> list[Stop]:
        """The stops in the first *passes* at which all ranks have taken the same number of batches."""
        found: list[Stop] = []
        for number in range(passes):
            steps = [len(run.passes[number]) for run in self.runs]
            found += [(number, batches) for batches in range(max(1, min(steps) + (min(steps) == max(steps))))]
        return [*found, (passes, 0)]

    def taken(self, stop: Stop) -> Counter[int]:
        """The samples that the epoch has delivered before a stop in it."""
        passes, batches = stop
        taken = Counter(self.before) if passes == 0 else Counter()
        if batches:
            taken.update(s for run in self.runs for batch in run.passes[passes][:batches] for s in batch)
        return taken

    def after_pass(self, stop: Stop) -> Stop:
        """Return the stop after the pass for one after its last batch: a resume from either is the same."""
        passes, batches = stop
        is_last = batches and batches == max(len(run.passes[passes]) for run in self.runs)
        return (passes + 1, 0) if is_last else stop

    def rest(self, rank: int, stop: Stop) -> list[list[Batch]]:
        """The batches of a rank's passes after a stop."""
        passes, batches = stop
        first, *others = self.runs[rank].passes[passes:]
        return [first[batches:], *others]


class Trial:
    """Runs chains of one loader, and compares each resume with an uninterrupted run.

    Runs that begin without a state are kept, since many chains begin with the same run; those from equal states in
    equal setups are kept until ``forget``.
    """

    PASSES = 3  # of a run that begins without a state

    def __init__(self, tested: Tested):
        self.tested = tested
        self.resumes: int = 0
        self.runs: int = 0
        self._fresh: dict[Setup, Leg] = {}
        self._kept: dict[Any, list[Run]] = {}

    def forget(self) -> None:
        """Drop the kept runs that begin with a state."""
        self._kept.clear()

    def fresh(self, setup: Setup) -> Leg:
        """The runs that begin without a state; raise LoaderFault if they end early."""
        if setup not in self._fresh:
            leg = self._leg(setup, self.PASSES)
            check_ends(leg, Chain((setup,)))
            self._fresh[setup] = leg
        return self._fresh[setup]

    def resume(self, chain: Chain, leg: Leg, root: Leg, passes: int = 2) -> Leg:
        """Resume *leg* at the last stop of *chain*, in its last setup, for some passes; return the new leg, checked."""
        setup, stop = chain.setups[-1], chain.stops[-1]
        self.resumes += 1
        states = tuple(run.states[stop] for run in leg.runs)
        stop = leg.after_pass(stop)
        has_ended = stop[1] == 0 and (stop[0] > 0 or leg.has_ended)  # a pass without batches may come first
        new = self._leg(setup, passes + has_ended, states)
        check_ends(new, chain)
        if has_ended and not new.union(0):
            new.runs, new.has_ended = [run.after_first() for run in new.runs], True
        new.epoch, new.before = leg.epoch + stop[0], leg.taken(stop)
        self._judge(chain, leg, stop, new, root, passes)
        return new

    def follow(self, chain: Chain) -> None:
        """Run a chain; raise LoaderFault at the first resume that is wrong, ValueError if a stop is not reached."""
        leg = root = self.fresh(chain.setups[0])
        for number, stop in enumerate(chain.stops, 1):
            passes = min(len(run.passes) for run in leg.runs) - 1
            if stop[0] > passes or stop not in leg.stops(min(stop[0] + 1, passes)):
                raise ValueError(f"not all ranks take the batches of a stop: {chain}")
            leg = self.resume(Chain(chain.setups[: number + 1], chain.stops[:number]), leg, root)

    def _leg(self, setup: Setup, passes: int, states: tuple[bytes, ...] | None = None) -> Leg:
        """The runs of all ranks, each from its state."""
        kept = setup, passes, states
        if kept not in self._kept:
            self.runs += setup.ranks
            self._kept[kept] = self.tested.run(setup, passes, states)
        return Leg(setup, self._kept[kept])

    def _judge(self, chain: Chain, leg: Leg, stop: Stop, new: Leg, root: Leg, passes: int) -> None:
        """Raise LoaderFault unless *new* delivers what *leg* would have delivered after *stop*."""
        for number in range(min(passes, self.PASSES - new.epoch)):
            before = new.before if number == 0 else Counter[int]()
            due, came = root.union(new.epoch + number), before + new.union(number)
            if found := self.tested.amiss(due, came, new.setup):
                kind, samples = found
                details = [f"before the resume: {shown_samples(before)}"]
                details += [f"rank {rank} after it: {shown(run.passes[number])}" for rank, run in enumerate(new.runs)]
                details.append(f"due in all: {shown_samples(due)}")
                raise LoaderFault(kind, f"{numbered(samples)} {WHERE[number]}", chain, samples, "\n".join(details))
        is_same = leg.setup == new.setup
        if is_same or self.tested.is_steady(leg.setup, new.setup):
            for rank, run in enumerate(new.runs):
                for number, (due_batches, batches) in enumerate(zip(leg.rest(rank, stop), run.passes)):
                    if due_batches != batches if is_same else flat(due_batches) != flat(batches):
                        words = f"not in the order that was due {WHERE[number]}"
                        lines = f"rank {rank}, due: {shown(due_batches)}\nrank {rank}, came: {shown(batches)}"
                        raise LoaderFault("reordered", words, chain, details=lines)


def least(fault: LoaderFault, run: Callable[[Chain], None]) -> LoaderFault:
    """Return the fault with the shortest chain found in time; if the search ended, every part of it is needed.

    *run* raises the fault of a chain, or ValueError if the chain cannot be run.
    """
    until = time.monotonic() + SEARCH
    chains = simpler_than(fault)
    while time.monotonic() < until and (chain := next(chains, None)):
        try:
            run(chain)
        except LoaderFault as simpler:
            if simpler.kind == fault.kind or {simpler.kind, fault.kind} <= {"lost", "repeated", "reordered"}:
                fault, chains = simpler, simpler_than(simpler)
        except ValueError:
            continue
    return fault


def simpler_than(fault: LoaderFault) -> Iterator[Chain]:
    return fault.chain.simpler() if fault.chain else iter(())


def check_ends(leg: Leg, chain: Chain) -> None:
    """Raise LoaderFault if a rank's run has ended early."""
    for rank, run in enumerate(leg.runs):
        if run.ending:
            where = f"rank {rank} of {leg.setup.ranks}"
            raise LoaderFault(run.ending, f"{where}: {run.words}" if run.words else where, chain)


def flat(batches: list[Batch]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def numbered(samples: tuple[int, ...]) -> str:
    return f"sample{'s' if len(samples) > 1 else ''} {' '.join(map(str, samples))}"


def shown(batches: list[Batch]) -> str:
    return " ".join(f"[{' '.join(map(str, batch))}]" for batch in batches) or "nothing"


def shown_samples(samples: Counter[int]) -> str:
    return " ".join(map(str, sorted(samples.elements()))) or "nothing"
