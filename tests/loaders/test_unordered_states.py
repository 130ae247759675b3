"""States of streams with an op that yields results as they finish: replaying them leads to other samples each time."""

from __future__ import annotations

from functools import partial
from itertools import count
from threading import Event
from typing import Any

import pytest
from with_torch import ShardDataset, ShardLoader

from tarshards import Stream, mix
from tarshards.errors import StateError
from tarshards.stream.dask import dask_map
from tarshards.stream.op import BoundOp

WORDS = r"async_map\(.*\) with ordered=False .*ordered=True"


class Swaps:
    """Lets the second of two samples finish before the first, in the first pass alone."""

    def __init__(self) -> None:
        self.calls, self.is_second_done = count(), Event()

    def __call__(self, sample: Any) -> Any:
        number = next(self.calls)
        if number == 0:
            self.is_second_done.wait(10)
        if number == 1:
            self.is_second_done.set()
        return sample


def stream_of(urls: Any, index: bool = False) -> Any:
    stream = Stream.from_shards(urls, index=index)
    return stream.async_map(Swaps(), workers=2, ordered=False)


def mixture_of(urls: Any) -> Any:
    return mix({"a": stream_of(urls), "b": Stream.from_shards(urls, index=False)})


def loader_of(urls: Any) -> Any:
    dataset = ShardDataset(urls, index=False).async_map(Swaps(), workers=2, ordered=False)
    return ShardLoader(dataset, 2)


@pytest.mark.parametrize("make", [stream_of, partial(stream_of, index=True), mixture_of])
def test_a_stream_is_not_resumed_within_an_epoch(make_shards, make):
    urls = make_shards(2, 6, index=True)
    stream = make(urls)
    samples = iter(stream)
    assert len([next(samples) for _ in range(3)]) == 3
    resumed = make(urls)
    resumed.load_state_dict(stream.state_dict())
    with pytest.raises(StateError, match=WORDS):
        list(resumed)


@pytest.mark.parametrize("index", [False, True])
def test_a_stream_is_resumed_at_both_ends_of_an_epoch(make_shards, index):
    urls = make_shards(2, 6, index=True)
    stream = stream_of(urls, index)
    begin = stream.state_dict()
    assert len(list(stream)) == 12
    for state, rest in (begin, 12), (stream.state_dict(), 0):
        resumed = stream_of(urls, index)
        resumed.load_state_dict(state)
        assert len(list(resumed)) == rest
        assert len(list(resumed)) == 12


def test_a_loader_is_resumed_at_the_ends_of_epochs_alone(make_shards):
    pytest.importorskip("torch", reason="needs torch")
    urls = make_shards(2, 6)
    loader = loader_of(urls)
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateError, match=WORDS):
        loader_of(urls).load_state_dict(loader.state_dict())
    assert len(list(batches)) == 5
    resumed = loader_of(urls)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 6


def test_which_ops_yield_in_another_order_each_time():
    assert BoundOp(dask_map, (str,), {"ordered": False}).is_unordered
    assert not BoundOp(dask_map, (str,), {}).is_unordered
