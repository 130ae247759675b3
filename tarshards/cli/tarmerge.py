"""Join parallel tars by key."""

from __future__ import annotations

from typing import Any

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, output_options
from tarshards.cli.parameters import index_dir_option, keep_metadata_option, spill_options
from tarshards.cli.program import say, tool
from tarshards.storage.expressions import spec_name
from tarshards.storage.location import Location
from tarshards.verbs.join import CONFLICT, MISSING, join_shards
from tarshards.write.shards import write_samples

EPILOG = """Streams while the orders agree; then buffers: holds up to -M and spills the rest to --tmpdir. - is a tar
from stdin."""


@tool(epilog=EPILOG)
@reads_samples
@keep_metadata_option
@index_dir_option
@click.option("--missing", type=click.Choice(MISSING), default="fail", help="Keys not in all inputs.")
@click.option("--conflict", type=click.Choice(CONFLICT), default="fail", help="Fields in several inputs.")
@output_options
@spill_options
def main(source: Input, output: Location, **options: Any) -> None:
    """Join the samples of SHARDS, two or more inputs, by key: each sample gets its fields from all inputs.

    Each of SHARDS is one input, all shards of an expression: 'images-{0..9}.tar' labels.tar. The result has the order
    of the first. Inputs in the same order are joined while they are read; once the orders differ, the other inputs are
    read by index, or the rest is sorted.
    """
    if len(source.specs) < 2:
        raise click.UsageError("give at least two inputs, each a shard expression")
    check_output(output)
    samples = join_shards(
        [source.named(spec) for spec in source.specs],
        names=list(map(spec_name, source.specs)),
        on_error=source.ledger,
        reject=source.reject,
        **options,
    )
    joined = source.choose(source.require(samples))
    write_samples(joined, output, reject=source.reject)
    if count := source.ledger.filtered.get("missing"):
        say(f"skipped {count} samples that not all inputs have")
