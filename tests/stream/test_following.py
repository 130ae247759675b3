"""The ledger's sum after the ops: each sample that was read is delivered, filtered, failed, dropped or in flight."""

from __future__ import annotations

import logging
from itertools import islice

import pytest
from leaving_out import fail_on_fives, nothing

from tarshards import Ledger, Stream, mix
from tarshards.errors import AuditError
from tarshards.stream.op import BoundOp, op

INDEXED = pytest.mark.parametrize("index", [True, False])


def even(sample) -> bool:
    return int(sample["cls"]) % 2 == 0


def stream(make_shards, index: bool, **options) -> Stream:
    """A stream of 30 samples of the classes 0 to 29 under a ledger."""
    urls = make_shards(10, index=index)
    return Stream.from_shards(urls, index=index, on_error=Ledger(max_errors=100), **options)


def counts(ledger: Ledger) -> tuple[int, int, int, int, int]:
    """The samples that were delivered, filtered, failed, dropped and in flight."""
    ledger.check()
    tally = ledger._total()
    found = tally.delivered, tally.filtered.total(), tally.failed, tally.discarded, tally.in_flight
    assert sum(found) == tally.samples
    assert not tally.planned or tally.samples == tally.read.total()
    return found


@INDEXED
def test_samples_are_counted_as_they_come_out(make_shards, index):
    samples = stream(make_shards, index).filter(even).map(fail_on_fives).decode()
    assert len(samples.collect()) == 12
    assert counts(samples.ledger) == (12, 15, 3, 0, 0)
    assert samples.ledger.samples == 12
    assert samples.ledger.filtered == {"filter(even)": 15}
    assert samples.ledger.failed == len(samples.ledger.quarantined) == 3
    assert "delivered       12 samples\nfiltered        15 samples: 15 filter(even)\n" in str(samples.ledger)


@INDEXED
def test_a_handler_of_an_op_alone_makes_samples_fail_too(make_shards, index):
    seen: list[Exception] = []
    samples = stream(make_shards, index).map(fail_on_fives, on_error=seen.append)
    assert len(samples.collect()) == 24
    assert len(seen) == 6
    assert counts(samples.ledger) == (24, 0, 6, 0, 0)
    assert not samples.ledger.quarantined


@INDEXED
@pytest.mark.parametrize(
    ("partial", "expected"),
    [(True, (24, 0, 6, 0, 0)), (False, (21, 0, 6, 3, 0))],
)
def test_batches_count_by_their_samples(make_shards, index, partial, expected):
    samples = stream(make_shards, index).map(fail_on_fives).batched(7, partial=partial, collate=list)
    assert sum(map(len, samples.collect())) == expected[0]
    assert counts(samples.ledger) == expected


@INDEXED
def test_skipped_samples_are_dropped(make_shards, index):
    samples = stream(make_shards, index).filter(even).skip(4)
    assert len(samples.collect()) == 11
    assert counts(samples.ledger) == (11, 15, 0, 4, 0)


@INDEXED
def test_what_take_leaves_is_not_taken(make_shards, index):
    samples = stream(make_shards, index).filter(even).take(4)
    assert len(samples.collect()) == 4
    assert counts(samples.ledger) == (4, 3, 0, 0, 0)
    assert samples.ledger.unaudited


@INDEXED
@pytest.mark.parametrize(("size", "held"), [(8, 7), (50, 12)])
def test_a_buffer_that_is_left_is_in_flight(make_shards, index, size, held):
    samples = stream(make_shards, index).filter(even).shuffle(size)
    assert len(list(islice(samples, 3))) == 3
    delivered, *_, in_flight = counts(samples.ledger)
    assert (delivered, in_flight) == (3, held)
    assert samples.ledger.unaudited
    assert f"delivered        3 samples, {held} in flight" in str(samples.ledger)


@INDEXED
def test_every_pass_is_counted(make_shards, index):
    samples = stream(make_shards, index).map(fail_on_fives).shuffle(4).repeat(3).filter(even)
    assert len(samples.collect()) == 36
    assert counts(samples.ledger) == (36, 36, 18, 0, 0)
    endless = stream(make_shards, index).filter(even).repeat()
    list(islice(endless, 40))
    assert counts(endless.ledger)[:2] == (40, 39)


@INDEXED
def test_samples_are_followed_up_to_an_op_that_makes_several_of_one(make_shards, index):
    twice = stream(make_shards, index).filter(even).map(lambda sample: [sample] * 2).flatten().filter(nothing)
    assert twice.collect() == []
    assert counts(twice.ledger) == (15, 15, 0, 0, 0)


@INDEXED
@pytest.mark.parametrize("count", range(0, 13, 3))
def test_the_sum_of_what_was_taken_closes_wherever_a_stream_is_left(make_shards, index, count):
    samples = stream(make_shards, index).filter(even).map(fail_on_fives)
    assert len(list(islice(samples, count))) == count
    assert counts(samples.ledger)[0] == count


@op(one_for_one=True)
def lose_the_last(samples):
    yield from list(samples)[:-1]


@op(one_for_one=True)
def double_the_last(samples):
    every = list(samples)
    yield from every + every[-1:]


@INDEXED
@pytest.mark.parametrize(
    ("function", "words"),
    [(lose_the_last, "lost 1 samples that it took"), (double_the_last, "yielded 1 samples more than it took")],
)
def test_an_op_that_loses_a_sample_fails_the_audit(make_shards, index, function, words):
    samples = stream(make_shards, index).filter(even)._then(BoundOp(function, (), {})).map(dict)
    with pytest.raises(AuditError, match=rf"^{function.__name__}\(\) {words}"):
        samples.collect()


@INDEXED
def test_a_filter_that_leaves_nothing_is_a_warning_once_an_epoch(make_shards, index, caplog):
    samples = stream(make_shards, index).map(fail_on_fives).filter(nothing)
    expected = "no sample of this epoch was delivered: of 30 read, filter(nothing) left out 24"
    for epoch in (1, 2):
        assert samples.collect() == []
        assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, expected)] * epoch
    caplog.clear()
    stream(make_shards, index).filter(even).collect()
    stream(make_shards, index).filter(nothing).take(0).collect()
    assert not caplog.records


def test_ops_of_a_mixed_dataset_are_counted(make_shards):
    mixed = {
        "even": Stream.from_shards(make_shards(4, name="a", index=True)).filter(even),
        "all": Stream.from_shards(make_shards(4, name="b", index=True)),
    }
    samples = mix(mixed, on_error=Ledger(max_errors=100)).map(fail_on_fives)
    assert len(samples.collect()) == 6 - 2 + 12 - 3
    assert counts(samples.ledger) == (13, 6, 5, 0, 0)
