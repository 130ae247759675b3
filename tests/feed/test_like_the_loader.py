"""What a ShardLoader or ArrayLoader does on an iterator, an error or a signal, a RemoteLoader of it does too."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import feed_specs
import pytest
from fed import feeders_of, remote
from forked import run_in_threads
from interrupts import interrupted_at
from soak import rounds
from with_torch import needs_torch

from tarshards import OpenError, RemoteLoader, SampleError

pytest.importorskip("zmq")

LOADERS = ["trapped_arrays", pytest.param("trapped_tensors", marks=needs_torch)]


@pytest.fixture(scope="module")
def addresses(dataset) -> Iterator[Callable[[str], str]]:
    """Return the address of a feeder of a loader, which serves the tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(feed_specs.DATA, dataset)
        running: dict[str, Any] = {}

        def address(spec: str) -> str:
            if spec not in running:
                running[spec] = feeders_of(spec)
                running[spec].feeders = running[spec].__enter__()
            return running[spec].feeders[0].address

        yield address
        for each in running.values():
            each.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def trap(monkeypatch) -> SimpleNamespace:
    """What the loaders' function does with sample 5 of a shard; local loader and feeders are in this process."""
    monkeypatch.setattr(feed_specs, "TRAP", SimpleNamespace(spring=lambda: None))
    return feed_specs.TRAP


def both(spec: str, addresses: Callable[[str], str], how: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """Return the results of *how* for the loader and for a RemoteLoader of it."""
    local = how(getattr(feed_specs, spec)())
    with remote(spec, addresses(spec), **options) as loader:
        return local, how(loader)


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["__key__"]]


def ended(loader: Any) -> tuple[Any, ...]:
    """The state, and the counts of all passes so far."""
    ledger = loader.ledger
    counts = ledger.samples, ledger.failed, len(ledger.quarantined), ledger.unaudited
    return loader.state_dict(), counts


def kept(loader: Any) -> Any:
    iterator = iter(loader)
    first = keys([next(iterator)])
    return first, keys(loader), keys(iterator), ended(loader)


def several_kept(loader: Any) -> Any:
    iterators = [iter(loader) for _ in range(4)]
    first = [keys(islice(each, 2)) for each in iterators]
    return first, keys(loader), [keys(each) for each in reversed(iterators)], ended(loader)


def zipped(loader: Any) -> Any:
    return [keys(pair) for pair in zip(loader, loader)], ended(loader)


def nested(loader: Any) -> Any:
    return [(keys([outer]), keys(islice(iter(loader), 2))) for outer in islice(iter(loader), 3)], ended(loader)


def left(loader: Any) -> Any:
    first = keys([next(iter(loader))])
    gc.collect()
    return first, keys(loader), ended(loader)


def closed(loader: Any) -> Any:
    iterator = iter(loader)
    first = keys(islice(iterator, 2))
    iterator.close()
    iterator.close()
    return first, next(iterator, None), loader.state_dict(), keys(loader), ended(loader)


def closed_before_it_began(loader: Any) -> Any:
    iterator = iter(loader)
    iterator.close()
    iter(loader)
    return next(iterator, None), loader.state_dict(), keys(loader), ended(loader)


def asked_after_the_end(loader: Any) -> Any:
    iterator = iter(loader)
    return keys(iterator), next(iterator, None), next(iterator, None), ended(loader)


def left_by_an_error(loader: Any) -> Any:
    found = []
    with suppress(KeyError):
        for batch in loader:
            found += keys([batch])
            if len(found) > 8:
                raise KeyError
    return found, keys(loader), ended(loader)


def thrown_into(loader: Any) -> Any:
    iterator = iter(loader)
    first = keys([next(iterator)])
    with pytest.raises(LookupError, match="mine"):
        iterator.throw(LookupError("mine"))
    return first, next(iterator, None), keys(loader), ended(loader)


def resumed_while_kept(loader: Any) -> Any:
    iterator = iter(loader)
    first = keys(islice(iterator, 3))
    loader.load_state_dict(loader.state_dict())
    return first, keys(loader), keys(iterator), ended(loader)


def told_of_an_epoch_while_kept(loader: Any) -> Any:
    iterator = iter(loader)
    first = keys([next(iterator)])
    loader.set_epoch(7)
    return first, keys(loader), keys(iterator), ended(loader)


