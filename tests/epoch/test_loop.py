"""The loop over a planned epoch: what it counts of each part, where it ends or is left, whether it is ahead or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from tarshards import Ledger, Stream, World
from tarshards.epoch.loop import EpochLoop, Part, Shares
from tarshards.samples.ledger import PassOf

COUNT, SIZE = 20, 4


@pytest.fixture
def make_loop(make_uneven):
    """Return a function that returns a loop over 20 samples in parts of 4, and its ledger."""
    urls = make_uneven([12, 8])

    def make(**options: Any) -> tuple[EpochLoop, Ledger]:
        source = Stream.from_shards(urls, on_error=Ledger()).source
        plan = source.plan(0, 1)
        shares = Shares(range(len(plan)), SIZE)
        return source.loop(plan, World(), shares, of=PassOf(0, 0, 0, 1), **options), source.ledger

    return make


def read(loop: EpochLoop, fails_at: int = COUNT) -> Any:
    """Return what reads parts as lists of keys, and raises an error after *fails_at* samples."""

    def read(parts: Iterable[Part]) -> Iterator[list[str]]:
        taken = 0
        for part in parts:
            keys = []
            for sample in part.read(loop.reader, loop.ledger):
                keys.append(sample["__key__"])
                taken += 1
                if taken == fails_at + 1:
                    raise KeyError(fails_at)
            yield keys

    return read


def counts(loop: EpochLoop) -> tuple[int, int, int]:
    """The samples that were read, delivered, and neither delivered nor left out."""
    tally = loop.tally
    return tally.samples, tally.delivered, tally.in_flight


def test_all_is_delivered_at_the_end(make_loop):
    loop, ledger = make_loop()
    assert [len(keys) for keys in loop.run(read(loop))] == [4] * 5
    assert counts(loop) == (20, 20, 0)
    ledger.audit([loop.tally])


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_part_counts_as_delivered_once_its_result_is_out(make_loop, taken):
    loop, ledger = make_loop()
    with closing(loop.run(read(loop))) as results:
        assert len(list(islice(results, taken))) == taken
        assert loop.taken == SIZE * taken
    assert counts(loop) == (SIZE * taken, SIZE * taken, 0)
    assert ledger.unaudited == (taken > 0)


@pytest.mark.parametrize("fails_at", [0, 1, 8, 10, 19])
def test_what_was_made_and_not_taken_is_in_flight(make_loop, fails_at):
    loop, ledger = make_loop()
    sizes: list[int] = []
    with pytest.raises(KeyError):
        sizes.extend(map(len, loop.run(read(loop, fails_at))))
    delivered = sum(sizes)
    assert delivered == fails_at // SIZE * SIZE
    assert counts(loop) == (fails_at + 1, delivered, fails_at + 1 - delivered)
    assert ledger.samples == delivered
    assert ledger.unaudited


def test_all_is_in_flight_ahead_of_the_consumer(make_loop):
    """Who counts the outcomes with the results."""
    loop, _ = make_loop(is_ahead=True)
    outcomes = []
    for _ in loop.run(read(loop)):
        outcomes.append(loop.made)
    assert [outcome.taken for outcome in outcomes] == [4] * 5
    assert counts(loop) == (20, 0, 20)
    tally = loop.tally
    for outcome in outcomes:
        outcome.settle(tally)
    assert (tally.delivered, tally.in_flight) == (20, 0)
