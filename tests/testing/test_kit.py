"""The kit passes right loaders, and finds each fault with the least example."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import toy_loaders as toys
from soak import SOAK

import tarshards
from tarshards.index import build
from tarshards.testing import (
    Chain,
    LoaderFault,
    check_chain,
    check_epoch,
    check_resume,
    check_shuffle,
    each_world,
    numbers_of,
    small_worlds,
    write_shards,
)

STEADY = ("workers", "batch_size")
STREAMED = ("seeds", "epochs", "samples", "workers")

resume = partial(check_resume, worlds=100, chains=20, steady=STEADY)
resume_there = partial(check_resume, worlds=100, chains=20, changes=())
epoch = partial(check_epoch, setups=300)


@pytest.mark.soak
def test_right_loaders_pass():
    worlds, chains = (100, 50) if SOAK > 1 else (10, 5)
    report = check_resume(toys.Planned, worlds=worlds, chains=chains, steady=STEADY)
    assert (report.worlds, report.chains) == (worlds, chains)
    assert report.resumes > 15 * worlds
    resume(toys.Filtered, worlds=worlds, chains=chains)
    check_resume(toys.Streamed, worlds=2 * worlds // 5, chains=chains // 5, changes=())
    epoch(toys.Planned, setups=3 * worlds, steady=STEADY)
    epoch(toys.Filtered, setups=3 * worlds, expected=lambda setup: [n for n in range(setup.total) if n % 3 != 1])
    assert max(check_shuffle(toys.Planned).values()) < 4
    check_shuffle(toys.Streamed, degrees=STREAMED)


ONE = "ranks=1 workers=0 batch_size=1"
ANY = "shards=6+6+6+6 | ranks=1 workers=0 batch_size=2"
MUTANTS = {
    "DropsTheTail": (epoch, "lost", "shards=1 | ranks=1 workers=0 batch_size=2"),
    "PadsSilently": (epoch, "repeated", "shards=1 | ranks=2 workers=0 batch_size=1"),
    "WrongRankSlice": (epoch, "lost", "shards=1 | ranks=2 workers=0 batch_size=1"),
    "UnevenSteps": (epoch, "uneven", "shards=2 | ranks=2 workers=0 batch_size=1"),
    "WrongLength": (epoch, "length", "shards=1 | ranks=2 workers=0 batch_size=1"),
    "HasNoEnd": (epoch, "endless", f"shards=1 | {ONE}"),
    "RepeatsAfterResume": (resume, "repeated", f"shards=2 | {ONE} stop=0+1 | {ONE}"),
    "ResumesOneBatchLate": (resume, "lost", f"shards=2 | {ONE} stop=0+1 | {ONE}"),
    "LosesStateOnSecondResume": (resume, "repeated", f"shards=2 | {ONE} stop=0+1 | {ONE} stop=0+0 | {ONE}"),
    "ReordersWithWorkers": (
        resume,
        "reordered",
        f"shards=3 | {ONE} stop=0+1 | ranks=1 workers=2 batch_size=1",
    ),
    "DropsFilteredCounts": (
        resume,
        "lost",
        f"shards=3 | ranks=1 workers=0 batch_size=3 stop=0+1 | ranks=1 workers=0 batch_size=3 stop=0+1 | {ONE}",
    ),
    "SkipsAnEpoch": (resume, "reordered", f"shards=2 | {ONE} stop=1+0 | {ONE}"),
    "HangsAtTheEnd": (partial(resume, limit=1), "hung", f"shards=1 | {ONE} stop=0+1 | {ONE}"),
    "RefusesOtherRanks": (resume, "refused", f"shards=1 | ranks=2 workers=0 batch_size=1 stop=0+0 | {ONE}"),
    "BufferLost": (resume_there, "lost", f"shards=2 | {ONE} stop=0+1 | {ONE}"),
    "IgnoresTheEpoch": (check_shuffle, "epochs", ANY),
    "IgnoresTheSeed": (check_shuffle, "seeds", ANY),
    "AddsTheEpochToTheSeed": (check_shuffle, "epochs", ANY),
    "RotatesInsteadOfShuffling": (check_shuffle, "seeds", ANY),
    "SharesASeedBetweenWorkers": (
        partial(check_shuffle, degrees=STREAMED),
        "workers",
        "shards=6+6+6+6 | ranks=1 workers=2 batch_size=2",
    ),
    "SmallBuffer": (partial(check_shuffle, degrees=STREAMED), "seeds", ANY),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_fault_is_found_with_the_least_example(name):
    check, kind, chain = MUTANTS[name]
    with pytest.raises(LoaderFault) as caught:
        check(getattr(toys, name))
    assert (caught.value.kind, str(caught.value.chain)) == (kind, str(Chain.parse(chain)))


def test_a_fault_says_what_came_and_repeats():
    with pytest.raises(LoaderFault) as caught:
        resume(toys.RepeatsAfterResume)
    fault = caught.value
    assert str(fault).split("\n") == [
        "repeated: sample 0 after the resume",
        "before the resume: 0",
        "rank 0 after it: [0] [1]",
        "due in all: 0 1",
        f"chain: {fault.chain}",
    ]
    assert fault.samples == (0,)
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)
    with pytest.raises(LoaderFault, match="repeated: sample 0"):
        check_chain(toys.RepeatsAfterResume, str(fault.chain))
    check_chain(toys.Planned, fault.chain)


def test_a_small_buffer_does_not_fill_a_large_window():
    degrees = ("windows",)
    check_shuffle(toys.SmallBuffer, degrees=degrees, window=3)
    with pytest.raises(LoaderFault, match="windows"):
        check_shuffle(toys.SmallBuffer, degrees=degrees, window=20)


def test_padding_and_dropping_are_promises():
    check_epoch(Padding, tail="pad")
    check_resume(Padding, tail="pad", worlds=100)
    with pytest.raises(LoaderFault, match="uneven"):
        check_epoch(toys.Planned, tail="drop", setups=300)


class Padding(toys.Planned):
    def share(self, rest):
        others = self.order() * self.setup.ranks
        return super().share(rest + others[: -len(rest) % self.setup.ranks])


def test_shards_appear_whole_whichever_process_is_first(tmp_path, monkeypatch):
    """Ranks that are processes write the same shards at the same time."""
    original, seen = build.build_index, []

    def build_index(url):
        seen.append((tmp_path / "2-1").exists())
        if len(seen) == 2:
            shutil.copytree(Path(url).parent, tmp_path / "2-1")  # of another process
        return original(url)

    monkeypatch.setattr(build, "build_index", build_index)
    urls = write_shards(tmp_path, (2, 1))
    assert seen == [False, False]
    assert [Path(url).name for url in urls] == ["00.tar", "01.tar"]
    assert all(Path(url).exists() for url in urls)
    assert [path.name for path in tmp_path.iterdir()] == ["2-1"]


class Meeting(toys.Planned):
    """Its ranks could meet: rank 0 listens at the port that all are given."""

    def __init__(self, setup):
        super().__init__(setup)
        if setup.rank == 0:
            socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ranks_may_be_processes():
    check_resume(Meeting, worlds=2, chains=1, times=1, steady=STEADY, processes=True)
    with pytest.raises(LoaderFault, match="hung: rank 0 of 1: no end within"):
        resume(toys.HangsAtTheEnd, worlds=1, chains=0, times=1, processes=True, limit=1)
    with pytest.raises(LoaderFault, match="raised: rank 0 of 1: the process died with exit code 3"):
        resume(Dies, worlds=1, chains=0, times=1, processes=True)


class Dies(toys.Planned):
    def __iter__(self):
        os._exit(3)


def test_a_loader_finds_its_rank_in_the_environment():
    found = set()

    def make(setup):
        found.add((setup.rank, os.environ["RANK"], setup.ranks, os.environ["WORLD_SIZE"]))
        return toys.Planned(setup)

    before = os.environ.get("RANK")
    check_chain(make, "shards=4 | ranks=2 workers=0 batch_size=1 stop=0+1 | ranks=1 workers=0 batch_size=1")
    assert found == {(0, "0", 2, "2"), (1, "1", 2, "2"), (0, "0", 1, "1")}
    assert os.environ.get("RANK") == before


@each_world(3)
def test_a_world_is_a_test(world):
    check_resume(toys.Planned, worlds=[world], chains=0, steady=STEADY)


def test_worlds_are_all_and_the_least_come_first():
    worlds = small_worlds()
    assert len(worlds) == len(set(worlds)) == 14_976
    assert [world[0].total for world in worlds] == sorted(world[0].total for world in worlds)
    assert max(world[0].total for world in worlds) == 12
    assert small_worlds(100)[0] == worlds[0]


def test_numbers_of_batches():
    assert numbers_of([{"cls": b"1", "jpg": b""}, {"cls": 2}]) == [1, 2]
    assert numbers_of({"__key__": ["000003", "000004"], "x": [1, 2]}) == [3, 4]
    assert numbers_of({"only": np.array([[5], [6]])}) == [5, 6]
    for batch in ({"a": 1, "b": 2}, "x", None, 1.5, True):
        with pytest.raises(TypeError, match="read="):
            numbers_of(batch)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_resume(toys.Planned, changes=["rank"]), "changes are of ranks, workers, batch_size, not rank"),
        (lambda: check_resume(toys.Planned, tail="wrap"), "tail must be exact, pad or drop, not 'wrap'"),
        (lambda: check_epoch(toys.Planned, steady=["ranks"]), "steady names workers and batch_size, not ranks"),
        (lambda: check_shuffle(toys.Planned, degrees=["all"]), "degrees are of seeds, .*, not all"),
        (lambda: Chain.parse("shards=2"), "'shards=2' is not a chain such as 'shards="),
        (lambda: Chain.parse("ranks=2 | x"), "is not a chain"),
        (lambda: check_chain(toys.Planned, f"shards=1 | {ONE} stop=0+5 | {ONE}"), "not all ranks take the batches"),
        (lambda: check_chain(toys.Planned, f"shards=1 | {ONE} stop=9+0 | {ONE}"), "not all ranks take the batches"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_kit_needs_only_the_standard_library():
    """A loader is tested in its own environment, which may lack all that we require."""
    others = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'__main__', '__mp_main__'}"
    code = f"import sys, tarshards.testing; print(*{others})"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=HERE)
    assert done.stdout.split() == ["tarshards"], done.stderr


HERE = {**os.environ, "PYTHONPATH": str(Path(tarshards.__file__).parents[1])}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tarshards", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, env=HERE)


def test_the_command():
    done = run("resume", "toy_loaders:Planned", "--worlds", "20", "--chains", "2", "--steady", "workers")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: 20 worlds, 2 chains, ")
    done = run("epoch", "toy_loaders:PadsSilently")
    assert done.returncode == 1
    assert done.stdout.startswith("repeated: sample 0 in epoch 0\n")
    done = run("shuffle", "toy_loaders:Planned", "--degrees", "epochs,shards", "--seeds", "50")
    assert done.stdout.startswith("ok: ")
    done = run("resume", "toy_loaders:BufferLost", "--chain", f"shards=1+1 | {ONE} stop=0+1 | {ONE}")
    assert done.returncode == 1
    assert "lost: sample 1" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resume", "toy_loaders"], "toy_loaders: .*name a function as module:function"),
        (["resume", "toy_loaders:Planned", "--changes", "rank"], "rank is none of ranks, workers, batch_size"),
        (["resume", "toy_loaders:Planned", "--chain", "x"], "--chain: 'x' is not a chain"),
        (["no-such-check"], "there is no command 'no-such-check'"),
    ],
)
def test_wrong_command_lines(words, told):
    done = run(*words)
    assert done.returncode == 2
    assert re.search(told, done.stderr)


def test_the_help_names_the_commands():
    assert {"resume", "epoch", "shuffle"} <= set(run("--help").stdout.split())