def in_threads(loader: Any) -> Any:
    return sorted(run_in_threads(*[lambda: keys(loader)] * 3)), ended(loader)


def copied(loader: Any) -> Any:
    iterator = iter(loader)
    first = keys([next(iterator)])
    found = [first]
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        found.append(keys(other))
        getattr(other, "close", lambda: None)()
    return found, len(keys(loader))


HOW = [
    kept,
    several_kept,
    zipped,
    nested,
    left,
    closed,
    closed_before_it_began,
    asked_after_the_end,
    left_by_an_error,
    thrown_into,
    resumed_while_kept,
    told_of_an_epoch_while_kept,
    in_threads,
    copied,
]


@pytest.mark.parametrize("spec", LOADERS)
@pytest.mark.parametrize("how", HOW)
def test_iterators(spec, how, addresses):
    local, far = both(spec, addresses, how)
    assert far == local


# Errors.


class Mine(LookupError):
    """An error of a user."""


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Outside(BaseException):
    """An error that is no Exception."""


def noted() -> Exception:
    error = KeyError("k")
    error.add_note("a note")
    return error


def without_text() -> Exception:
    error = SampleError("s")
    error.url = error.key = 5  # type: ignore[assignment]
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("v"),
    "KeyError with a note": noted,
    "of a user": lambda: Mine("m"),
    "no text": NoText,
    "empty": AssertionError,
    "SystemExit": lambda: SystemExit(3),
    "SystemExit without a code": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "BaseException": lambda: Outside("o"),
    "StopIteration": lambda: StopIteration("s"),
    "MemoryError": lambda: MemoryError("m"),
    "RecursionError": lambda: RecursionError("r"),
    "OSError": lambda: FileNotFoundError(errno.ENOENT, "nothing", "f.txt"),
    "of five arguments": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
    "group": lambda: ExceptionGroup("g", [ValueError("v")]),
    "OpenError": lambda: OpenError("o", url="u", errno=errno.ENOSPC),
    "SampleError": lambda: SampleError("s", url="u", key="k", field="f", offset=3),
    "odd origin": without_text,
}
OTHER_CLASS = ("of a user", "no text", "BaseException", "group", "of five arguments")  # not made of a text alone
ORIGIN = ("url", "key", "field", "offset", "errno", "filename", "__notes__")


def until_an_error(loader: Any) -> Any:
    """Two passes, since the second must find what the first one left."""
    found = []
    for _ in range(2):
        loader.set_epoch(0)
        delivered: list[str] = []
        try:
            for batch in loader:
                delivered += keys([batch])
        except BaseException as error:
            found.append((delivered, ended(loader), error))
        else:
            pytest.fail("no error")
    return found


@pytest.mark.parametrize("spec", LOADERS)
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, spec, addresses, trap):
    def spring() -> None:
        raise ERRORS[name]()

    trap.spring = spring
    local, far = both(spec, addresses, until_an_error)
    for (*ours, expected), (*theirs, error) in zip(local, far, strict=True):
        assert theirs == ours
        assert isinstance(expected, type(error)), "the nearest class of Python or tarshards"
        assert type(error) is type(expected) or name in OTHER_CLASS
        text = re.sub(r" ?\(feeder tcp://[\d.:]+\)", "", str(error))
        assert name == "no text" or str(expected) in text or isinstance(expected, SystemExit)
        assert text != str(error) or name == "StopIteration", "it names the feeder"
        for each in ORIGIN if name != "odd origin" else ():
            assert getattr(error, each, None) == getattr(expected, each, None), each


# Signals.


def until_a_signal(loader: Any) -> Any:
    try:
        keys(loader)
    except BaseException as error:
        loader.set_epoch(1)
        return type(error), keys(loader), len(keys(loader))
    pytest.fail("no signal")


