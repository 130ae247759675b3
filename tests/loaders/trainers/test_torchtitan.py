"""torchtitan: the guide's loader is what its trainer takes, and resumes on another data-parallel degree."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from tarshards import ShardDataset

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("torchtitan")]

COUNT, BATCH, LENGTH = 480, 8, 64


@pytest.fixture
def build(from_guide):
    loader = from_guide("titan_pairs").PairsDataLoader

    def build(rank: int, degree: int, workers: int = 0):
        """Build it as torchtitan's Trainer does."""
        config = loader.Config(dataset_path="pairs.shards.json", num_workers=workers)
        steps = {"snapshot_every_n_steps": None}
        return config.build(
            dp_world_size=degree, dp_rank=rank, tokenizer=None, seq_len=LENGTH, local_batch_size=BATCH, **steps
        )

    return build


def captions(labels: torch.Tensor) -> list[str]:
    return [bytes(row[row >= 0].tolist()).decode() for row in labels]


def test_it_is_a_loader_of_torchtitan(build):
    from torchtitan.components.dataloader import BaseDataLoader

    loader = build(0, 1, 2)
    assert isinstance(loader, BaseDataLoader)
    assert isinstance(loader, Stateful)
    assert loader.Config(dataset_path="a").to_dict() == {
        "dataset": "",
        "dataset_path": "a",
        "num_workers": 2,
        "seed": 0,
    }


def test_a_batch_has_tokens_patches_and_labels(build):
    inputs, labels = next(iter(build(0, 1)))
    assert labels.dtype == inputs["input"].dtype == torch.int64
    assert {name: tuple(value.shape) for name, value in inputs.items() if name != "__key__"} == {
        "input": (BATCH, LENGTH),
        "positions": (BATCH, LENGTH),
        "pixel_values": (BATCH, 16, 192),
        "grid_thw": (BATCH, 3),
    }
    assert all(isinstance(value, torch.Tensor) for value in inputs.values())
    greys = [int(caption.removeprefix("grey ")) for caption in captions(labels)]
    shades = (inputs["pixel_values"].mean(dim=(1, 2)) + 1) * 127.5
    assert np.abs(shades.numpy() - greys).max() < 2
    assert (inputs["input"][:, 1:] == labels[:, :-1])[labels[:, :-1] >= 0].all()
    assert (inputs["input"][:, :16] == 257).all()


def test_it_resumes_on_another_degree_by_a_distributed_checkpoint(build, tmp_path):
    two = [build(rank, 2) for rank in range(2)]
    seen = [caption for loader in two for _, labels in islice(loader, 9) for caption in captions(labels)]
    assert two[0].state_dict() == two[1].state_dict()
    dcp.save({"dataloader": two[0]}, checkpoint_id=tmp_path / "saved")
    three = [build(rank, 3) for rank in range(3)]
    for loader in three:
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "saved")
    steps = (COUNT - 2 * 9 * BATCH) // (3 * BATCH)
    seen += [caption for loader in three for _, labels in islice(loader, steps) for caption in captions(labels)]
    assert sorted(seen) == sorted(f"grey {number % 256}" for number in range(COUNT))


def test_torchtitans_own_loader_refuses_that(build):
    from torchtitan.components.dataloader import ParallelAwareDataloader

    data = ShardDataset("pairs.shards.json")
    state = ParallelAwareDataloader(data, 0, 2).state_dict()
    with pytest.raises(AssertionError, match="resharding is not supported"):
        ParallelAwareDataloader(data, 0, 3).load_state_dict(state)
