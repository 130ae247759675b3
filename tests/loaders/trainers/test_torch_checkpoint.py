"""torch.distributed.checkpoint: what 2 ranks save after any batch, 3 ranks load, and deliver the rest in its order."""

from __future__ import annotations

import json
import subprocess
from itertools import chain, zip_longest
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("checkpoint_rank.py")
SIZES = [100, 3, 77, 60]  # 240 samples
SIZE, STEPS = 4, 25
STOPS = [0, 11, 25, 30]  # of 30 batches on two ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, python_with_torch) -> tuple[str, list, list]:
    """What each rank of two jobs has noted: 2 ranks save after each stop, 3 load and read the rest."""
    from tarshards import ShardWriter

    pytest.importorskip("torch", reason="needs torch")
    folder = tmp_path_factory.mktemp("job")
    numbers = iter(range(sum(SIZES)))
    for shard, size in enumerate(SIZES):
        with ShardWriter(f"{folder}/set-{shard}-%d.tar", max_samples=1000) as writer:
            for _, number in zip(range(size), numbers):
                writer.write({"__key__": f"{number:06d}", "cls": number})
    settings = {"folder": str(folder), "urls": f"{folder}/set-{{0..3}}-0.tar", "size": SIZE, "stops": STOPS}
    saved, loaded = (run(python_with_torch, settings | {"ranks": n, "resume": n == 3}) for n in (2, 3))
    return settings["urls"], saved, loaded


def run(python: str, settings: dict) -> list[dict]:
    folder, ranks = Path(settings["folder"]), range(settings["ranks"])
    path = folder / f"{len(ranks)}.json"
    path.write_text(json.dumps(settings))
    job = [subprocess.Popen([python, PROGRAM, path, str(rank)], stderr=subprocess.PIPE) for rank in ranks]
    for process in job:
        _, words = process.communicate(timeout=300)
        assert process.returncode == 0, words.decode()
    return [json.loads((folder / f"{len(ranks)}-{rank}.json").read_text()) for rank in ranks]


def in_order(ranks: list[list[list[int]]]) -> list[int]:
    """The samples in the order of the epoch: position p is rank (p mod ranks)'s."""
    each = [list(chain.from_iterable(batches)) for batches in ranks]
    return [value for values in zip_longest(*each) for value in values if value is not None]


def epochs(name: str, urls: str) -> list[list[int]]:
    """The orders of three epochs on one rank."""
    from checkpoint_rank import LOADERS

    loader = LOADERS["shard_loader" if name == "in_steps" else name](urls, SIZE)
    return [[int(value) for batch in loader for value in batch["cls"]] for _ in range(3)]


@pytest.mark.parametrize("name", ["shard_loader", "array_loader", "mixture", "in_steps"])
def test_three_ranks_go_on_where_two_have_saved(jobs, name):
    urls, saved, loaded = jobs
    first, *later = epochs(name, urls)
    for stop in STOPS:
        before, after = ([rank[f"{name}-{stop}"] for rank in job] for job in (saved, loaded))
        assert all(rank["equal"] for rank in (*before, *after))
        taken, found = (in_order([rank["batches"] for rank in job]) for job in (before, after))
        assert taken == first[: 2 * SIZE * (min(stop, STEPS) if name == "in_steps" else stop)]
        rest = first[len(taken) :]
        repeats = -len(rest) % 3  # by which the tail is filled
        assert found[: len(rest)] == rest[: len(found)]
        beyond = found[len(rest) + repeats :]
        assert beyond == [*chain(*later)][: len(beyond)]
        if name == "in_steps":
            assert [len(rank["batches"]) for rank in after] == [STEPS - min(stop, STEPS) % STEPS] * 3
        else:
            assert len(found) == (len(rest) + repeats or len(later[0]))
