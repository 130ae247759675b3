"""Concatenate shards."""

from __future__ import annotations

import click

from tarshards.ledger import Ledger
from tarshards.ops import keep_fields, take
from tarshards.samples import read_samples
from tarshards.tools._common import (
    count_option,
    fields_option,
    no_tar_onto_a_terminal,
    output_option,
    shards_argument,
    tell_of_skipped,
)
from tarshards.writer import write_samples


@click.command(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@shards_argument
@count_option
@fields_option
@output_option
def main(shards: tuple[str, ...], count: int | None, fields: str | None, output: str) -> None:
    """Concatenate the samples of SHARDS into one tar.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, pipe:command.
    """
    no_tar_onto_a_terminal(output)
    ledger = Ledger()
    samples = read_samples(list(shards) or "-", on_error=ledger, allow_pipe=True)
    if fields is not None:
        samples = keep_fields(samples, fields)
    write_samples(take(samples, count), output, allow_pipe=True)
    tell_of_skipped(ledger)
