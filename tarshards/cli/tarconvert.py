"""Shards to Squirrel's msgpack shards, and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.conversion import convert
from tarshards.cli.input import makes_files
from tarshards.cli.parameters import FILE
from tarshards.cli.program import tool

if TYPE_CHECKING:
    from tarshards.storage.location import Location


@tool(
    epilog="Streams: each process holds one sample.",
    example="tarconvert 'store/*.gz' -o train-%06d.tar",
)
@click.argument("shards", nargs=-1, required=True, type=FILE)
@makes_files("Shards to write: out-%06d.tar, or out/%06d.gz for msgpack.", reads_shards=False)
def main(shards: tuple[str, ...], output: Location, **options: Any) -> None:
    """Convert tar SHARDS to msgpack shards of Squirrel, or msgpack shards to tars, according to the suffix of -o.

    Each shard becomes one shard. Values become fields, and fields values, as in tarimport and tarexport. If the command
    is killed, the same command line resumes it.
    """
    from tarshards.formats.exporting import export_dataset
    from tarshards.formats.importing import import_dataset

    to_tar = re.search(r"\.(tar(\.\w+)?|t[bgx]z2?)$", output.url)
    if not to_tar and not output.url.endswith(".gz"):
        raise click.UsageError(f"-o {output.url}: the name ends in .tar, or in .gz for msgpack")
    convert(import_dataset if to_tar else export_dataset, list(shards), output, format="msgpack", **options)
