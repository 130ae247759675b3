"""Runs of accelerate, for tests; as a program one rank of a job: ``python accelerate_runs.py URLS FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from our_loaders import OURS
from torch.utils.data import DataLoader

from tarshards import ShardDataset, World
from tarshards.errors import WorldError

STEPS = 4  # of gradient accumulation


class Training:
    """A model, its optimizer and a loader that accelerate has prepared, and what was trained on."""

    def __init__(self, loader: Any, **configuration: Any):
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=STEPS,
            dataloader_config=DataLoaderConfiguration(**configuration),
        )
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if not isinstance(loader, DataLoader):
            self.accelerator.register_for_checkpointing(self.loader)
        self.seen: list[list[int]] = []
        self.steps = 0

    def epoch(self, stop: int | None = None) -> None:
        """Train for one epoch, or up to the *stop*-th batch."""
        for number, batch in enumerate(self.loader, 1):
            with self.accelerator.accumulate(self.model):
                numbers = torch.as_tensor(batch["cls"], dtype=torch.float32)
                self.accelerator.backward(self.model(numbers[:, None]).sum())
                self.optimizer.step()
                self.steps += self.accelerator.sync_gradients
                self.optimizer.zero_grad()
            self.seen.append([int(value) for value in numbers])
            if number == stop:
                break


def resumed(make: Any, urls: str, size: int, folder: Path, stop: int) -> tuple[list[Any], list[Any]]:
    """Save after *stop* batches of the second epoch; return what came after these, and after loading them."""
    whole = Training(make(urls, size))
    whole.epoch()
    whole.epoch(stop)
    whole.accelerator.save_state(folder)
    expected = Training(make(urls, size))
    for _ in range(3):
        expected.epoch()
    fresh = Training(make(urls, size))
    fresh.accelerator.load_state(folder)
    fresh.epoch()
    fresh.epoch()
    return expected.seen[len(whole.seen) :], fresh.seen


def numbers_only(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": sample["cls"]}


def torchs_loader(urls: str, size: int, workers: int = 0, **options: Any) -> DataLoader:
    data = ShardDataset(urls, shuffle=True, **options).decode().map(numbers_only)
    return DataLoader(data, batch_size=size, num_workers=workers)


#: The ways in which accelerate shares out an iterable dataset.
MODES: dict[str, dict[str, bool]] = {
    "dispatched": {"dispatch_batches": True},
    "dispatched, split": {"dispatch_batches": True, "split_batches": True},
    "sharded": {"dispatch_batches": False},
    "sharded, split": {"dispatch_batches": False, "split_batches": True},
    "stateful": {"dispatch_batches": False, "use_stateful_dataloader": True},
}


def refusal(training: Training) -> str:
    """The error that an epoch ends with, if there is one."""
    try:
        training.epoch()
    except WorldError as error:
        return str(error)
    return ""


def run_rank(urls: str, folder: Path) -> dict[str, Any]:
    """Train with every loader and in every mode of accelerate; return what this rank has seen."""
    seen: dict[str, Any] = {"orders": {}, "steps": {}, "resumed": {}, "refused": {}}
    for make in OURS:
        training = Training(make(urls, 100))
        for _ in range(2):
            training.epoch()
        seen["orders"][make.__name__] = training.seen
        seen["steps"][make.__name__] = training.steps
        seen["resumed"][make.__name__] = resumed(make, urls, 100, folder / make.__name__, 7)
    for name, mode in MODES.items():
        for workers in (0, 2):
            place = f"{name}, {workers} workers"
            training = Training(torchs_loader(urls, 100, workers, world=World()), **mode)
            for _ in range(2):
                training.epoch()
            seen["orders"][place] = training.seen
            if not (mode["dispatch_batches"] and workers):  # which one rank alone would find; the others wait for it
                seen["refused"][place] = refusal(Training(torchs_loader(urls, 100, workers), **mode))
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    written = Path(sys.argv[2]) / f"{os.environ['RANK']}.json"
    written.write_text(json.dumps(run_rank(sys.argv[1], Path(sys.argv[2]))))
