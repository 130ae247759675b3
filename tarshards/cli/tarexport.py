"""Shards to other formats."""

from __future__ import annotations

from typing import Any

import click

from tarshards.cli.conversion import conversion_options, convert
from tarshards.cli.input import ShardArguments, takes_shards
from tarshards.cli.output import pattern_option
from tarshards.cli.parameters import FILE
from tarshards.cli.program import refuse, tool

FORMATS = ("parquet", "jsonl", "msgpack", "folder")


@tool(
    epilog="Streams: each process holds a row group of parquet, or one sample.",
    example="tarexport train.shards.json -o train-%06d.parquet",
)
@click.argument("shards", nargs=-1, metavar="SHARDS...", type=FILE)
@pattern_option("Files to write, such as out-%06d.parquet; or a folder.")
@click.option("--format", type=click.Choice(FORMATS), help="What to write.  [default: by the name of the output]")
@conversion_options
@takes_shards
def main(shards: ShardArguments, output: str, **options: Any) -> None:
    """Write each of SHARDS to a file of another format, or their members to files in a folder.

    The columns are __key__ and the fields. Shards written by tarimport get the imported columns back, with names, types
    and order. If the command is killed, the same command line resumes it.
    """
    from tarshards.formats.exporting import export_dataset

    refuse(not shards.specs, "name SHARDS to export")
    convert(export_dataset, shards.named(), output, **options)
