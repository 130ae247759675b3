"""The ledger's sum after the ops: each sample that was read is delivered, filtered, failed, dropped or in flight."""

from __future__ import annotations

import logging
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaving_out import fail_on_fives, nothing

from tarshards import Ledger, ShardWriter, Stream, mix
from tarshards.errors import AuditError, SampleError
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


#: What a field op refuses in the samples whose class is a multiple of 5, which have no field n, and one named source.
FIELD_OPS = {
    "keep_fields": lambda stream: stream.keep_fields("cls n"),
    "rename_fields": lambda stream: stream.rename_fields({"number": "n"}),
    "select_fields": lambda stream: stream.select_fields("number:n *"),
    "to_tuple": lambda stream: stream.to_tuple("cls", "n"),
    "add_source": lambda stream: stream.add_source(),
    "map_fields": lambda stream: stream.map_fields({"n": int}),
    "map_tuple": lambda stream: stream.map(as_tuple).map_tuple(str, int),
}


def without_fives(sample):
    number = int(sample["cls"])
    return {**sample, "n": number} if number % 5 else {**sample, "source": ""}


def as_tuple(sample):
    return sample["cls"], sample.get("n")


@INDEXED
@pytest.mark.parametrize("name", FIELD_OPS)
def test_a_sample_that_lacks_a_field_fails(make_shards, index, name):
    samples = FIELD_OPS[name](stream(make_shards, index).map(without_fives)).filter(bool)
    assert len(samples.collect()) == 24
    assert counts(samples.ledger) == (24, 0, 6, 0, 0)
    entries = samples.ledger._total().failures
    if name != "map_tuple":  # a tuple has no place
        assert [(entry.shard.endswith(".tar"), entry.key) for entry in entries] == [
            (True, f"{i:06d}") for i in range(0, 30, 5)
        ]


@INDEXED
@pytest.mark.parametrize("name", [name for name in FIELD_OPS if not name.startswith("map")])
def test_a_field_op_raises_without_a_policy(make_shards, index, name):
    samples = FIELD_OPS[name](Stream.from_shards(make_shards(1, index=index)).map(without_fives))
    with pytest.raises(SampleError, match=r"\.tar: 000000"):
        samples.collect()
    samples = FIELD_OPS[name](Stream([{"__key__": "a", "__url__": "u", "cls": 0, "source": 1}]))
    with pytest.raises(SampleError, match="u: a"):
        samples.collect()


@INDEXED
def test_a_handler_of_a_field_op_alone_gets_its_errors(make_shards, index):
    seen: list[SampleError] = []
    samples = stream(make_shards, index).map(without_fives).to_tuple("n", on_error=seen.append)
    assert len(samples.collect()) == 24
    assert [type(error) for error in seen] == [SampleError] * 6
    assert counts(samples.ledger) == (24, 0, 6, 0, 0)
    assert not samples.ledger.quarantined


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


def every_other(samples):
    for sample in samples:
        yield sample, next(samples, None)


@INDEXED
def test_samples_are_followed_up_to_a_pipe(make_shards, index):
    samples = stream(make_shards, index).filter(even).pipe(every_other).map(fail_on_none)
    assert len(samples.collect()) == 7
    assert counts(samples.ledger) == (15, 15, 0, 0, 0)
    assert len(samples.ledger.quarantined) == 1


def fail_on_none(pair):
    return pair[0]["cls"], pair[1]["cls"]


def cls_of_even(sample):
    return int(sample["cls"]) if even(sample) else None


@INDEXED
def test_what_a_function_drops_is_filtered(make_shards, index):
    samples = stream(make_shards, index).map(fail_on_fives).map(cls_of_even, drop_none=True)
    assert sorted(samples.collect()) == [number for number in range(0, 30, 2) if number % 5]
    assert counts(samples.ledger) == (12, 12, 6, 0, 0)
    assert samples.ledger.filtered == {"map(cls_of_even)": 12}


@INDEXED
def test_a_none_that_is_not_dropped_is_delivered(make_shards, index):
    samples = stream(make_shards, index).map(cls_of_even)
    assert samples.collect().count(None) == 15
    assert counts(samples.ledger) == (30, 0, 0, 0, 0)


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


def number_fields(sample):
    number = int(sample["cls"])
    return {**sample, "number": number} | {f"by{n}": b"x" for n in (2, 3, 5) if number % n}


def drop_by_seven(sample):
    return sample if sample["number"] % 7 else None


def fail_on_x(data):
    raise ValueError(data)


#: Each takes and yields dicts, and leaves out some samples in its way.
LEAVING_OUT = {
    "filter": lambda stream: stream.filter(lambda sample: sample["number"] % 4),
    "drop_none": lambda stream: stream.map(drop_by_seven, drop_none=True),
    "keep_fields": lambda stream: stream.keep_fields("number by2 by3;by5"),
    "select_fields": lambda stream: stream.select_fields("by2;by3 *"),
    "rename_fields": lambda stream: stream.rename_fields({"by2": "by5"}),
    "decode": lambda stream: stream.decode(by3=fail_on_x, only="by3"),
    "skip": lambda stream: stream.skip(2),
    "shuffle": lambda stream: stream.shuffle(5),
    "with_length": lambda stream: stream.with_length(3),
    "unbatched": lambda stream: stream.batched(4, collate=list).unbatched(),
}


@pytest.fixture(scope="module")
def thirty(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("thirty")
    with ShardWriter(f"{folder}/set-%d.tar", max_samples=8) as writer:
        for i in range(30):
            writer.write({"__key__": f"{i:02d}", "cls": i})
    return f"{folder}/set-{{0..3}}.tar"


@given(index=st.booleans(), names=st.lists(st.sampled_from(sorted(LEAVING_OUT)), max_size=4), count=st.integers(0, 31))
def test_the_sum_closes_after_any_ops_wherever_a_stream_is_left(thirty, index, names, count):
    samples = Stream.from_shards(thirty, index=index, on_error=Ledger(max_errors=1000)).map(number_fields)
    for name in names:
        samples = LEAVING_OUT[name](samples)
    delivered = len(list(islice(samples, count)))
    found = counts(samples.ledger)
    assert min(found) >= 0
    if "unbatched" not in names:
        assert found[0] == delivered
        assert found[2] == len(samples.ledger._total().failures)
