"""Traits: every op declares them correctly, and Stream and the loaders follow them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice

import pytest
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Stream, mix, readers
from tarshards.stream import ops
from tarshards.stream.dask import dask_map
from tarshards.stream.op import traits_of


def add_one(value):
    return value if isinstance(value, dict) else value + 1


#: The arguments of each op, for a stream of samples with the field cls.
ARGUMENTS = {
    "add_source": (),
    "shrink_images": ("ppm",),
    "async_map": (add_one,),
    "batched": (3,),
    "dask_map": (add_one,),
    "decode": (),
    "enumerate": (),
    "fields": (),
    "filter": (bool,),
    "flatten": (),
    "keep_fields": ("cls",),
    "map": (add_one,),
    "map_fields": ({"cls": int},),
    "map_tuple": (len,),
    "monitor": (print,),
    "pipe": (iter,),
    "progress": (),
    "rekey": ("{index}",),
    "rename_fields": ({"label": "cls"},),
    "repeat": (2,),
    "select_fields": ("label:cls",),
    "shuffle": (4,),
    "skip": (1,),
    "sliding": (3,),
    "take": (7,),
    "to_tuple": ("cls",),
    "unbatched": (),
    "with_length": (10,),
}
OPS = {name: getattr(ops, name) for name in ARGUMENTS if name != "dask_map"} | {"dask_map": dask_map}
LOCAL = [name for name in OPS if name != "dask_map" or find_spec("distributed")]


def samples(count: int, name: str = "") -> list:
    """Samples for the op *name*."""
    dicts = [{"__key__": f"{i:03d}", "__url__": "a.tar", "cls": str(i).encode()} for i in range(count)]
    if name == "shrink_images":
        return list(map(with_pixel, dicts))
    return [(sample["cls"],) for sample in dicts] if name == "map_tuple" else dicts


def with_pixel(sample: dict) -> dict:
    return {**sample, "ppm": b"P6 1 1 255 rgb"}


def applied(name: str, stream: Stream) -> Stream:
    """*stream* with the op *name* and the ops before it."""
    if name == "shrink_images":
        stream = stream.map(with_pixel)
    return getattr(stream.to_tuple("cls") if name == "map_tuple" else stream, name)(*ARGUMENTS[name])


def test_every_op_of_a_stream_is_here():
    methods = {name for name in dir(Stream) if hasattr(getattr(Stream, name), "traits")}
    assert methods == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_the_context_is_that_of_the_signature(name):
    parameters = inspect.signature(OPS[name]).parameters
    arguments = ("epoch", "seed", "on_error") if "rng" in parameters else ("epoch", "on_error")
    wanted = tuple(argument for argument in arguments if argument in parameters)
    assert traits_of(OPS[name]).context == wanted


@pytest.mark.parametrize("name", [name for name in OPS if "on_error" in traits_of(OPS[name]).context])
def test_a_wrong_policy_is_refused(name):
    with pytest.raises(ValueError, match=r'on_error must be "raise", "skip", a Ledger, .*, not \'stop\''):
        OPS[name]([], *ARGUMENTS[name], on_error="stop")


@pytest.mark.parametrize("name", OPS)
def test_a_loader_refuses_an_op_with_a_hint(make_shards, name):
    dataset = applied(name, ShardDataset(make_shards(2, 5, index=True)))
    traits = traits_of(OPS[name])
    if traits.per_sample:
        assert len(list(ShardLoader(dataset, 4))) == 3
        assert len(list(mix({"a": dataset}))) == 10
    else:
        with pytest.raises(TypeError, match=rf"^{name} is not for a ShardLoader: \w+.* \w+"):
            ShardLoader(dataset, 4)
        with pytest.raises(TypeError, match=rf"^a: {name} holds or counts samples; apply it to the mixture$"):
            mix({"a": dataset})
    with pytest.raises(TypeError, match="takes shards without ops"):
        ArrayLoader(dataset, 4, fields={"cls": readers.integer()})


@pytest.mark.parametrize("name", OPS)
def test_without_index_a_loader_refuses_batched_alone(make_shards, name):
    dataset = applied(name, ShardDataset(make_shards(2, 5)))
    if name == "batched":
        with pytest.raises(TypeError, match=r"^batched is not for a ShardLoader: batch_size="):
            ShardLoader(dataset, 4)
    else:
        ShardLoader(dataset, 4)


@pytest.mark.parametrize("name", OPS)
def test_the_length_is_that_of_a_one_for_one_op(make_shards, name):
    stream = applied(name, Stream.from_shards(make_shards(2, 5, index=True)))
    if traits_of(OPS[name]).one_for_one:
        assert len(stream) == 10
    else:
        with pytest.raises(TypeError, match=f"^{name} changes the number of samples"):
            len(stream)


@pytest.mark.parametrize("name", [name for name in LOCAL if traits_of(OPS[name]).one_for_one])
def test_one_for_one(name):
    assert len(list(OPS[name](samples(10, name), *ARGUMENTS[name]))) == 10


@pytest.mark.parametrize("name", [name for name in LOCAL if traits_of(OPS[name]).per_sample])
def test_per_sample_is_the_same_for_parts(name):
    whole = list(OPS[name](samples(10, name), *ARGUMENTS[name]))
    parts = [OPS[name](part, *ARGUMENTS[name]) for part in (samples(10, name)[:3], samples(10, name)[3:])]
    assert [sample for part in parts for sample in part] == whole


class Counted(Iterator):
    """Counts the items taken."""

    def __init__(self, items: Iterable):
        self.items, self.taken = iter(items), 0

    def __next__(self):
        item = next(self.items)
        self.taken += 1
        return item


@pytest.mark.parametrize("name", [name for name in LOCAL if traits_of(OPS[name]).resumable])
def test_resumable_ops_go_on_after_what_they_took(name):
    """After any number of outputs, an op that restarts after the items taken yields the rest."""
    expected = list(map(repr, OPS[name](samples(10, name), *ARGUMENTS[name])))
    for stop in range(len(expected)):
        upstream = Counted(samples(10, name))
        begun = list(map(repr, islice(OPS[name](upstream, *ARGUMENTS[name]), stop)))
        rest = OPS[name](samples(10, name)[upstream.taken :], *ARGUMENTS[name])
        assert begun + list(map(repr, rest)) == expected


def test_rekey_and_add_source_are_methods(make_shards):
    stream = Stream.from_shards(make_shards(2, 3, index=True)).add_source().rekey("{index:02d}-{shard}")
    assert len(stream) == 6
    delivered = stream.collect()
    assert [sample["__key__"] for sample in delivered] == [f"{i:02d}-set-{i // 3:04d}" for i in range(6)]
    assert all(sample["source"] == sample["__url__"] for sample in delivered)
    iterator = iter(stream)
    list(islice(iterator, 4))
    resumed = Stream.from_shards(make_shards(2, 3, index=True)).add_source().rekey("{index:02d}-{shard}")
    resumed.load_state_dict(stream.state_dict())
    assert [sample["__key__"] for sample in resumed] == ["04-set-0001", "05-set-0001"]
