"""Tabulate samples."""

from __future__ import annotations

from itertools import chain, islice

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, output_options
from tarshards.cli.program import shown, tool, usage_errors
from tarshards.samples.lines import escape_bytes
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.verbs.table import tabulate


@tool(epilog="Without SHARDS, or for -, a tar is read from stdin.", example="tar2tsv -f cls small.tar")
@reads_samples
@click.option("--fill", metavar="TEXT", help=r"Write TEXT where a field is missing, such as \N; else fail.")
@click.option("--noheader", is_flag=True, help="No line of column names.")
@click.option("--nokey", is_flag=True, help="No column of keys.")
@output_options
def main(source: Input, fill: str | None, noheader: bool, nokey: bool, output: Location) -> None:
    r"""Tabulate the samples of SHARDS: one line each, with the key and the fields separated by tabs.

    The columns are those of -f, or all fields of the first sample; a later sample with other fields is then an error.

    Tab, newline, carriage return and backslash are written \t \n \r \\, other control characters and bytes that are not
    UTF-8 \xNN, so that every byte can be recovered, except a newline that ends a text or number. One sample is held.
    """
    if output.url != "-":
        check_output(output)
    fields = source.take_fields() or "*"  # the table handles missing fields
    with usage_errors():
        lines = tabulate(source, fields, key=not nokey, header=not noheader, missing=fill, reject=source.reject)
    with open_shard(output, "wb") as stream:
        heading = islice(lines, 0 if noheader else 1)
        for line in chain(heading, source.require(lines)):
            stream.write(shown(line, output.url, escape_bytes).encode() + b"\n")
