"""One rank's run of a loader, here or in a separate process: the batches of each pass, and the state at each stop."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tarshards.testing.setups import Setup, numbers_of

Stop = tuple[int, int]  #: whole passes, and batches of the next one
Batch = tuple[int, ...]  #: the numbers of its samples

#: The environment variables by which launchers pass the rank to a process.
VARIABLES = {"RANK": "rank", "LOCAL_RANK": "rank", "WORLD_SIZE": "ranks", "LOCAL_WORLD_SIZE": "ranks"}
MASTER = "127.0.0.1"  #: the address at which the processes of ranks find each other


@dataclass
class Run:
    """The output of a loader for a rank: the batches of each pass, and its pickled state at each stop.

    *ending* says why the run ended early ("refused" a state, "raised" an error, "hung", or "endless"), *words* give
    details.
    """

    passes: list[list[Batch]] = field(default_factory=list)
    states: dict[Stop, bytes] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  #: len(loader) before each pass, if the loader has a length
    ending: str = ""
    words: str = ""

    def samples(self, number: int) -> list[int]:
        """The samples of a pass in their order."""
        return [sample for batch in self.passes[number] for sample in batch]

    def after_first(self) -> Run:
        """The run without its first pass."""
        states = {(passes - 1, batches): state for (passes, batches), state in self.states.items() if passes}
        return replace(self, passes=self.passes[1:], states=states, lengths=self.lengths[1:])


class _LateError(BaseException):
    """A run has exceeded its time limit; not an Exception, since a loader might catch that."""


def less_than_ranks(setup: Setup) -> int:
    return setup.ranks - 1


def own_states(states: list[Any], ranks: int) -> list[Any]:
    """Return for each rank its own state, for a new rank that of rank 0."""
    return [states[rank if rank < len(states) else 0] for rank in range(ranks)]


@dataclass(frozen=True)
class Tested:
    """A loader under test.

    ``make_loader(setup)`` returns a new loader for a ``Setup``: each iteration over it is an epoch, and its
    ``state_dict()`` is loaded into another by ``load_state_dict(state)``.

    - *read* returns the numbers of the samples in a batch (default: ``numbers_of``).
    - *tail* says how the loader treats samples that do not divide evenly: "exact" delivers each once; "pad" repeats
      some and "drop" leaves some out, so that all ranks take the same number of steps. These are at most *extra(setup)*
      samples in an epoch (default: one less than the number of ranks).
    - *steady* names the properties that do not affect the order of a rank's samples: "workers", "batch_size" or both.
    - *states_for(states, ranks)* returns the states to load on *ranks* ranks, given those of all ranks before (default:
      each rank loads its own, a new rank that of rank 0).
    - *processes*: run all ranks at the same time, each in a separate process, with MASTER_ADDR and MASTER_PORT and the
      default start method of ``multiprocessing``. Otherwise ranks run one after the other in this process. Both set
      RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
    - *limit*: the seconds after which a run is taken to hang.
    """

    make_loader: Callable[[Setup], Any]
    read: Callable[[Any], list[int]] = numbers_of
    tail: str = "exact"
    extra: Callable[[Setup], int] = less_than_ranks
    steady: Sequence[str] = ()
    states_for: Callable[[list[Any], int], list[Any]] = own_states
    processes: bool = False
    limit: float = 30

    def __post_init__(self) -> None:
        if self.tail not in ("exact", "pad", "drop"):
            raise ValueError(f"tail must be exact, pad or drop, not {self.tail!r}")
        if wrong := set(self.steady) - {"workers", "batch_size"}:
            raise ValueError(f"steady names workers and batch_size, not {', '.join(sorted(wrong))}")

    def is_steady(self, old: Setup, new: Setup) -> bool:
        """Whether the loader promises the same order of a rank's samples in both setups."""
        changed = {name for name in ("ranks", "workers", "batch_size") if getattr(old, name) != getattr(new, name)}
        return changed <= set(self.steady)

    def amiss(self, due: Counter[int], came: Counter[int], setup: Setup) -> tuple[str, tuple[int, ...]] | None:
        """Return the samples of an epoch that are "lost" or "repeated" contrary to the promise, or None."""
        lost, repeated = due - came, came - due
        if self.tail == "pad":  # other samples may be repeated than in the epoch to compare with
            lost = Counter({sample: times for sample, times in lost.items() if not came[sample]})
        if self.tail == "drop":  # samples that are dropped in the epoch to compare with may come
            repeated = Counter({sample: times for sample, times in repeated.items() if due[sample]})
        for kind, found, tail in ("lost", lost, "drop"), ("repeated", repeated, "pad"):
            if found.total() > (self.extra(setup) if self.tail == tail else 0):
                return kind, tuple(sorted(found.elements()))
        return None

    def run(self, setup: Setup, passes: int, states: Sequence[bytes] | None = None) -> list[Run]:
        """Run all ranks for some passes, each from its state; return their runs."""
        given: list[Any] = [None] * setup.ranks
        if states is not None:
            given = self.states_for([pickle.loads(state) for state in states], setup.ranks)
        setups = [setup.with_entry("rank", rank) for rank in range(setup.ranks)]
        if self.processes:
            return self._in_processes(setups, passes, given)
        return [self.in_rank(each, passes, state) for each, state in zip(setups, given)]

    def in_rank(self, setup: Setup, passes: int, state: Any) -> Run:
        """Run one rank in this process."""
        run = Run()
        try:
            with _as_rank(setup), _limited(self.limit):
                self._take(run, setup, passes, state)
        except _LateError:
            run.ending, run.words = "hung", f"no end within {self.limit:g} s"
        except Exception as error:
            run.ending, run.words = run.ending or "raised", f"{type(error).__name__}: {error}"
        return run

    def _take(self, run: Run, setup: Setup, passes: int, state: Any) -> None:
        loader = self.make_loader(setup)
        if state is not None:
            run.ending = "refused"
            loader.load_state_dict(state)
            run.ending = ""
        run.states[0, 0] = pickle.dumps(loader.state_dict())
        for number in range(passes):
            run.passes.append(batches := [])
            if hasattr(loader, "__len__"):
                run.lengths.append(_length(loader))
            for batch in loader:
                batches.append(tuple(self.read(batch)))
                run.states[number, len(batches)] = pickle.dumps(loader.state_dict())
                if len(batches) > 4 * setup.total + 16:  # more than any pass has
                    run.ending, run.words = "endless", f"{len(batches)} batches, and more to come"
                    return
            run.states[number + 1, 0] = pickle.dumps(loader.state_dict())

    def _in_processes(self, setups: list[Setup], passes: int, states: list[Any]) -> list[Run]:
        runs, children, port = [], [], free_port()
        for setup, state in zip(setups, states):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            child = multiprocessing.Process(target=_send, args=(self, sender, setup, passes, state, port))
            child.start()
            sender.close()
            children.append((child, receiver))
        until = time.monotonic() + 2 * self.limit  # each process limits itself, unless it is stuck in C
        for child, receiver in children:
            try:
                late = not receiver.poll(max(0, until - time.monotonic()))
                runs.append(Run(ending="hung", words="no answer") if late else receiver.recv())
            except EOFError:
                child.join()
                runs.append(Run(ending="raised", words=f"the process died with exit code {child.exitcode}"))
            receiver.close()
            if runs[-1].ending == "hung":
                child.kill()
            child.join()
        return runs


def free_port() -> int:
    """Return a free port for the communication of a world's ranks."""
    with socket.socket() as server:
        server.bind((MASTER, 0))
        port: int = server.getsockname()[1]
        return port


def _send(tested: Tested, sender: Any, setup: Setup, passes: int, state: Any, port: int) -> None:
    """Run one rank; the main function of its process."""
    os.environ |= {"MASTER_ADDR": MASTER, "MASTER_PORT": str(port)}
    sender.send(tested.in_rank(setup, passes, state))
    sender.close()


def _length(loader: Any) -> int:
    """The loader's length, or -1 if it has none."""
    try:
        return len(loader)
    except TypeError:
        return -1


@contextmanager
def _as_rank(setup: Setup) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update({name: str(getattr(setup, entry)) for name, entry in VARIABLES.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _LateError after some seconds: in the main thread, which alone handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _LateError

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
