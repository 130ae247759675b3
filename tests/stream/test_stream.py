"""Streams: immutable, re-iterable, picklable, and cleaned up when an iteration is left early."""

from __future__ import annotations

import gc
import inspect
import pickle
from itertools import chain, islice

import pytest
from leftovers import Leftovers

from tarshards import Ledger, Stream, World, mix
from tarshards.errors import DecodeError, UrlError, WorldError
from tarshards.stream import ops

OPS = [
    name
    for name, function in vars(ops).items()
    if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == "tarshards.stream.ops"
]


def classes(stream) -> list[int]:
    return [sample["cls"] for sample in stream]


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_a_method_with_its_signature_and_docstring(name):
    method, function = getattr(Stream, name), getattr(ops, name)
    assert method.__doc__ == function.__doc__
    assert inspect.signature(method) == inspect.signature(function)


def test_a_wrong_argument_is_told_where_it_is_made():
    with pytest.raises(TypeError):
        Stream([1]).map()
    with pytest.raises(TypeError):
        Stream([1]).take(1, nonsense=2)


def test_streams_are_immutable():
    base = Stream(range(10))
    odd = base.filter(lambda x: x % 2)
    assert base.collect() == list(range(10))
    assert odd.map(str).collect() == ["1", "3", "5", "7", "9"]
    assert odd.collect() == [1, 3, 5, 7, 9]


def evens(stream):
    return stream.filter(lambda number: number % 2 == 0)


def test_compose_applies_the_first_function_first():
    stream = Stream(range(10))
    assert stream.compose(evens, lambda stream: stream.take(2)).collect() == [0, 2]
    assert stream.compose(lambda stream: stream.take(2), evens).collect() == [0]
    assert stream.compose() is stream


def test_compose_names_a_function_that_returns_no_stream():
    with pytest.raises(TypeError, match=r"^compose: evens returned \[0\], and not a stream$"):
        Stream([0]).compose(evens, lambda stream: stream, list_of_evens)
    with pytest.raises(TypeError, match="compose takes a function, not 3"):
        Stream([0]).compose(3)


def list_of_evens(stream):
    return evens(stream).collect()


list_of_evens.__qualname__ = "evens"


def test_with_length_is_what_len_says():
    assert len(Stream([1]).with_length(7)) == 7
    assert Stream([1]).with_length(7).collect() == [1]
    assert len(evens(Stream(range(10))).with_length(5).map(str)) == 5
    assert len(Stream([1]).with_length(7).with_length(0)) == 0
    with pytest.raises(TypeError, match=r"^take changes the number of samples, .*; with_length\(n\) sets one$"):
        len(Stream([1]).with_length(7).take(3))
    with pytest.raises(ValueError, match="length must be at least 0, not -1"):
        Stream([1]).with_length(-1)


@pytest.mark.parametrize("index", [True, False])
def test_a_state_passes_through_with_length(make_shards, index):
    urls = make_shards(4, index=index)
    plain, told = (Stream.from_shards(urls).decode(), Stream.from_shards(urls).with_length(99).decode())
    assert len(told) == 99
    for stream in plain, told:
        stream.state = [stream.state_dict() for _ in islice(stream, 5)][-1]
    assert plain.state == told.state
    rest = []
    for stream in plain, told:
        stream.load_state_dict(plain.state)
        rest.append(classes(stream))
    assert rest[0] == rest[1] == list(range(5, 12))


def test_sources():
    assert Stream([1, 2]).collect() == [1, 2]
    assert Stream(lambda: iter([1, 2])).collect() == [1, 2]
    once = Stream(iter([1, 2]))
    assert once.collect() == [1, 2]
    with pytest.raises(TypeError, match="only once"):
        once.collect()


def test_epochs_advance_and_can_be_set():
    stream = Stream(range(50)).shuffle(50, seed=1)
    first, second = stream.collect(), stream.collect()
    assert first != second
    stream.set_epoch(0)
    assert [stream.collect(), stream.collect()] == [first, second]
    assert stream.map(int).collect() not in (first, second), "a derived stream goes on from here"


def test_the_callers_epoch_is_kept():
    stream = Stream(range(50)).shuffle(50, epoch=7)
    assert stream.collect() == stream.collect()


