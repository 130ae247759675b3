"""The rank and worker of this process."""

from __future__ import annotations

import os
import subprocess
from importlib import import_module
from itertools import chain

import pytest
from with_torch import DataLoader, ShardDataset, ShardLoader, needs_torch, torch

from tarshards import ArrayLoader, IndexedShards, Stream, readers
from tarshards.epoch.world import ITEMS, LAUNCHERS, World, _log_unannounced
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


# Ranks that nobody announced. The variables are those that Slurm 22.05, Open MPI 4 and 5, and MPICH 4 set.

SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}  # a script of sbatch -n4, a shell of salloc -n4


def names_line(rank: str, size: str) -> str:
    return f"world=World(int(os.environ['{rank}']), int(os.environ['{size}'])), or set RANK"


@pytest.fixture
def launched(monkeypatch):
    """Return a function that sets the variables of a process, and no others of a launcher."""
    names = {name for names in LAUNCHERS for name in names} | {*ITEMS, *SRUN, "RANK", "WORLD_SIZE"}

    def launch(variables: dict[str, str]) -> None:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        _log_unannounced.cache_clear()

    yield launch
    _log_unannounced.cache_clear()


UNANNOUNCED = {
    "srun": (SRUN, "srun started 4 processes, and each", names_line("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")),
    "mpirun": (MPIRUN, "mpirun started 4", names_line("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    "mpiexec": (MPIEXEC, "mpiexec started 4", names_line("PMI_RANK", "PMI_SIZE")),
    "srun --mpi=pmi2": (SRUN | MPIEXEC, "mpiexec started 4", names_line("PMI_RANK", "PMI_SIZE")),
    "mpirun in a job": (MPIRUN | SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, "mpirun started 4", "OMPI_COMM_WORLD_RANK"),
    "RANK alone": ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is not set", "World(rank, world_size)"),
}
ANNOUNCED = {
    "nothing": {},
    "sbatch": BATCH,
    "srun of one task": SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "mpirun of one": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "array": SRUN | {"SLURM_ARRAY_TASK_ID": "7"},
    "sweep": {"SLURM_ARRAY_TASK_ID": "7", "RANK": "7"},
    "tarjob": SRUN | {"TARJOB_RUN": "x"},
    "torchrun below srun": SRUN | {"RANK": "0", "WORLD_SIZE": "1"},
    "a word": {"RANK": "major"},
}


@pytest.mark.parametrize("name", UNANNOUNCED)
def test_ranks_that_nobody_announced_are_warned_of_once(launched, caplog, name):
    variables, begin, cure = UNANNOUNCED[name]
    launched(variables)
    for _ in range(2):
        World.detect().check_announced(0)
    (record,) = caplog.records
    assert record.message.startswith(begin)
    assert cure in record.message
    assert World.detect() == World(), "a warning changes nothing"


@pytest.mark.parametrize("name", ANNOUNCED)
def test_one_process_and_items_of_jobs_are_not_warned_of(launched, caplog, name):
    launched(ANNOUNCED[name])
    World.detect().check_announced(0)
    assert not caplog.records


@pytest.mark.parametrize("world", [World(0, 2), World(0, 1, 1, 2, 5)])
def test_ranks_and_other_workers_do_not_warn(launched, caplog, world):
    launched(SRUN)
    world.check_announced(0)
    assert not caplog.records


def test_a_worker_warns_in_its_first_epoch(launched, caplog):
    launched(SRUN)
    World(0, 1, 0, 2, 5).check_announced(1)
    assert not caplog.records
    World(0, 1, 0, 2, 5).check_announced(0)
    assert len(caplog.records) == 1


def test_a_process_group_announces_its_ranks(launched, caplog, tmp_path):
    launched(SRUN)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        World.detect().check_announced(0)
    finally:
        torch.distributed.destroy_process_group()
    assert not caplog.records


LOADERS = {
    "iterated": lambda urls: ShardDataset(urls),
    "DataLoader": lambda urls: DataLoader(ShardDataset(urls), batch_size=None),
    "ShardLoader": lambda urls: ShardLoader(ShardDataset(urls), batch_size=2),
    "steps": lambda urls: ShardLoader(ShardDataset(urls), batch_size=2, steps=2),
    "ArrayLoader": lambda urls: ArrayLoader(Stream.from_shards(urls), 2, fields={"txt": readers.ragged("u1")}),
    "webdataset": lambda urls: import_module("tarshards.webdataset").WebDataset(urls, shardshuffle=False),
}


@needs_torch
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_warn_once_when_an_iteration_begins(launched, caplog, make_shards, name):
    launched(SRUN)
    loader = LOADERS[name](make_shards(2, index=True))
    assert not caplog.records
    for _ in range(2):
        list(loader)
    assert [record.message[:24] for record in caplog.records] == ["srun started 4 processes"]


@needs_torch
def test_the_sampler_of_wids_warns(launched, caplog):
    launched(SRUN)
    sampler = import_module("tarshards.webdataset.wids").DistributedChunkedSampler
    sampler(range(10), num_replicas=4, rank=1)
    assert not caplog.records
    assert len(sampler(range(10))) == 10
    assert len(caplog.records) == 1


@needs_torch
def test_a_world_that_is_given_settles_it(launched, caplog, make_shards):
    launched(SRUN)
    urls = make_shards(2, index=True)
    for loader in (
        ShardDataset(urls, world=World()),
        ShardLoader(ShardDataset(urls, world=World()), batch_size=2),
        ArrayLoader(Stream.from_shards(urls, world=World()), 2, fields={"txt": readers.ragged("u1")}),
    ):
        assert len(list(loader)) in (3, 6)
    assert not caplog.records


def test_what_has_no_ranks_does_not_warn(launched, caplog, make_shards):
    launched(SRUN)
    urls = make_shards(2, index=True)
    assert len(Stream.from_shards(urls).collect()) == len(IndexedShards(urls)) == 6
    assert len(ShardLoader(ShardDataset(urls), batch_size=2)) == 3, "a length is no iteration"
    assert not caplog.records


@needs_torch
def test_workers_warn_once(make_shards, python_with_torch):
    program = """
import sys
from torch.utils.data import DataLoader
from tarshards import ShardDataset, ShardLoader
dataset = ShardDataset(sys.argv[1])
print(sum(1 for _ in range(2) for _ in DataLoader(dataset, batch_size=None, num_workers=2)), flush=True)
print(sum(1 for _ in range(2) for _ in ShardLoader(dataset, batch_size=2, num_workers=2)))
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [python_with_torch, "-c", program, make_shards(2, index=True)]
    done = subprocess.run(command, env=environment | SRUN, capture_output=True, text=True)
    assert done.stdout.split() == ["12", "6"], done.stderr
    assert done.stderr.count("srun started 4 processes") == 2, "the workers, and the process of the ShardLoader"


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
