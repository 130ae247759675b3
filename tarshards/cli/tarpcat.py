"""Concatenate shards, reading several at once."""

from __future__ import annotations

from contextlib import closing

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, output_options, write_new_keys
from tarshards.cli.parameters import Size, keep_metadata_option, keep_order_option, parallel_option
from tarshards.cli.program import tool
from tarshards.cli.tarcat import Arrangement, arranges_samples
from tarshards.storage.location import Location
from tarshards.verbs.cat import read_parallel


@tool(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
@keep_metadata_option
@arranges_samples
@parallel_option("Shards read", 4, "-p", "readers")
@keep_order_option
@click.option("-M", "--memory", type=Size(), default="256MB", help="Memory for samples that wait.")
@output_options
def main(source: Input, arrange: Arrangement, keep_order: bool, output: Location, **limits: int) -> None:
    """Concatenate the samples of SHARDS into one tar, reading several shards at once.

    SHARDS are shard expressions, as for tarcat. Samples are written as they are read; with --keep-order in the order of
    the shards, so that the same input gives the same bytes.

    Up to -M bytes wait to be written, besides one sample for each reader; --shuffle N holds N more samples.
    """
    check_output(output)
    samples = read_parallel(source.shards, ordered=keep_order, on_error=source.ledger, **limits)
    with closing(samples):
        write_new_keys(arrange(samples, source), output, source.reject)
