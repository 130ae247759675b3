"""The parts common to all loaders: passes over a dataset, states to resume from, and the interface for trainers."""

from __future__ import annotations

import copy
import logging
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic

from tarshards.epoch.world import World
from tarshards.errors import SampleError, StateError, whole_number
from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.monitor import Monitor
from tarshards.parallel.forks import cached_property
from tarshards.samples.grouping import closed_at_exit
from tarshards.samples.ledger import Ledger, PassOf, Tally
from tarshards.storage import traffic
from tarshards.stream.other_names import no_attribute
from tarshards.stream.replaying import check_ordered, check_replayed, crc_of, crc_of_results
from tarshards.stream.sources import ShardSource, check_order, check_state, version_of
from tarshards.stream.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from tarshards.epoch.loop import EpochLoop
    from tarshards.epoch.plan import PlannedEpoch

    BatchType = TypeVar("BatchType", covariant=True, default=Any)
else:
    from typing import TypeVar

    BatchType = TypeVar("BatchType")

T = TypeVar("T")

log: logging.Logger = logging.getLogger("tarshards")


@dataclass(eq=False)
class Pass:
    """One epoch, or its rest after *state*: *delivered* of its batches have been taken, after *before* earlier ones.

    Without a plan, *keys* is what a state says of the keys in them.
    """

    epoch: int
    world: World
    plan: PlannedEpoch | None = None
    state: Mapping[str, Any] | None = None
    before: int = 0
    delivered: int = 0
    keys: dict[str, Any] = field(default_factory=lambda: {"keys": 0})
    _made: int = 0
    _crc: int = 0  # of the batches made so far
    _ahead: deque[int] = field(default_factory=deque)  # the same at each batch that is made, and not yet delivered

    @property
    def of(self) -> PassOf:
        """This pass, for the ledger."""
        return PassOf(self.epoch, self.plan.before if self.plan else 0, self.world.rank, self.world.world_size)

    def count(self, ledger: Ledger, tally: Tally) -> None:
        """Add the counts of samples of this pass to a *ledger*."""
        ledger.add(tally.within(self.of))

    @property
    def passed(self) -> int:
        """The batches at its beginning that were already delivered, and are made again only to be skipped."""
        return self.state["delivered"] if self.state and self.plan is None else 0

    def begin(self) -> None:
        """Begin with what the state says."""
        self.delivered = self.passed
        if self.passed and self.state:
            self.keys = {name: self.state[name] for name in ("keys", "last") if name in self.state}

    def is_new(self, crc: int, batch: Any) -> bool:
        """Take note of a batch, of samples whose keys have *crc*; return False if it was delivered before the state.

        Raises StateError if the batches before the state have become others.
        """
        if self.plan is not None:
            return True
        self._made += 1
        self._crc = crc_of([str(crc)], self._crc)
        if self._made > self.passed:
            self._ahead.append(self._crc)
        elif self._made == self.passed and self.state:
            check_replayed(self.state, self._crc, batch)
        return self._made > self.passed

    def deliver(self) -> None:
        """Count a batch as delivered."""
        self.delivered += 1
        if self.plan is None:
            self.keys = {"keys": self._ahead.popleft()}

    def end(self) -> None:
        """Raise StateError if the epoch has ended before its state."""
        if self._made < self.passed and self.state:
            check_replayed(self.state, None, None)


