"""Energon's interface and the iterator of Megatron-LM and Megatron-Bridge, as the guide shows them."""

from __future__ import annotations

import warnings
from collections import Counter
from itertools import islice
from typing import ClassVar

import pytest
import torch

from tarshards.index.energon import export_energon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron import energon
    from megatron.core.rerun_state_machine import RerunDataIterator

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

COUNT = 480  # pairs
BATCH = 8


@energon.stateless
def cook(sample: dict) -> energon.TextSample:
    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["txt"])


class Encoder(energon.DefaultTaskEncoder):
    cookers: ClassVar = [energon.Cooker(cook)]


def theirs(batch_size: int):
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=2)
    options = {"worker_config": config, "batch_size": batch_size, "task_encoder": Encoder()}
    dataset = energon.get_train_dataset(".", shuffle_buffer_size=None, max_samples_per_sequence=100, **options)
    return energon.get_savable_loader(dataset)


def keys(batch) -> list[str]:
    return list(batch["__key__"] if isinstance(batch, dict) else batch.__key__)


@pytest.mark.parametrize("name", ["Energon's", "ours"])
def test_a_trainer_for_energons_loaders_goes_on_with_the_next_batch(from_guide, tmp_path, name):
    """Energon's own loader reads the shards by the index that is made for it."""
    list(export_energon(sorted(map(str, tmp_path.glob("*.tar")))))
    make = theirs if name == "Energon's" else from_guide("energon_pairs").get_savable_loader

    def train(steps: int, saved: str | None = None) -> list[list[str]]:
        loader = make(BATCH)
        if saved is not None:
            loader.restore_state_rank(torch.load(saved, weights_only=False))
        found = [keys(batch) for batch in islice(loader, steps)]
        torch.save(loader.save_state_rank(), f"state-{steps}.pt")
        return found

    whole = train(100)
    assert train(7) == whole[:7]
    assert train(93, "state-7.pt") == whole[7:]
    counts = Counter(key.rpartition("/")[2] for batch in whole[: COUNT // BATCH] for key in batch)
    assert len(counts) == counts.total() == COUNT


def test_ours_goes_on_with_another_batch_size(from_guide):
    make = from_guide("energon_pairs").get_savable_loader
    loader = make(BATCH)
    first = [keys(batch) for batch in islice(loader, 6)]
    state = loader.save_state_rank()
    other = make(3 * BATCH)
    other.restore_state_rank(state)
    rest = [keys(batch) for batch in islice(other, (COUNT - 6 * BATCH) // (3 * BATCH))]
    assert sorted(key for batch in first + rest for key in batch) == [f"{i:05d}" for i in range(COUNT)]


def save(iterators: list[RerunDataIterator], folder, iteration: int) -> None:
    """Write the files that Megatron writes, one for each data-parallel rank."""
    for rank, iterator in enumerate(iterators):
        path = folder / f"iter_{iteration:07d}/train_dataloader_dprank{rank:03d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"dataloader_state_dict": iterator.iterable.save_state()}, path)


def test_an_external_iterator_goes_on_on_other_ranks(from_guide, tmp_path):
    make = from_guide("megatron_pairs").train_iterator
    two = [RerunDataIterator(make(rank, 2, BATCH)) for rank in range(2)]
    seen = [key for iterator in two for _ in range(9) for key in keys(next(iterator))]
    save(two, tmp_path, 9)
    saved = tmp_path / "iter_0000009/train_dataloader_dprank000.pt"
    assert torch.load(saved) == torch.load(saved.with_name("train_dataloader_dprank001.pt"))
    three = [RerunDataIterator(make(rank, 3, BATCH, saved)) for rank in range(3)]
    left = COUNT - len(seen)
    seen += [key for iterator in three for _ in range(left // (3 * BATCH)) for key in keys(next(iterator))]
    assert sorted(seen) == [f"{i:05d}" for i in range(COUNT)]
    assert len({key for iterator in three for key in keys(next(iterator))}) == 3 * BATCH, "the next epoch"