@pytest.mark.parametrize("spec", LOADERS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number, spec, addresses, trap, monkeypatch):
    """A signal comes while a batch is made, which a handler turns into an error; the next epochs are whole.

    It comes again with a later batch where it came while ZeroMQ freed a message, which loses the error.
    """
    lose = sys.unraisablehook

    def interrupt() -> None:
        trap.spring = lambda: None
        os.kill(os.getpid(), number)

    def end(*_: Any) -> None:
        raise Outside

    def come_again(lost: Any) -> None:
        if lost.exc_type is not Outside:
            lose(lost)
        else:
            trap.spring = interrupt  # not here, where it would be lost again

    monkeypatch.setattr(sys, "unraisablehook", come_again)
    before = signal.signal(number, end)
    results = []
    try:
        for how in (lambda: getattr(feed_specs, spec)(), lambda: remote(spec, addresses(spec)).__enter__()):
            trap.spring = interrupt
            loader = how()
            results.append(until_a_signal(loader))
            getattr(loader, "close", lambda: None)()
    finally:
        signal.signal(number, before)
    assert results[0] == results[1]
    assert results[0][0] is Outside


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(rounds(12)))
def test_an_interrupt_at_any_instruction(seed, addresses):
    """The next epoch is whole, and none of the connections is in the middle of something."""
    spec = "trapped_arrays"
    expected = keys(getattr(feed_specs, spec)())
    with remote(spec, addresses(spec)) as loader:
        if seed % 2:
            keys(loader)

        def begin() -> None:
            iterator = iter(loader)
            keys(islice(iterator, 2))
            iterator.close()

        with suppress(KeyboardInterrupt):
            interrupted_at(random.Random(seed).randrange(1, 70_000), begin)
        loader.set_epoch(0)
        assert keys(loader) == expected


def hang_until(event: threading.Event, trap: SimpleNamespace) -> None:
    def hang() -> None:
        trap.spring = lambda: None  # for others that make the batch
        event.wait()

    trap.spring = hang


@pytest.fixture
def released(trap) -> Iterator[threading.Event]:
    """The end of a wait for ever."""
    event = threading.Event()
    hang_until(event, trap)
    yield event
    event.set()


def test_a_batch_that_hangs_ends_the_training_after_the_timeout(released, addresses):
    spec = "trapped_arrays"
    with remote(spec, addresses(spec), timeout=0.5) as loader:
        iterator = iter(loader)
        with pytest.raises(OpenError, match=r"no feeder has made a batch for 0 s: tcp.*: answers, but does not make"):
            keys(iterator)
        released.set()
        assert next(iterator, None) is None
        loader.set_epoch(0)
        assert keys(loader) == keys(getattr(feed_specs, spec)())


def test_a_batch_that_hangs_at_one_feeder_is_made_by_another(released, addresses):
    spec = "trapped_arrays"
    with feeders_of(spec, threads=1) as (other,), remote(spec, addresses(spec), other.address, timeout=2) as loader:
        found = keys(loader)
        assert loader.monitor.again > 0
        released.set()
    assert found == keys(getattr(feed_specs, spec)())


def test_a_signal_ends_the_wait_for_a_batch_that_hangs(released, addresses):
    def end(*_: Any) -> None:
        raise Outside

    before = signal.signal(signal.SIGALRM, end)
    try:
        with remote("trapped_arrays", addresses("trapped_arrays")) as loader:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Outside):
                keys(loader)
    finally:
        signal.signal(signal.SIGALRM, before)


# Forks.


def forked(loader: Any) -> Any:
    """A forked process goes on, then its parent does."""
    first = keys(loader)
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        os._exit(len(keys(loader)))
    return first, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), keys(loader)


@pytest.mark.forks
def test_forks(addresses):
    local, far = both("trapped_arrays", addresses, forked)
    assert far == local
    assert local[1] == sum(feed_specs.COUNTS)


def test_it_need_not_be_closed(addresses):
    loader = RemoteLoader("feed_specs:trapped_arrays", addresses("trapped_arrays"), timeout=20)
    iterators = [iter(loader), iter(loader)]
    assert [len(keys([next(each)])) for each in iterators] == [feed_specs.SIZE] * 2
    del loader, iterators
    gc.collect()  # a warning of a socket that was not closed would be an error


def test_closed_during_a_pass(addresses):
    with remote("trapped_arrays", addresses("trapped_arrays")) as loader, closing(iter(loader)) as iterator:
        next(iterator)
        loader.close()
        with pytest.raises(OpenError, match="the connections to the feeders were closed during a pass"):
            keys(iterator)
        assert len(keys(loader)) == sum(feed_specs.COUNTS)
