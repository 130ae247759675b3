"""Shards to other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.conversion import convert
from tarshards.cli.input import makes_files, requires_shards
from tarshards.cli.program import tool

if TYPE_CHECKING:
    from tarshards.storage.location import Location
    from tarshards.storage.manifest import Shard

FORMATS = ("parquet", "jsonl", "msgpack", "folder")


@tool(
    epilog="Streams: each process holds a row group of parquet, or one sample.",
    example="tarexport train.shards.json -o train-%06d.parquet",
)
@click.option("--format", type=click.Choice(FORMATS), help="What to write.  [default: by the name of the output]")
@makes_files("Files to write, such as out-%06d.parquet; or a folder.")
@requires_shards("name SHARDS to export")
def main(shards: list[Shard], output: Location, **options: Any) -> None:
    """Write each of SHARDS to a file of another format, or their members to files in a folder.

    The columns are __key__ and the fields. Shards written by tarimport get the imported columns back, with names, types
    and order. If the command is killed, the same command line resumes it.
    """
    from tarshards.formats.exporting import export_dataset

    convert(export_dataset, shards, output, **options)
