"""The rank and worker of this process."""

from __future__ import annotations

from itertools import chain

import pytest
from with_torch import torch

from tarshards.epoch.world import World
from tarshards.errors import WorldError


def test_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert World.detect() == World(0, 1, 0, 1)


def test_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert World.detect() == World(2, 4)


@pytest.mark.parametrize(
    ("rank", "local", "node", "found"), [(None, "1", "0", 1), ("2", "1", "0", 2), ("3", "1", "1", 3)]
)
def test_lightnings_launcher_sets_no_rank(monkeypatch, rank, local, node, found):
    for name, value in {"RANK": rank, "LOCAL_RANK": local, "NODE_RANK": node, "WORLD_SIZE": "4"}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert World.detect() == World(found, 4)


@pytest.mark.parametrize("names", [{"LOCAL_RANK": "1", "NODE_RANK": "1"}, {"LOCAL_RANK": "1"}, {"NODE_RANK": "0"}])
def test_a_rank_that_does_not_follow_is_asked_for(monkeypatch, names):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**names, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=r"init_process_group\(\) first, or give world="):
        World.detect()
    assert World.detect(World(1, 3)) == World(1, 3)


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), (None, "2"), ("0", "0"), ("0", "")])
def test_nonsense_in_the_environment(monkeypatch, rank, size):
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(WorldError):
        World.detect()


def test_process_group_goes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert World.detect() == World(0, 1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("given", [(1, 1, 0, 1), (0, 1, 2, 2), (-1, 1, 0, 1)])
def test_impossible_worlds(given):
    with pytest.raises(WorldError):
        World(*given)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_shares_are_a_partition(world_size, num_workers):
    items = list(range(17))
    shares = [
        World(rank, world_size, worker, num_workers).share(items)
        for rank in range(world_size)
        for worker in range(num_workers)
    ]
    assert sorted(chain(*shares)) == items
