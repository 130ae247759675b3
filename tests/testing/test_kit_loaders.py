"""Our loaders in small worlds: 500 of them, 10,000 in ``make soak``, and some with processes for workers and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK
from with_torch import ShardDataset, ShardLoader, needs_torch

from tarshards import ArrayLoader, Stream, World, mix, readers
from tarshards.testing import Setup, check_epoch, check_resume, check_shuffle, small_worlds, write_shards
from tarshards.testing.resume import CHANGES
from tarshards.testing.setups import spread

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

Make = Callable[..., Any]  # a loader for a folder and a setup
BOTH = ("workers", "batch_size")
ANY = ("ranks", *BOTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("worlds")


def options(setup: Setup, tail: str | None = "exact") -> dict[str, Any]:
    return {"shuffle": True, "seed": setup.seed, "tail": tail}


def is_kept(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 3 != 1


def stream(folder: Path, setup: Setup, tail: str = "exact") -> Stream:
    return Stream.from_shards(write_shards(folder, setup.shards), **options(setup, tail))


def array_loader(folder: Path, setup: Setup, tail: str = "exact") -> ArrayLoader:
    return arrays(stream(folder, setup, tail), setup)


def arrays(data: Stream, setup: Setup) -> ArrayLoader:
    return ArrayLoader(data, setup.batch_size, fields={"cls": readers.integer()}, threads=setup.workers)


def shard_loader(folder: Path, setup: Setup, keep: Any = None, workers: int = 0, tail: str = "exact") -> ShardLoader:
    data = ShardDataset(write_shards(folder, setup.shards), **options(setup, tail))
    return ShardLoader(data.filter(keep) if keep else data, setup.batch_size, num_workers=workers)


def filtered(folder: Path, setup: Setup) -> ShardLoader:
    return shard_loader(folder, setup, is_kept)


def mixture(folder: Path, setup: Setup) -> ArrayLoader:
    """Of the dataset and one of three samples; the one that ends first is repeated."""
    datasets = {"a": stream(folder, setup), "b": stream(folder, replace(setup, shards=(3,)))}
    return arrays(mix(datasets, weights={"a": 2, "b": 1}, seed=setup.seed, until="last", tail="exact"), setup)


def unindexed(folder: Path, setup: Setup) -> ArrayLoader:
    urls = write_shards(folder, setup.shards, index=False)
    return arrays(Stream.from_shards(urls, shuffle=True, seed=setup.seed, tail="exact"), setup)


def samples(folder: Path, setup: Setup) -> Stream:
    urls = write_shards(folder, setup.shards)
    return Stream.from_shards(urls, **options(setup), world=World(setup.rank, setup.ranks))


def one_state(states: list[Any], ranks: int) -> list[Any]:
    """Every rank has the same state, and it is short."""
    assert all(state == states[0] for state in states)
    assert len(json.dumps(states[0])) < 2048
    return states[:1] * ranks


#: Loaders, and what may change between a state and its resume.
LOADERS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "array_loader": (array_loader, ANY),
    "shard_loader": (shard_loader, ANY),
    "filtered": (filtered, ANY),
    "mixture": (mixture, ANY),
    "samples": (samples, ("workers",)),
}
SETUPS = 2  # of a part
PARTS = 1 if SOAK == 1 else 7 * SOAK
CHAINS = 1 if SOAK == 1 else 2  # of a part
PROCESSES = 1 if SOAK == 1 else 5 * SOAK


@cache
def all_worlds(changes: tuple[str, ...]) -> list[Any]:
    return small_worlds(None, changes)


def some_worlds(part: int, changes: tuple[str, ...]) -> list[Any]:
    """The worlds of some setups, each with all its changes: they share many runs."""
    known = all_worlds(changes)
    each = 1 + sum(len(CHANGES[name]) - 1 for name in changes)
    firsts = spread(list(range(0, len(known), each)), SETUPS * PARTS)[SETUPS * part : SETUPS * (part + 1)]
    return [world for first in firsts for world in known[first : first + each]]


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_resumes_anywhere(folder, name, part):
    """On any number of ranks and workers, in batches of any size, twice in a row."""
    make, changes = LOADERS[name]
    worlds = some_worlds(part, changes)
    same = {"states_for": one_state} if "ranks" in changes else {}
    check_resume(partial(make, folder), worlds=worlds, changes=changes, chains=CHAINS, seed=part, steady=BOTH, **same)


@pytest.mark.soak
def test_without_indexes_the_same_ranks_resume(folder):
    """Each has to have a shard."""
    worlds = [world for world in small_worlds(None, ["workers"]) if world[0].ranks <= len(world[0].shards)]
    check_resume(partial(unindexed, folder), worlds=spread(worlds, 6 * min(SOAK, 4)), chains=0)


@pytest.mark.soak
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_tails_that_make_ranks_equal(folder, tail):
    unequal = [world for world in small_worlds() if world[0].total % world[0].ranks]
    worlds = spread(unequal, 2 if SOAK == 1 else 5 * SOAK)
    setups = 7 if SOAK == 1 else 5 * SOAK  # of these seven, one has shares of 2, 1 and 1 sample, in batches of 1
    for make in array_loader, shard_loader:
        check_epoch(partial(make, folder, tail=tail), setups=setups, tail=tail, steady=BOTH)
        check_resume(partial(make, folder, tail=tail), worlds=worlds, chains=CHAINS, tail=tail, steady=BOTH)


@pytest.mark.soak
@pytest.mark.parametrize("make", [array_loader, shard_loader])
def test_an_epoch_is_the_dataset(folder, make):
    check_epoch(partial(make, folder), setups=30 if SOAK > 1 else 12, steady=BOTH)


@pytest.mark.soak
@pytest.mark.parametrize("make", [array_loader, shard_loader])
def test_all_is_shuffled(folder, make):
    assert max(check_shuffle(partial(make, folder), seeds=15 if SOAK == 1 else 40).values()) < 5


# With real processes.


def with_workers(folder: Path, setup: Setup) -> ShardLoader:
    return shard_loader(folder, setup, workers=setup.workers)


@needs_torch
@pytest.mark.soak
@pytest.mark.parametrize("part", range(PROCESSES))
def test_processes_of_ranks_and_workers(folder, part):
    worlds = [world for world in small_worlds() if world[0].workers and world[0].ranks > 1 and world[0].total < 6]
    world = worlds[part * len(worlds) // PROCESSES]
    check_resume(partial(with_workers, folder), worlds=[world], times=1, chains=0, steady=BOTH, processes=True)