class Passes:
    """The passes of one loader over the batches of *maker*.

    The state of a planned stream is valid for any number of ranks and workers. Other states are replayed, which
    requires the same *topology*: everything else that the order of the batches depends on.

    With *steps* a pass over the loader is that many batches, continuing through the epochs: *number* is the next or
    current pass, and *step* the number of its batches so far.
    """

    def __init__(self, maker: BatchMaker, steps: int | None = None, **topology: int):
        self.maker = maker
        self.stream: Any = maker.stream
        self.topology = topology
        self.steps: int | None = None if steps is None else whole_number("steps", steps, 1)
        self.number: int = 0
        self.step: int = 0
        self.has_jumped: bool = False  # whether it has, since a pass began
        self._current: Pass | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._announced: int | None = None
        self._ahead = 0  # epochs, in the trainer's count, which may restart when ours resumes
        self._was_told = False  # whether the length was requested before a state was loaded

    @property
    def world(self) -> World:
        """The rank to deliver to: the stream's, or else that of this process."""
        return World.detect() if self.stream.is_bare else self.stream.world

    def begin(self) -> Pass:
        """Begin the next epoch, or the rest of a loaded state's epoch."""
        this = self._next()
        if self.stream._world is None:
            this.world.check_announced(this.epoch)
        if this.plan is not None:  # here, since workers that begin again in each epoch would warn in each
            self.stream.source.warn_of_few_blocks(this.plan, this.world)
        elif self.steps is None and isinstance(self.stream.source, ShardSource):
            self.stream.source.check_steps(this.world)
        self._resumed, self.has_jumped = None, False
        epoch = self.stream.epochs.begin(World(), this.epoch if this.state else None)
        if epoch != this.epoch:  # a pass in another thread has begun meanwhile
            this = self._fresh(epoch)
        if this.state and self._announced is not None:
            self._ahead = this.epoch - self._announced
        this.begin()
        self._current = this
        return this

    def loop(self, this: Pass) -> EpochLoop:
        """Return the loop over the batches of a planned pass; the caller runs it, then audits its tally."""
        maker, plan = self.maker, this.plan
        assert plan is not None
        shares = maker.shares(plan, this.world.rank)
        loop: EpochLoop = self.stream.source.loop(plan, this.world, shares, of=this.of)
        return loop

    def samples(self, this: Pass) -> Generator[Any, None, None]:
        """Return the samples of a pass without a plan, also those before its state."""
        version = version_of(this.state, self.stream.source)
        samples: Generator[Any, None, None] = self.stream.iterate(this.epoch, this.world, version)
        return samples

    def new_samples(self, this: Pass) -> Iterator[list[Any]]:
        """Yield the samples of each batch of a pass without a plan, after those before its state."""
        samples = self.samples(this)
        while batch := list(islice(samples, self.maker.size)):
            if this.is_new(crc_of_results(batch), ()):
                yield batch

    def deliver(self, this: Pass, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield the *batches* of a pass, each with whether it is the last.

        The last comes after *batches* has ended, so that a consumer that counts batches and requests no more has an
        audited epoch. If their number is unknown, every batch waits for the next one.
        """
        count = None if this.plan is None else len(self.maker.shares(this.plan, this.world.rank))
        held: list[Any] = []
        for number, batch in enumerate(batches, 1):
            if held:
                this.deliver()
                yield held.pop(), False
            if count is None or number == count:
                held.append(batch)
            else:
                this.deliver()
                yield batch, False
        this.end()
        self._end(this)
        for batch in held:
            yield batch, True

    def _end(self, this: Pass) -> None:
        """From now on states belong to the next epoch, unless another pass has begun."""
        if self._current is this:
            self._current = None
            if self.stream.epochs.next <= this.epoch:  # it was announced while it was running
                self.stream.set_epoch(this.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, or the rest of it after a loaded state; later passes count from there.

        With *steps* an epoch is that many batches, so several may be parts of one epoch of the dataset.
        """
        epoch = whole_number("epoch", epoch, 0)
        if self.steps is not None:
            if epoch != self.number:
                self._go_to(epoch, self.steps)
        elif self._resumed is None or self._resumed["epoch"] != epoch:
            self._current = self._resumed = None
            self.stream.set_epoch(epoch)

    def _go_to(self, number: int, steps: int) -> None:
        """Make the next pass this one of *steps* batches; without indexes it begins with that epoch."""
        self._current = self._resumed = None
        self.number, self.step, self.has_jumped = number, 0, True
        plan = self.maker.plan(0, self.world.world_size)
        count = 0 if plan is None else len(self.maker.shares(plan, self.world.rank))
        epoch, batch = divmod(number * steps, count) if count else (number, 0)
        self.stream.set_epoch(epoch)
        if batch:
            self._current = self._next()
            self._current.delivered = batch
            self.go_on()

    def count_step(self) -> bool:
        """Count a batch of a pass of *steps*; return whether it is the last."""
        self.step += 1
        if self.step < (self.steps or 0):
            return False
        self.number, self.step = self.number + 1, 0
        return True

    def go_on(self) -> None:
        """Make the next pass begin after the delivered batches of the one that was left."""
        if self._current is not None:
            self._resumed = self.state_dict()
            self._current = None

    def leave(self) -> None:
        """End a pass of *steps* before its last batch; the next one begins after it."""
        self.number, self.step = self.number + 1, 0
        self.go_on()

    def announce(self, epoch: int) -> None:
        """Set the epoch of the next or current pass, as a trainer counts, unless a state is loaded.

        Raises StateError if the trainer would stop before the end of the rest, because it counts to a shorter length.
        """
        if self.steps is not None:
            self.set_epoch(epoch)
            return
        if self._announced is None and not self.maker.is_planned:
            log.warning(
                "without indexes a loader has no length, and Lightning then saves states one batch ahead: "
                "a run resumed in mid-epoch misses that batch; index the shards with `tarindex`"
            )
        self._announced = epoch
        if self._resumed is None:
            epoch += self._ahead
            if self._current is None or self._current.epoch != epoch:
                self._current = None
            self.stream.set_epoch(epoch)
        elif self._was_told:
            self._check_length(self._next())

    def _check_length(self, this: Pass) -> None:
        """Raise StateError if a trainer that counts to our length would stop before the end of *this*."""
        batches = 0 if this.plan is None else this.before + len(self.maker.shares(this.plan, this.world.rank))
        if this.plan is not None and batches > len(self):
            raise StateError(
                f"the trainer counts to {len(self)} batches, but the epoch has {batches} with those before the state; "
                "resume with the ranks and the batch size of the state"
            )

    def __len__(self) -> int:
        if self.steps is not None:
            return self.steps
        plan = self.maker.plan(0, self.world.world_size)
        if plan is None:
            raise TypeError("only planned epochs have a length; index the shards with `tarindex`")
        self._was_told = self._was_told or self._resumed is None
        return len(self.maker.shares(plan, self.world.rank))

    def state_dict(self) -> dict[str, Any]:
        """Return, for JSON, the progress of the epoch; for planned epochs it is the same on every rank."""
        if self._resumed is not None:
            return dict(self._resumed)
        this = self._current or self._next()
        version = version_of(this.state, self.stream.source)
        source = self.stream.source.as_of(version)
        state = {"version": version, "digest": source.digest}
        if self.steps is not None:
            state |= {"pass": self.number, "step": self.step}
        if this.plan is not None:
            taken = min(this.delivered * self.maker.size * this.world.world_size, len(this.plan))
            return state | this.plan.state(taken) | {"batches": this.before + this.delivered}
        state |= {"order": list(source.order), "epoch": this.epoch, "delivered": this.delivered} | this.keys
        return state | self._replay_settings(this.world)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass deliver the rest of the epoch after *state*; raise StateError if it does not match."""
        source = self.stream.source
        is_planned = self.maker.is_planned
        check_state(state, source, ["epoch"] if is_planned else ["epoch", "delivered"])
        if is_planned and "world" in state:
            raise StateError("the state is of a Stream or ShardDataset, and this is a loader")
        world = self.world
        if self.maker.plan(0, world.world_size, state) is None:
            check_order(state, source)
            if state["delivered"]:
                check_ordered((*source.ops, *self.stream.ops))
            for name, value in self._replay_settings(world).items():
                if state.get(name) != value:
                    raise StateError(
                        "without indexes a state is replayed, which requires the same settings: "
                        f"{name} {state.get(name)}, not {value}"
                    )
        elif type(batches := state.get("batches", 0)) is not int or batches < 0:
            raise StateError(f"the state has batches {batches!r}")
        for name in ("pass", "step"):
            if type(number := state.get(name, 0)) is not int or number < 0:
                raise StateError(f"the state has {name} {number!r}")
        self.number = state.get("pass", 0)
        self.step = state.get("step", 0)
        self.has_jumped = True
        self._resumed = dict(state)

    def _next(self) -> Pass:
        """Return the pass that would begin now."""
        world, state = self.world, self._resumed
        if state is None:
            return self._fresh(self.stream.epochs.next)
        plan = self.maker.plan(state["epoch"], world.world_size, state)
        return Pass(state["epoch"], world, plan, state, 0 if plan is None else self._before(plan, state))

    def _fresh(self, epoch: int) -> Pass:
        """Return a pass over a whole epoch."""
        world = self.world
        return Pass(epoch, world, self.maker.plan(epoch, world.world_size))

    def _before(self, plan: PlannedEpoch, state: Mapping[str, Any]) -> int:
        """Return the number of batches before *state*; if an earlier release did not save it, compute it."""
        if "batches" in state:
            return state["batches"]
        whole = self.stream.source.plan(state["epoch"], plan.ranks)
        return -(-(whole.total - plan.total) // (self.maker.size * plan.ranks))

    def _replay_settings(self, world: World) -> dict[str, int]:
        return {"batch_size": self.maker.size, "rank": world.rank, "ranks": world.world_size} | self.topology


class ResumableLoader(Generic[BatchType]):
    """The base of the loaders: iterates over the *passes*, with their ledger, epochs, length and state.

    A subclass defines in ``make_batches`` how the batches of a pass are made. An epoch begins when its first batch is
    requested, since some trainers call ``iter`` and do not use it.
    """

    passes: Passes
    _under_way: Generator[tuple[Any, bool], None, None] | None = None  # over several passes, with ``steps=``
    _maker: ResumableLoader  # the loader of these batches

    #: Where the current or the last iteration spends its time.
    monitor: Monitor = Monitor()

    #: Read by accelerate: ``prepare`` leaves the loader unchanged, and ``save_state`` saves its state.
    _is_accelerate_prepared = use_stateful_dataloader = True
    #: Whether the last batch has been delivered, which tells accelerate to apply the gradients.
    end_of_dataloader: bool = False
    #: The samples of the last batch over all ranks, for accelerate: unknown, since repeats may be anywhere in it.
    remainder = -1
    batch_sampler = None

    def make_batches(self, this: Pass) -> Generator[Any, None, None]:
        """Yield the batches of a pass; audit it after the last."""
        raise NotImplementedError

    def finished(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield *batches*, as a maker made them, in the form in which they are delivered: tensors, or on a device."""
        return batches

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            words = no_attribute(type(self).__name__, name)
            if name in vars(Stream) and not name.startswith("_"):
                words += f": ops come before the loader, as ShardDataset(urls).{name}(...)"
            raise AttributeError(words, name=name, obj=self)

    def __iter__(self) -> Iterator[BatchType]:
        return closed_at_exit(self._iterate())

    def _iterate(self) -> Generator[Any, None, None]:
        batches = self._epoch() if self.passes.steps is None else self._steps()
        self.end_of_dataloader = False
        with _known_to_accelerate(self), closing(batches):
            for batch, is_last in self.measured(batches):
                self.end_of_dataloader = is_last
                yield batch

    def measured(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield *batches*; a new ``monitor`` counts how long they are waited for, and how long they are used."""
        self.monitor = monitor = type(type(self).monitor)()
        asked, before = perf_counter(), traffic.so_far()
        for batch in batches:
            taken, now = perf_counter(), traffic.so_far()
            monitor.waited += taken - asked
            monitor.traffic += now - before
            yield batch
            asked, before = perf_counter(), now
            monitor.consumed += asked - taken

    def _epoch(self) -> Generator[tuple[Any, bool], None, None]:
        """Yield the batches of the pass that begins now, each with whether it is the last."""
        this = self.passes.begin()
        with closing(self.make_batches(this)) as batches:
            yield from self.passes.deliver(this, batches)

    def _steps(self) -> Generator[tuple[Any, bool], None, None]:
        """Yield the batches of a pass of ``steps=``; their source stays open for the next pass."""
        passes, is_last = self.passes, False
        if self._under_way is not None and passes.has_jumped:
            self._under_way.close()
            self._under_way = None
        if self._under_way is None:
            # A copy of the loader, which does not refer to this one: in a reference cycle the garbage collector would
            # find workers before the object that ends them, and torch would wait 5 s for each.
            self._maker = copy.copy(self)
            self._under_way = self._maker._endless()
        under_way, self._maker.monitor = self._under_way, self.monitor
        try:
            while not is_last:
                batch, _ = next(under_way)
                is_last = passes.count_step()
                yield batch, is_last
        finally:
            if not is_last:
                passes.leave()
                under_way.close()
                self._under_way = None

    def _endless(self) -> Generator[tuple[Any, bool], None, None]:
        """Yield the batches of one epoch after the other."""
        while True:
            is_empty = True
            with closing(self._epoch()) as batches:
                for batch in batches:
                    is_empty = False
                    yield batch
            if is_empty:
                raise SampleError("steps= asks for batches, and an epoch of this dataset has none")

    @cached_property
    def sampler(self) -> Any:
        """The object through which Lightning sets its epoch."""
        return SimpleNamespace(set_epoch=self.passes.announce)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the dataset, over all workers."""
        return self.passes.stream.ledger

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, or its rest after a loaded state; later iterations count from there."""
        self.passes.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of batches of a whole epoch on this rank, even after loading a state in mid-epoch."""
        return len(self.passes)

    def __bool__(self) -> bool:
        return True  # even without a length

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} is iterated, not indexed: it makes its batches without a DataLoader")

    def state_dict(self) -> dict[str, Any]:
        """Return, for JSON, the progress of the epoch; for indexed shards it is the same on every rank."""
        return self.passes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration deliver the rest after *state*; raise StateError if the state does not match."""
        self.passes.load_state_dict(state)


@contextmanager
def _known_to_accelerate(loader: ResumableLoader) -> Iterator[None]:
    """Register *loader* with accelerate, if imported, while it is iterated."""
    state = sys.modules.get("accelerate.state")
    if state is None:
        yield
        return
    state.GradientState()._add_dataloader(loader)
    try:
        yield
    finally:
        state.GradientState()._remove_dataloader(loader)
