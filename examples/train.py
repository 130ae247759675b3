"""Train a classifier of handwritten digits under torchrun; killed or preempted anywhere, it resumes exactly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tarshards import ArrayLoader, ShardDataset, World, open_url, readers

FIELDS = {"png": readers.image(8, dtype="float32", layout="CHW"), "cls": readers.integer()}
PREEMPTED = 128 + signal.SIGTERM  # not 0, so that torchrun, tarjob and Kubernetes start the training again


def classifier() -> nn.Module:
    """Return an untrained network that maps a batch of 8 x 8 images to ten scores each."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


class Training:
    """The model, its optimizer and the position in the data: together they are the checkpoint."""

    def __init__(self, shards: str, output: Path, *, batch: int, seed: int):
        ranks = distributed.get_world_size()
        if batch % ranks:
            raise click.UsageError(f"--batch {batch} cannot be shared out equally among {ranks} ranks")
        self.output = output
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        # A global batch has the same samples for any number of ranks: rank r takes every ranks-th sample from r.
        self.loader = ArrayLoader(
            ShardDataset(shards, shuffle=True, seed=seed), batch // ranks, fields=FIELDS, device=str(self.device)
        )
        torch.manual_seed(seed)
        self.model = classifier().to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 2e-3)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        self.resume()
        self.replicated = DistributedDataParallel(self.model)
        self.terminated = False
        signal.signal(signal.SIGTERM, self.terminate)

    def terminate(self, *_: object) -> None:
        """Record that this rank must end."""
        self.terminated = True

    def resume(self) -> None:
        """Load the checkpoint, if there is one: rank 0 reads it for all."""
        states: list[Any] = [None]
        if distributed.get_rank() == 0 and self.output.exists():
            states = [torch.load(self.output, map_location="cpu", weights_only=True)]
        distributed.broadcast_object_list(states)
        if states[0] is not None:
            for name, part in self.parts.items():
                part.load_state_dict(states[0][name])

    def save(self) -> None:
        """Write the checkpoint, the same on every rank; it replaces the previous one when it is complete."""
        if distributed.get_rank() == 0:
            with open_url(self.output, "wb") as file:
                torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)

    def run(self, epochs: int, every: int) -> None:
        """Train until *epochs* are complete; save after each epoch, and every *every* steps in between."""
        while (epoch := self.loader.state_dict()["epoch"]) < epochs:
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.replicated(batch["png"]), batch["cls"])
                loss.backward()
                self.optimizer.step()
                if self.is_preempted():
                    self.save()
                    distributed.barrier()  # no rank may leave, which would end the others, before this is done
                    distributed.destroy_process_group()  # its threads would abort the rank at exit
                    sys.exit(PREEMPTED)
                if self.loader.state_dict()["batches"] % every == 0:  # 0 after the last batch, as in the next epoch
                    self.save()
            self.say(f"epoch {epoch}: loss {loss.item():.3f}")
        self.loader.ledger.check(distributed.group.WORLD)  # planned = delivered + ..., over all ranks
        self.say(f"delivered {self.over_ranks(self.loader.ledger.samples, 'SUM')} samples")

    def is_preempted(self) -> bool:
        """Whether a rank has received SIGTERM; all ranks get the same answer at the same step."""
        return bool(self.over_ranks(self.terminated, "MAX"))

    def over_ranks(self, number: int, reduce: str) -> int:
        """Return the sum or the maximum over all ranks."""
        value = torch.tensor(number, dtype=torch.int64, device=self.device)
        distributed.all_reduce(value, getattr(distributed.ReduceOp, reduce))
        return int(value.item())

    def accuracy(self, shards: str) -> float:
        """Return the fraction of images in *shards* that the model labels correctly; this rank reads all of them."""
        right = []
        with torch.no_grad():
            for batch in ArrayLoader(ShardDataset(shards, world=World()), 256, fields=FIELDS, device=str(self.device)):
                right.append(self.model(batch["png"]).argmax(1) == batch["cls"])
        return float(torch.cat(right).float().mean())

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if distributed.get_rank() == 0:
            print(text, flush=True)


@click.command()
@click.argument("shards")
@click.option("--test", metavar="SHARDS", help="Shards to measure the accuracy on at the end.")
@click.option("-o", "--output", type=Path, required=True, help="The checkpoint, on a disk that all nodes share.")
@click.option("--epochs", default=5, type=click.IntRange(min=1), show_default=True)
@click.option("--batch", default=96, type=click.IntRange(min=1), show_default=True, help="Samples, over all ranks.")
@click.option("--every", default=100, type=click.IntRange(min=1), show_default=True, help="Steps between checkpoints.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and of the order.")
def main(shards: str, test: str | None, output: Path, epochs: int, batch: int, every: int, seed: int) -> None:
    """Train on SHARDS; the same line again resumes from the checkpoint, on any number of ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()
    training = Training(shards, output, batch=batch, seed=seed)
    training.run(epochs, every)
    if test is not None and distributed.get_rank() == 0:
        training.say(f"accuracy {training.accuracy(test):.1%}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
