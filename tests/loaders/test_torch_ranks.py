"""Whole jobs: ranks of a process group with their own workers, killed, resumed, and compared with each other."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

TRAINING = Path(__file__).with_name("training.py")
SIZES = [40, 3, 55, 22, 1, 30]  # samples of the shards, 151 in all


@pytest.fixture
def urls(make_uneven) -> str:
    return make_uneven(SIZES)


@pytest.fixture
def start(tmp_path, python_with_torch):
    """Return a function that starts a job, and returns its folder and the processes of its ranks."""
    processes: list[subprocess.Popen] = []

    def begin(name: str, **settings):
        folder = tmp_path / name
        folder.mkdir()
        defaults = {"folder": str(folder), "size": 4, "workers": 0, "ranks": 2}
        (folder / "settings.json").write_text(json.dumps(defaults | settings))
        commands = [
            [python_with_torch, TRAINING, folder / "settings.json", str(rank)]
            for rank in range(settings.get("ranks", 2))
        ]
        job = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
        processes.extend(job)
        return folder, job

    yield begin
    for process in processes:
        if process.poll() is None:
            kill(process)
        process.communicate()


def kill(process: subprocess.Popen) -> None:
    """End a rank at once, and so its workers soon."""
    process.kill()


def outcomes(folder: Path, job: list[subprocess.Popen]) -> list[dict]:
    for process in job:
        _, words = process.communicate(timeout=300)
        assert process.returncode == 0, words.decode()
    return [json.loads((folder / f"{rank}.done").read_text()) for rank in range(len(job))]


def values(parts) -> list[int]:
    return [value for part in parts for batch in part["batches"] for value in batch]


@pytest.mark.parametrize(("ranks", "workers", "tail"), [(3, 0, "pad"), (2, 2, "drop")])
def test_ranks_take_equal_steps_and_their_accounts_add_up(start, urls, ranks, workers, tail):
    """A model in DistributedDataParallel waits for all ranks at every step: an uneven one would hang."""
    parts = outcomes(*start("job", urls=urls, ranks=ranks, workers=workers, tail=tail, train=True, check=100))
    assert len({part["steps"] for part in parts}) == 1
    assert all(part["steps"] == part["length"] for part in parts)
    assert [part["check"] for part in parts] == ["passed"] * ranks
    seen = Counter(values(parts))
    if tail == "pad":
        assert sorted(seen) == list(range(151))
        assert seen.total() == 153
    else:
        assert (len(seen), seen.total()) == (150, 150)


def test_a_job_killed_in_mid_epoch_goes_on_elsewhere(start, urls):
    """2 ranks x 2 workers are killed by SIGKILL; 3 x 1 go on and are killed; 1 x 0 reads the rest."""
    state, seen = {}, []
    for number, (ranks, workers) in enumerate([(2, 2), (3, 1)]):
        folder, job = start(f"{number}", urls=urls, ranks=ranks, workers=workers, save=0.3, **state)
        paths = [folder / f"{rank}.saved" for rank in range(ranks)]
        deadline = time.monotonic() + 300
        while not all(path.exists() and len(json.loads(path.read_text())["batches"]) > 2 for path in paths):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in job)
            time.sleep(0.02)
        for process in job:
            kill(process)
        for process in job:
            process.wait()
        saved = [json.loads(path.read_text()) for path in paths]
        last = min(saved, key=lambda part: len(part["batches"]))  # what all ranks have got to
        for part in saved:
            part["batches"] = part["batches"][: len(last["batches"])]
        seen += values(saved)
        state = {"state": last["state"]}
        assert len(json.dumps(last["state"])) < 2048
    seen += values(outcomes(*start("rest", urls=urls, ranks=1, size=16, **state)))
    assert Counter(seen) == Counter(range(151))


@pytest.mark.parametrize("difference", ["seed", "epoch", "dataset"])
def test_a_rank_that_reads_something_else_is_found(start, urls, make_uneven, difference):
    other = {"seed": {"seed": 1}, "epoch": {"epoch": 1}}.get(difference) or {"urls": make_uneven([20, 90], "other")}
    parts = outcomes(*start("job", urls=urls, check=100, **{"rank 1": other}))
    place = "other-0000" if difference == "dataset" else "set-0000"
    pattern = rf"rank 1 has read other epochs .*: \d+ samples of .*{place}\.tar, and rank 0 \d+ .*set-0000\.tar"
    assert all(re.fullmatch(pattern, part["check"]) for part in parts)


def test_a_rank_that_does_not_come_is_told(tmp_path, python_with_torch):
    """Two ranks; one leaves before the check."""
    import torch

    from tarshards import Ledger
    from tarshards.errors import AuditError

    code = f"""
import torch
torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=1, world_size=2)
input()
"""
    other = subprocess.Popen([python_with_torch, "-c", code], stdin=subprocess.PIPE)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=2)
        with pytest.raises(AuditError, match=r"not all ranks arrived within 1 s: .*[Rr]ank 1"):
            Ledger().check(torch.distributed.group.WORLD, timeout=1)
    finally:
        torch.distributed.destroy_process_group()
        other.communicate(b"\n")
