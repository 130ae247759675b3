"""What all loaders share: which epoch a pass delivers, how far it has come, and the state to resume it from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarshards.epoch.world import World
from tarshards.errors import StateError
from tarshards.loaders.batches import BatchMaker
from tarshards.stream.sources import VERSION, check_order, check_state

if TYPE_CHECKING:
    from tarshards.epoch.plan import PlannedEpoch
    from tarshards.samples.ledger import Ledger


@dataclass(eq=False)
class Pass:
    """One epoch, or what *state* says is left of one: *delivered* batches of it have been taken."""

    epoch: int
    world: World
    plan: PlannedEpoch | None = None
    state: Mapping[str, Any] | None = None
    delivered: int = 0

    @property
    def passed(self) -> int:
        """The batches at its beginning that were delivered before, and are made again only to be passed over."""
        return self.state["delivered"] if self.state and self.plan is None else 0


class Passes:
    """The passes of one loader over the batches of *maker*.

    The state of a planned stream holds on any number of ranks and workers. That of another is replayed, which requires
    the same *topology*: what else the order of the batches depends on.
    """

    def __init__(self, maker: BatchMaker, **topology: int):
        self.maker, self.stream, self.topology = maker, maker.stream, topology
        self._current: Pass | None = None
        self._resumed: Mapping[str, Any] | None = None

    def begin(self) -> Pass:
        """Begin the next epoch, or what a loaded state says is left of its own."""
        state, self._resumed = self._resumed, None
        world = self.stream.world
        epoch = self.stream.epochs.begin(World(), state["epoch"] if state else None)
        self._current = Pass(epoch, world, self.maker.plan(epoch, world.world_size, state), state)
        self._current.delivered = self._current.passed
        return self._current

    def end(self, this: Pass) -> None:
        """Say that all batches were taken; what is loaded or saved now is of the epoch after."""
        if self._current is this:
            self._current = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be *epoch*, from its beginning; those after it count on."""
        self._current = self._resumed = None
        self.stream.set_epoch(epoch)

    def __len__(self) -> int:
        current = self._current if self._resumed is None else None
        world = current.world if current else self.stream.world
        plan = current.plan if current else self.maker.plan(0, world.world_size, self._resumed)
        if plan is None:
            raise TypeError("only planned epochs have a length; index the shards with `tarindex`")
        return len(self.maker.shares(plan, world.rank))

    def state_dict(self) -> dict[str, Any]:
        """Return, for JSON, what has been delivered of the epoch; for planned ones it is the same on every rank."""
        if self._resumed is not None:
            return dict(self._resumed)
        this = self._current
        if this is None:
            world, epoch = self.stream.world, self.stream.epochs.next
            this = Pass(epoch, world, self.maker.plan(epoch, world.world_size))
        state = {"version": VERSION, "digest": self.stream.source.digest}
        if this.plan is not None:
            taken = this.delivered * self.maker.size * this.world.world_size
            return state | this.plan.state(min(taken, len(this.plan)))
        state |= {"order": list(self.stream.source.order), "epoch": this.epoch, "delivered": this.delivered}
        return state | self._place(this.world)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass deliver what is left of the epoch after *state*; raise StateError if it does not fit."""
        check_state(state, self.stream.source.digest, ("epoch",))
        world = self.stream.world
        if self.maker.plan(0, world.world_size, state) is None:
            check_order(state, self.stream.source.order)
            for name, value in self._place(world).items():
                if state.get(name) != value:
                    raise StateError(
                        "without indexes a state is replayed, which requires what it was saved with: "
                        f"{name} {state.get(name)}, not {value}"
                    )
        self._resumed = dict(state)

    def _place(self, world: World) -> dict[str, int]:
        return {"batch_size": self.maker.size, "rank": world.rank, "ranks": world.world_size} | self.topology


class ResumableLoader:
    """What the loaders have in common: the ledger, the epochs, the length and the state of their *passes*."""

    passes: Passes

    @property
    def ledger(self) -> Ledger:
        """The ledger of the dataset, over all workers."""
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
        """Return, for JSON, what has been delivered of the epoch; for indexed shards it is the same on every rank."""
        return self.passes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration deliver what is left after *state*; raise StateError if it does not fit."""
        self.passes.load_state_dict(state)
