"""``tarshards demo``, which is ``make demo``, and that it fails when it should."""

import re
import subprocess
from pathlib import Path

import click
import numpy as np
import pytest
from programs import warnings_of

from tarshards import Ledger, ShardDataset, ShardIndexError, build_index, expand_urls, read_samples, write_samples
from tarshards.cli.demo import audit
from tarshards.testing import digits

pytestmark = pytest.mark.docs  # whose first command it is

# Python 3.12 and 3.13 say so of every DataLoader with workers where torch has threads.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def run_demo(python_with_torch, tmp_path):
    """Return a function that runs the program."""

    def run(*arguments):
        command = [python_with_torch, "-m", "tarshards", "demo", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)

    return run


def test_the_demo_learns_and_accounts_for_every_sample(run_demo, tmp_path):
    demo = run_demo("--data", tmp_path)
    assert (demo.returncode, warnings_of(demo.stderr)) == (0, "")
    assert "wrote      8 shards, 1797 samples" in demo.stdout
    epochs, delivered = map(int, re.search(r"written 1797 x (\d+) epochs = delivered (\d+)", demo.stdout).groups())
    assert delivered == 1797 * epochs
    assert re.search(rf"epochs 0 to \d+: {delivered} planned = {delivered} delivered\n", demo.stdout)
    assert re.search(r"dropped +0 samples, 0 repeated\nquarantined +0\n", demo.stdout)
    accuracies = [float(accuracy) for accuracy in re.findall(r"([\d.]+)% of the held-out", demo.stdout)]
    assert len(accuracies) == epochs
    assert accuracies[-1] >= 95


def test_the_demo_fails_below_its_goal(run_demo, tmp_path):
    demo = run_demo("--data", tmp_path, "--epochs", 1)
    assert demo.returncode == 1
    assert re.fullmatch(r"Error: [\d.]+% after 1 epochs; the goal is 95%\n", warnings_of(demo.stderr))


def test_the_shards_hold_the_scans_without_loss(tmp_path):
    from sklearn.datasets import load_digits

    digits.write_digits(tmp_path)
    samples = ShardDataset(f"{tmp_path}/{digits.ALL}").decode("l8").collect()
    assert np.array_equal([np.rint(sample["png"] / 255 * 16) for sample in samples], load_digits().images)
    assert [sample["cls"] for sample in samples] == load_digits().target.tolist()


def test_the_held_out_shards_are_the_rest():
    assert expand_urls(digits.TRAIN) + expand_urls(digits.TEST) == expand_urls(digits.ALL)


def test_both_readers_whose_speed_is_compared_do_the_same(tmp_path):
    writer = digits.write_digits(tmp_path)
    assert list(digits.read_with_tarfile(writer.shards)) == list(read_samples(writer.shards))


def test_nudge_moves_by_one_pixel_at_most():
    import torch

    image = torch.zeros(8, 8)
    image[4, 4] = 1
    places = {tuple(map(int, digits.nudge(image).nonzero()[0])) for _ in range(500)}
    assert places == {(y, x) for y in (3, 4, 5) for x in (3, 4, 5)}


@forks
def test_training_stops_at_a_damaged_shard(tmp_path):
    writer = digits.write_digits(tmp_path)
    damaged = Path(writer.shards[3])
    damaged.write_bytes(damaged.read_bytes()[:100_000])
    ledger = Ledger()
    with pytest.raises(ShardIndexError, match=r"digits-03.tar.index: stale: the shard has 100000 bytes"):
        list(digits.train(tmp_path, seed=0, epochs=1, ledger=ledger))
    with pytest.raises(click.ClickException, match="delivered 0"):
        audit(ledger, written=writer.samples, epochs=1)


@forks
def test_the_audit_misses_samples_of_a_shard_that_is_sound(tmp_path):
    writer = digits.write_digits(tmp_path)
    write_samples(list(read_samples(writer.shards[3]))[:1], writer.shards[3])
    build_index(writer.shards[3]).save(writer.shards[3])
    ledger = Ledger()
    assert len(list(digits.train(tmp_path, seed=0, epochs=1, ledger=ledger))) == 1
    with pytest.raises(click.ClickException, match="written 1797 samples x 1 epochs, delivered 1573"):
        audit(ledger, written=writer.samples, epochs=1)
