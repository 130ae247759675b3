"""The passes of a loader over a stream: which epoch, how far it has been delivered, and the state to resume it from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from tarshards.epoch.world import World
from tarshards.errors import StateError
from tarshards.stream.sources import VERSION, PlannedSource, check_order, check_state
from tarshards.stream.stream import Stream

if TYPE_CHECKING:
    from tarshards.epoch.plan import EpochPlan
    from tarshards.samples.ledger import Ledger


class Shares(Sequence[range]):
    """Parts of *positions*, of *size* of them each, that begin at *starts*; there may be many millions.

    >>> shares = Shares(range(1, 20, 2), 4, range(0, 10, 4))
    >>> [list(share) for share in shares[1:]]
    [[9, 11, 13, 15], [17, 19]]
    """

    def __init__(self, positions: range, size: int, starts: range):
        self.positions, self.size, self.starts = positions, size, starts

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> range: ...
    @overload
    def __getitem__(self, number: slice) -> Shares: ...
    def __getitem__(self, number: int | slice) -> range | Shares:
        if isinstance(number, slice):
            return Shares(self.positions, self.size, self.starts[number])
        start = self.starts[number]
        return self.positions[start : start + self.size]


@dataclass(eq=False)
class Pass:
    """One epoch, or what *state* says is left of one: *delivered* batches of it have been taken."""

    epoch: int
    world: World
    plan: EpochPlan | None = None
    state: Mapping[str, Any] | None = None
    delivered: int = 0

    @property
    def passed(self) -> int:
        """The batches at its beginning that were delivered before, and are made again only to be passed over."""
        return self.state["delivered"] if self.state and self.plan is None else 0


class Passes:
    """The passes of one loader, in batches of *size* samples a rank.

    Of a planned stream a state holds on any number of ranks and workers; of another it is replayed, where *topology*
    (what else the order of the batches depends on) is the same.
    """

    def __init__(self, stream: Stream, size: int, **topology: int):
        if size < 1:
            raise ValueError(f"a batch holds at least 1 sample, not {size}")
        self.stream, self.size, self.topology = stream, size, topology
        self.is_planned = isinstance(stream._source, PlannedSource)
        self._current: Pass | None = None
        self._resumed: Mapping[str, Any] | None = None

    def begin(self) -> Pass:
        """Begin the next epoch, or what a loaded state says is left of its own."""
        state, self._resumed = self._resumed, None
        world = self.stream._here()
        epoch = self.stream._epochs.begin(World(), state["epoch"] if state else None)
        self._current = Pass(epoch, world, self.plan(epoch, world, state), state)
        self._current.delivered = self._current.passed
        return self._current

    def end(self, this: Pass) -> None:
        """Say that all batches were taken; what is loaded or saved now is of the epoch after."""
        if self._current is this:
            self._current = None

    def plan(self, epoch: int, world: World, state: Mapping[str, Any] | None = None) -> EpochPlan | None:
        """Return the plan of an epoch, or of what *state* says is left of it; None where there is none."""
        return self.stream._source.plan(epoch, world.world_size, state) if self.is_planned else None

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be *epoch*, from its beginning; those after it count on."""
        self._current = self._resumed = None
        self.stream.set_epoch(epoch)

    def __len__(self) -> int:
        current = self._current if self._resumed is None else None
        world = current.world if current else self.stream._here()
        plan = current.plan if current else self.plan(0, world, self._resumed)
        if plan is None:
            raise TypeError("only planned epochs have a length; they need indexes, which tarindex makes")
        return len(self.shares(plan, world))

    def shares(self, plan: EpochPlan, world: World) -> Shares:
        """The positions of each batch of one rank, whichever worker makes it."""
        positions = range(world.rank, len(plan), world.world_size)
        return Shares(positions, self.size, range(0, len(positions), self.size))

    def state_dict(self) -> dict[str, Any]:
        """Say, for JSON, what has been delivered of the epoch; of planned ones it is the same on every rank."""
        if self._resumed is not None:
            return dict(self._resumed)
        this = self._current
        if this is None:
            world = self.stream._here()
            this = Pass(self.stream._epochs.next, world, self.plan(self.stream._epochs.next, world))
        state = {"version": VERSION, "digest": self.stream._source.digest}
        if this.plan is not None:
            return state | this.plan.state(min(this.delivered * self.size * this.world.world_size, len(this.plan)))
        state |= {"order": list(self.stream._source.order), "epoch": this.epoch, "delivered": this.delivered}
        return state | self._place(this.world)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass be what *state* says is left of its epoch; raise StateError if it does not fit."""
        check_state(state, self.stream._source.digest, ("epoch",))
        world = self.stream._here()
        if self.plan(0, world, state) is None:
            check_order(state, self.stream._source.order)
            for name, value in self._place(world).items():
                if state.get(name) != value:
                    raise StateError(
                        "without indexes, which tarindex makes, a state is replayed as it was made: "
                        f"with {name} {state.get(name)}, not {value}"
                    )
        self._resumed = dict(state)

    def _place(self, world: World) -> dict[str, int]:
        return {"batch_size": self.size, "rank": world.rank, "ranks": world.world_size} | self.topology


class ResumableLoader:
    """What the loaders have in common: the account, the epochs, the length and the state of their *passes*."""

    passes: Passes

    @property
    def ledger(self) -> Ledger:
        """The account of the dataset, over all workers."""
        return self.passes.stream.ledger

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be *epoch*, from its beginning; those after it count on."""
        self.passes.set_epoch(epoch)

    def __len__(self) -> int:
        """The batches that the iteration under way delivers to this rank, or else the next one."""
        return len(self.passes)

    def __bool__(self) -> bool:
        return True  # without a length too

    def state_dict(self) -> dict[str, Any]:
        """Say, for JSON, what has been delivered of the epoch; of indexed shards it is the same on every rank."""
        return self.passes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration be what *state* says is left of its epoch; raise StateError if it does not fit."""
        self.passes.load_state_dict(state)
