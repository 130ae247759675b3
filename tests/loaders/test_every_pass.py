"""Every way to iterate: each pass is one epoch, whole, whatever other passes are alive."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, islice, product, zip_longest
from typing import Any, NamedTuple

import feed_specs
import numpy as np
import pytest
from fed import fed
from forked import run_in_threads
from with_torch import DataLoader, ShardDataset, ShardLoader, torch

from tarshards import ArrayLoader, Stream, TarWriter, mix, readers
from tarshards.index.build import build_index

pytestmark = [
    pytest.mark.usefixtures("quick_spawn"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),
]

Load = Callable[..., Iterable[Any]]
Passes = list[list[str]]

SHARDS, SIZE = 6, 8  # which two and three workers share equally


def keys(delivered: Iterable[Any]) -> list[str]:
    """The keys of samples or batches."""
    return [key for one in delivered for key in np.atleast_1d(one["__key__"]).tolist()]


# What is iterated.


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Callable[[str], list[str]]:
    """Return a function that returns the shards of a dataset by its name; those of "bare" have no indexes."""
    folder = tmp_path_factory.mktemp("shards")
    for name in ("a", "b", "bare-a", "bare-b"):
        for shard in range(SHARDS):
            url = str(folder / f"{name}-{shard}.tar")
            with TarWriter(url) as writer:
                for i in range(SIZE):
                    writer.write({"__key__": f"{name}-{shard}-{i}", "cls": SIZE * shard + i})
            if "bare" not in name:
                build_index(url).save(url)
    return lambda name: [str(folder / f"{name}-{shard}.tar") for shard in range(SHARDS)]


def _mixed(over: Any, first: list[str], second: list[str]) -> Any:
    return mix({"one": over(first, shuffle=True), "two": over(second, shuffle=True)}, until="last")


DATA: dict[str, Callable[..., Any]] = {
    "indexed": lambda over, shards: over(shards("a"), shuffle=True),
    "bare": lambda over, shards: over(shards("bare-a"), shuffle=True),
    "mixture": lambda over, shards: _mixed(over, shards("a"), shards("b")),
    "bare mixture": lambda over, shards: _mixed(over, shards("bare-a"), shards("bare-b")),
}


# The loaders that iterate over it.


def with_workers(kind: Any, method: str, kept: bool, **options: Any) -> Load:
    """Return what makes loaders with workers; their generators are equal, so that torch seeds all workers alike."""

    def load(data: Any, workers: int = 2) -> Any:
        given = {**options, "generator": torch.Generator().manual_seed(0)}
        if method != "no workers":
            given |= {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": kept}
        return kind(data, **given)

    return load


def stateful(data: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, **options)


def arrays(data: Any, *_: Any) -> Any:
    return ArrayLoader(data, 5, fields={"cls": readers.integer()})


def dali_loader(data: Any, *_: Any) -> Any:
    from tarshards import dali

    options: dict[str, Any] = {"fields": "cls", "device": "cpu", "arrays": "numpy"}
    return dali.dali_loader(data, lambda cls: cls, batch_size=5, **options)


WAYS: dict[str, Callable[[str, bool], Load]] = {
    "DataLoader": lambda *start: with_workers(DataLoader, *start, batch_size=None),
    "StatefulDataLoader": lambda *start: with_workers(stateful, *start, batch_size=None),
    "ShardLoader": lambda *start: with_workers(ShardLoader, *start, batch_size=5),
    "ArrayLoader": lambda *_: arrays,
    "dali_loader": lambda *_: dali_loader,
    "Stream": lambda *_: lambda data, *_: data,
}
OF_TORCH = {"DataLoader", "StatefulDataLoader", "ShardLoader"}
OF_OTHERS = {"StatefulDataLoader", "dali_loader"}


# How it is iterated.


def one_after_the_other(data: Any, load: Load) -> Passes:
    loader = load(data)
    return [keys(loader), keys(load(data, 3)), keys(loader)]


def zipped(data: Any, load: Load) -> Passes:
    return unzipped(load(data), load(data, 3))


def zipped_with_itself(data: Any, load: Load) -> Passes:
    loader = load(data)
    return unzipped(loader, loader)


def unzipped(*loaders: Iterable[Any]) -> Passes:
    return [keys(one for one in each if one is not None) for each in zip(*zip_longest(*loaders))]


def one_inside_the_other(data: Any, load: Load) -> Passes:
    outer = iter(load(data))
    begun = list(islice(outer, 1))
    inner = keys(load(data, 3))
    return [keys([*begun, *outer]), inner]


def one_left_early(data: Any, load: Load) -> Passes:
    loader = load(data)
    next(iter(loader))
    return [keys(loader), keys(load(data, 3))]


def told_of_an_epoch(data: Any, load: Load) -> Passes:
    outer = iter(load(data))
    begun = list(islice(outer, 1))
    data.set_epoch(7)
    inner = keys(load(data, 3))
    return [keys([*begun, *outer]), inner]


def copies(data: Any, load: Load) -> Passes:
    """The first copy shares the count of epochs; the others have their own."""
    outer = iter(load(data))
    begun = list(islice(outer, 1))
    others = [copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))]
    inner = [keys(load(other, 3)) for other in others]
    return [keys([*begun, *outer]), *inner]


def in_threads(data: Any, load: Load) -> Passes:
    return run_in_threads(*(partial(keys, load(data, workers)) for workers in (2, 3)))


HOW = [
    one_after_the_other,
    zipped,
    zipped_with_itself,
    one_inside_the_other,
    one_left_early,
    told_of_an_epoch,
    copies,
    in_threads,
]


class Row(NamedTuple):
    """A case: how workers start, and whether they are *kept* from pass to pass."""

    way: str
    start: str
    kept: bool
    data: str
    how: Callable[[Any, Load], Passes]

    @property
    def is_possible(self) -> bool:
        if self.kept and self.how is zipped_with_itself and self.way != "ShardLoader":
            return False  # torch has one iterator then, which each pass begins again
        return self.way in OF_TORCH or (self.start == "no workers" and not self.kept)


STARTS = ["no workers", "fork", "spawn", "forkserver"]
ROWS = [
    row
    for row in map(Row._make, product(WAYS, STARTS, [False, True], DATA, HOW))
    if row.is_possible and not (row.kept and row.start == "no workers")
]


def pairs_of(row: Row) -> set[Any]:
    return {*combinations(enumerate(row), 2)}


def pairwise(rows: list[Row]) -> Iterator[Row]:
    """Yield rows in which every pair of values is that is in any of *rows*."""
    missing = set().union(*map(pairs_of, rows))
    while missing:
        row = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(row)
        yield row


OURS = [*pairwise([row for row in ROWS if row.way not in OF_OTHERS])]


def params() -> Iterator[Any]:
    for row in ROWS:
        words = [row.way, row.start, "kept" if row.kept else "", row.data, row.how.__name__]
        yield pytest.param(row, id=", ".join(filter(None, words)), marks=[] if row in OURS else [pytest.mark.interop])


@pytest.mark.parametrize("row", [*params()])
def test_each_pass_is_one_epoch_and_whole(row, shards):
    data = DATA[row.data](Stream.from_shards if row.way == "Stream" else ShardDataset, shards)
    passes = row.how(data, WAYS[row.way](row.start, row.kept))
    names = {"indexed": "a", "bare": "bare-a", "mixture": "a b", "bare mixture": "bare-a bare-b"}[row.data].split()
    whole = sorted(f"{name}-{shard}-{i}" for name in names for shard in range(SHARDS) for i in range(SIZE))
    assert [sorted(each) for each in passes] == [whole] * len(passes)
    assert passes[0] != passes[1], "these are different epochs"


OF_ONE = [one_after_the_other, zipped, one_inside_the_other, one_left_early, in_threads]


@pytest.mark.parametrize("how", OF_ONE)
def test_passes_of_a_remote_loader(how, tmp_path, monkeypatch):
    pytest.importorskip("zmq")
    feed_specs.make(str(tmp_path))
    monkeypatch.setenv(feed_specs.DATA, str(tmp_path))
    whole = sorted(keys(feed_specs.stream()))
    with fed("arrays") as loader:
        passes = how(None, lambda *_: loader)
    assert [sorted(each) for each in passes] == [whole] * len(passes)
    assert passes[0] != passes[1], "these are different epochs"