def test_repeat_gives_each_time_an_epoch_of_its_own():
    stream = Stream(range(30)).shuffle(30).repeat(2)
    twice = [stream.collect(), stream.collect()]
    orders = [tuple(epoch[half : half + 30]) for epoch in twice for half in (0, 30)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len(set(orders)) == 4
    assert len(Stream(range(3)).repeat().take(10).collect()) == 10


REPEATED = {
    "endless": lambda stream: stream.repeat().take(4 * 20),
    "endless within endless": lambda stream: stream.repeat().take(2 * 20).repeat().take(4 * 20),
    "n within n": lambda stream: stream.repeat(2).repeat(2),
    "n within endless": lambda stream: stream.repeat(2).repeat().take(4 * 20),
    "endless within n": lambda stream: stream.repeat().take(2 * 20).repeat(2),
}


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("repeated", REPEATED)
def test_every_pass_of_every_epoch_has_an_order_of_its_own(make_uneven, repeated, planned):
    if planned:
        source = Stream.from_shards(make_uneven([1] * 20), shuffle=True, seed=1).map(lambda sample: int(sample["cls"]))
    else:
        source = Stream(range(20)).shuffle(20)
    stream = REPEATED[repeated](source)
    delivered = [value for _ in range(3) for value in stream]
    passes = [tuple(delivered[begin : begin + 20]) for begin in range(0, len(delivered), 20)]
    assert len(passes) == 12
    assert all(sorted(order) == list(range(20)) for order in passes)
    assert len(set(passes)) == 12
    stream.set_epoch(0)
    assert [value for _ in range(3) for value in stream] == delivered


def test_passes_of_a_mixture_are_not_its_later_epochs(make_uneven):
    parts = {"a": Stream.from_shards(make_uneven([1] * 20, "a"), shuffle=True)}
    parts["b"] = Stream.from_shards(make_uneven([1] * 60, "b"), shuffle=True)
    stream = mix(parts, until="last").filter(lambda sample: sample["__dataset__"] == "a").repeat().take(2 * 60)
    keys = [sample["__key__"] for _ in range(2) for sample in stream]
    orders = [tuple(keys[begin : begin + 20]) for begin in range(0, len(keys), 20)]
    assert len(orders) == len(set(orders)) == 12


@pytest.mark.parametrize("repeated", REPEATED)
@pytest.mark.parametrize("stop", [1, 20, 33, 79])
def test_repeated_streams_resume_exactly(make_uneven, repeated, stop):
    urls = make_uneven([1] * 20)

    def fresh() -> Stream:
        return REPEATED[repeated](Stream.from_shards(urls, shuffle=True, seed=1)).map(lambda sample: sample["__key__"])

    stream, resumed = fresh(), fresh()
    stream.set_epoch(2)
    expected = stream.collect()
    stream.set_epoch(2)
    delivered = list(islice(stream, stop))
    resumed.load_state_dict(stream.state_dict())
    assert delivered + resumed.collect() == expected


def test_from_shards(make_shards):
    urls = make_shards(4, 5)
    stream = Stream.from_shards(urls).decode()
    assert classes(stream) == list(range(20))
    assert classes(stream) == list(range(20))
    assert stream.ledger.samples == 40
    assert stream.ledger.shards == 8


def test_shards_are_shuffled_by_seed_and_epoch(make_shards):
    urls = make_shards(6, 2)
    stream = Stream.from_shards(urls, shuffle=True, seed=3).decode()
    first, second = classes(stream), classes(stream)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert classes(Stream.from_shards(urls, shuffle=True, seed=3).decode()) == first
    assert classes(Stream.from_shards(urls, shuffle=True, seed=4).decode()) != first


def test_worlds_share_the_shards(make_shards):
    urls = make_shards(5, 2)
    worlds = [World(rank, 2, worker, 2) for rank in range(2) for worker in range(2)]
    parts = [classes(Stream.from_shards(urls, shuffle=True, world=world).decode()) for world in worlds]
    assert sorted(chain(*parts)) == list(range(10))
    with pytest.raises(WorldError, match="5 shards for 6 ranks"):
        Stream.from_shards(urls, world=World(0, 6)).collect()


def test_bad_expressions_are_told_at_once(tmp_path):
    with pytest.raises(UrlError):
        Stream.from_shards(str(tmp_path / "*.tar"))


def test_ops_inherit_the_streams_on_error(make_shards):
    ledger = Ledger(max_errors=100)
    stream = Stream.from_shards(make_shards(2), on_error=ledger).map(lambda sample: 1 / 0)
    assert stream.collect() == []
    assert len(ledger.quarantined) == 6
    with pytest.raises(ZeroDivisionError):
        Stream([1]).map(lambda x: 1 / 0).collect()


def test_a_ledger_of_zero_raises_the_decoders_error(make_shards):
    stream = Stream.from_shards(make_shards(1)).map_fields({"cls": lambda data: b"x"}).decode()
    with pytest.raises(DecodeError, match=r"set-0000\.tar: 000000\.cls"):
        stream.collect()


def test_streams_without_shards_keep_no_ledger():
    assert not hasattr(Stream([{"__key__": "0"}]), "ledger")
    with pytest.raises(AttributeError, match="has no ledger: only a stream of shards keeps one"):
        _ = Stream([1]).ledger


def test_streams_are_picklable(make_shards):
    stream = Stream.from_shards(make_shards(3), shuffle=True).decode().shuffle(3).to_tuple("cls").batched(2)
    copy = pickle.loads(pickle.dumps(stream))
    assert [batch[0].tolist() for batch in copy] == [batch[0].tolist() for batch in stream]


@pytest.mark.parametrize("explicitly", [True, False])
def test_breaking_off_closes_everything(make_shards, explicitly):
    urls = make_shards(3, 200)
    before = Leftovers()
    stream = Stream.from_shards(urls).decode().async_map(dict, workers=2).shuffle(5)
    for _ in range(5):
        iterator = iter(stream)
        next(iterator)
        assert before.files()
        if explicitly:
            iterator.close()
        del iterator
    gc.collect()
    assert not before.files()
    assert not before.threads()
    assert stream.ledger.unaudited


def test_take_breaks_off_quietly(make_shards):
    urls = make_shards(2, 100)
    before = Leftovers()
    assert len(Stream.from_shards(urls).take(3).collect()) == 3
    assert not before.files()
