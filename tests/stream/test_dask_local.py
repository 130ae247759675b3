"""dask_map without a cluster: Dask's own local schedulers."""

from __future__ import annotations

import os
import threading

import pytest

from tarshards import Stream
from tarshards.stream.dask import dask_map

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def dask():
    """The parts of Dask that tarshards needs."""
    pytest.importorskip("distributed")
    return pytest.importorskip("dask")


def cube(number: int) -> int:
    return number**3


def process(_) -> int:
    return os.getpid()


def fail_at_7(number: int) -> int:
    if number == 7:
        raise ZeroDivisionError("seven")
    return number


def test_threads_of_this_process_run_the_function_in_order(dask):
    with dask.config.set(num_workers=3):
        assert list(dask_map(range(50), cube)) == [number**3 for number in range(50)]
        threads = set(dask_map(range(50), lambda _: threading.get_ident()))
    assert threading.get_ident() not in threads


def test_the_scheduler_is_that_of_the_config(dask):
    with dask.config.set(scheduler="synchronous"):
        assert set(dask_map(range(5), lambda _: threading.get_ident())) == {threading.get_ident()}
    with dask.config.set(scheduler="processes", num_workers=2):
        assert os.getpid() not in set(dask_map(range(5), process))


def test_what_comes_before_an_error_is_delivered(dask):
    results = dask_map(range(50), fail_at_7)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ZeroDivisionError, match="seven"):
        next(results)


def test_only_one_part_is_read_ahead(dask):
    taken = []
    with dask.config.set(num_workers=2):
        results = dask_map((taken.append(number) or number for number in range(100)), cube)
        assert next(results) == 0
        assert len(taken) == 8


def test_samples_are_not_searched_for_tasks_of_dask(dask):
    """A dict with a collection of Dask, and a tuple that looks like a task, come as they are."""
    odd = [{"a": dask.delayed(cube)(2)}, (cube, 2), "key"]
    assert [type(sample) for sample in dask_map(odd, lambda sample: sample)] == [dict, tuple, str]
    assert isinstance(next(iter(dask_map(odd, lambda sample: sample["a"]))), type(odd[0]["a"]))


def test_a_stream_has_it_for_every_epoch(dask):
    stream = Stream(range(20)).dask_map(cube).filter(lambda number: number % 2)
    assert stream.collect() == stream.collect() == [number**3 for number in range(1, 20, 2)]
    with pytest.raises(TypeError, match="dask_map takes a function"):
        Stream([1]).dask_map(3)
