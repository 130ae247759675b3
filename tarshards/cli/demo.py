"""``tarshards demo``: write handwritten digits to tar shards, train on them, and audit the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tarshards.cli.parameters import seed_option
from tarshards.cli.program import tool, usage_errors

if TYPE_CHECKING:
    from tarshards.samples.ledger import Ledger


def audit(ledger: Ledger, *, written: int, epochs: int) -> None:
    """Raise ClickException unless all *written* samples were delivered once per epoch, and nothing was left out."""
    delivered = ledger.samples
    if delivered != written * epochs or ledger.skipped or ledger.quarantined or ledger.unaudited:
        raise click.ClickException(f"written {written} samples x {epochs} epochs, delivered {delivered}\n{ledger}")


@tool()
@click.option("--data", default="data/digits", metavar="FOLDER", help="Folder to write the shards to.")
@click.option("--epochs", default=20, type=click.IntRange(min=1), metavar="N", help="Maximum number of epochs.")
@seed_option
def demo(data: str, epochs: int, seed: int) -> None:
    """Write handwritten digits to tar shards, and train on them up to 95 % accuracy on held-out shards.

    The scans are part of scikit-learn; nothing is downloaded. Exit code 1: a sample is missing, or the goal was not
    reached.
    """
    from tarshards.samples.codecs.registry import require

    with usage_errors():
        for module in ("sklearn", "torch"):
            require(module, extra="demo")
    from tarshards.loaders.torch.shard_dataset import ShardDataset
    from tarshards.samples.ledger import Ledger
    from tarshards.testing.digits import ALL, GOAL, read_with_tarfile, samples_per_second, train, write_digits

    writer = write_digits(data)
    size = sum(Path(shard).stat().st_size for shard in writer.shards)
    click.echo(f"wrote      {len(writer.shards)} shards, {writer.samples} samples, {size} bytes: {data}/{ALL}")

    dataset = ShardDataset(f"{data}/{ALL}")
    ours, tarfiles = samples_per_second(lambda: dataset, lambda: read_with_tarfile(writer.shards))
    click.echo(f"read       {ours:.0f} samples/s; Python's tarfile {tarfiles:.0f}: {ours / tarfiles:.0f} times as many")

    ledger = Ledger()
    for epoch, accuracy in enumerate(train(data, seed=seed, epochs=epochs, ledger=ledger), 1):
        click.echo(f"epoch {epoch:<4} {accuracy:.1%} of the held-out digits right")
        if accuracy >= GOAL:
            break

    audit(ledger, written=writer.samples, epochs=epoch)
    click.echo(f"audit      written {writer.samples} x {epoch} epochs = delivered {ledger.samples} samples")
    click.echo(str(ledger))
    if accuracy < GOAL:
        raise click.ClickException(f"{accuracy:.1%} after {epochs} epochs; the goal is {GOAL:.0%}")
