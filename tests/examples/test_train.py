"""The example of training: killed and preempted, resumed on other numbers of ranks, it trains on the same batches."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from soak import SOAK
from with_torch import ShardDataset

from tarshards import ArrayLoader, World, readers

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.interop, pytest.mark.soak]

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples/README.md").read_text()
PROGRAM = Path(__file__).with_name("recorded_training.py")
EPOCHS, BATCH, EVERY = 5, 96, 5
SAMPLES = 6 * 225  # in an epoch


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A folder with the shards of make demo, where it puts them."""
    folder = tmp_path_factory.mktemp("checkout")
    program = "from tarshards.testing.digits import write_digits; write_digits('data/digits')"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
    return folder


def line_of_the_readme() -> list[str]:
    """The words after ``torchrun --standalone --nproc-per-node 2``."""
    (line,) = re.findall(r"^torchrun --standalone --nproc-per-node 2 ((?:.*\\\n)*.*)", README, re.MULTILINE)
    return shlex.split(line.replace("\\\n", ""))


@pytest.fixture(scope="module")
def torchrun(python_with_torch, digits) -> Callable[..., subprocess.CompletedProcess]:
    """Return a function that runs the program that *arguments* begin with on *ranks*, to its end."""

    def run(ranks: int, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
        python = python_with_torch if '"torchrun"' not in environment.get("RECORD", "") else sys.executable
        launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, **environment}
        command = [*launcher, *map(str, arguments)]
        return subprocess.run(command, cwd=digits, env=variables, capture_output=True, text=True, timeout=300)

    return run


def records(folder: Path, run: int) -> list[list[dict]]:
    """The records of each rank of a run: where it began, and its batches."""
    paths = sorted(folder.glob(f"{run}-*.jsonl"))
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    for rank in ranks:
        with suppress(FileNotFoundError):  # of torchrun's orphans, wait for the last
            while Path(f"/proc/{rank[0]['pid']}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
    return ranks


def place(state: dict) -> int:
    """The number of the batch that comes after *state*, from the first of the training."""
    assert state["position"] % BATCH == 0
    return state["epoch"] * -(-SAMPLES // BATCH) + state["position"] // BATCH


def undisturbed(digits: Path) -> list[list[str]]:
    """The keys of every batch of the training, on one rank."""
    dataset = ShardDataset(f"{digits}/data/digits/digits-{{00..05}}.tar", shuffle=True, seed=0, world=World())
    loader = ArrayLoader(dataset, BATCH, fields={"cls": readers.integer()})
    return [list(batch["__key__"]) for _ in range(EPOCHS) for batch in loader]


class Chain(NamedTuple):
    """Runs of the training, each resumed from the previous one: how they ended, and the records of their ranks."""

    checkpoint: Path
    runs: list[tuple[str | None, list[list[dict]]]]
    printed: str  # by the last


@pytest.fixture(scope="module", params=range(SOAK))
def killed(request, torchrun, tmp_path_factory) -> Chain:
    rng, folder = random.Random(request.param), tmp_path_factory.mktemp("records")
    arguments = [*line_of_the_readme()[1:-1], folder / "digits.pt"]
    test = arguments.index("--test")
    del arguments[test : test + 2]  # only the training is recorded
    runs = []
    ends = [(2, "rank"), (3, "preempted"), *[(2, "torchrun")] * (SOAK > 1), (1, None)]
    for run, (ranks, end) in enumerate(ends):
        record = {"folder": str(folder), "run": run, "end": end}
        record |= {"rank": rng.randrange(ranks), "batch": rng.randrange(EVERY + 1, 20)} if end else {}
        done = torchrun(ranks, PROGRAM, *arguments, RECORD=json.dumps(record))
        assert (done.returncode == 0) == (end is None), done.stderr
        assert ("exitcode  : 143 " in done.stderr) == (end == "preempted"), done.stderr
        runs.append((end, records(folder, run)))
        assert len(runs[-1][1]) == ranks
        assert not end or len(runs[-1][1][record["rank"]]) - 1 == record["batch"], done.stderr
    return Chain(folder / "digits.pt", runs, done.stdout)


@pytest.fixture(scope="module")
def whole(torchrun) -> str:
    """The output of the README's command line; its checkpoint is whole.pt."""
    done = torchrun(2, ROOT / line_of_the_readme()[0], *line_of_the_readme()[1:-1], "whole.pt")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_anywhere_it_trains_on_each_batch_once(killed, digits):
    expected = undisturbed(digits)
    begins = [*(place(run[0][0]["state"]) for _, run in killed.runs), len(expected)]
    kept: list[str] = []
    for (end, run), begin, after in zip(killed.runs, begins, begins[1:]):
        for rank, (first, *batches) in enumerate(run):
            assert place(first["state"]) == begin
            for batch, wanted in zip(batches, expected[begin:]):
                assert batch["keys"] == wanted[rank :: len(run)]
        steps = min(len(batches) for _, *batches in run)
        repeated = begin + steps - after
        assert 0 <= repeated <= EVERY if end in ("rank", "torchrun") else repeated == 0
        kept += [key for rank in run for batch in rank[1 : 1 + after - begin] for key in batch["keys"]]
    assert Counter(kept) == {key: EPOCHS for keys in expected for key in keys}
    left = sum(map(len, expected[begins[-2] :]))
    assert killed.printed.splitlines()[-1] == f"delivered {left} samples"  # after the ledger's check over the ranks


def test_the_line_of_the_readme_learns(whole):
    assert f"delivered {EPOCHS * SAMPLES} samples" in whole
    assert float(re.search(r"accuracy ([\d.]+)%", whole)[1]) > 85


def test_killed_anywhere_it_comes_to_the_same_model(killed, whole, digits):
    resumed, undisturbed = (torch.load(path, weights_only=True) for path in (killed.checkpoint, digits / "whole.pt"))
    assert resumed["loader"] == undisturbed["loader"]
    # Another number of ranks adds the same gradients in another order, and processors differ in how they add.
    for name, weights in undisturbed["model"].items():
        torch.testing.assert_close(resumed["model"][name], weights, rtol=0, atol=2e-3)
