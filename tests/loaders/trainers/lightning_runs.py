"""Runs of Lightning's Trainer, for tests; as a program one of two ranks: ``python lightning_runs.py URLS FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from our_loaders import OURS
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tarshards import ShardDataset

EPOCHS = 3
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": EPOCHS,
}


def torchs_loader(urls: str, size: int, **options: Any) -> DataLoader:
    """Without a length: torch's does not count the short batches of each worker, and Lightning stops at it."""
    data = ShardDataset(urls, shuffle=True, **options).decode().batched(size)
    return DataLoader(data, batch_size=None, num_workers=2)


def torchdatas_loader(urls: str, size: int, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(ShardDataset(urls, shuffle=True, **options).decode(), batch_size=size)


class Model(pl.LightningModule):
    """Notes the keys that it is trained and validated on, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[tuple[int, list[str]]] = []
        self.validated: list[tuple[int, list[str]]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.trained.append((self.current_epoch, list(batch["__key__"])))
        return self.layer(torch.as_tensor(batch["cls"], dtype=torch.float32)[:, None]).sum()

    def validation_step(self, batch: Any, number: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, list(batch["__key__"])))

    def predict_step(self, batch: Any, number: int) -> list[str]:
        return list(batch["__key__"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Saving(pl.Callback):
    """Saves a checkpoint after some batches, at the end of the first epoch, and after its validation."""

    def __init__(self, folder: Path, stops: list[tuple[int, int]]):
        self.folder, self.stops = folder, stops

    def on_train_batch_end(self, trainer: Any, module: Model, outputs: Any, batch: Any, number: int) -> None:
        if (trainer.current_epoch, number + 1) in self.stops:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}-{number + 1}")

    def on_train_epoch_end(self, trainer: Any, module: Model) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "end")

    def on_validation_end(self, trainer: Any, module: Model) -> None:
        if trainer.current_epoch == 0 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / "validated")


def fit(train: Any, validate: Any = None, *callbacks: Any, start: Any = None, **options: Any) -> tuple[Model, Any]:
    """Train a new model; return it and the trainer."""
    model, trainer = Model(), pl.Trainer(**{"devices": 1, "callbacks": list(callbacks)} | QUIET | options)
    trainer.fit(model, train, validate, ckpt_path=start, weights_only=False)
    return model, trainer


def fit_on_two_ranks(urls: str, folder: Path) -> None:
    """Train with each loader, and again from a checkpoint of the middle; write what this rank was trained on."""
    ddp = {"devices": 2, "strategy": "ddp"}
    seen = {}
    for make in [*OURS, torchs_loader]:
        saved = folder / make.__name__
        whole, trainer = fit(make(urls, 100), None, Saving(saved, [(1, 7)]), **ddp)
        seen[make.__name__] = {"whole": whole.trained}
        if make in OURS:
            seen[make.__name__]["resumed"] = fit(make(urls, 100), start=saved / "1-7", **ddp)[0].trained
        rank = trainer.global_rank
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit_on_two_ranks(sys.argv[1], Path(sys.argv[2]))
