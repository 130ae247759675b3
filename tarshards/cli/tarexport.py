"""Shards to other formats."""

from __future__ import annotations

import click

from tarshards.cli._common import (
    FILE,
    all_specs,
    convert,
    ignore_zeros_option,
    list_option,
    max_errors_option,
    overwrite_option,
    parallel_option,
    quiet_option,
    sync_option,
    tool,
)

FORMATS = ("parquet", "jsonl", "msgpack", "folder")


@tool(
    epilog="Streams: each process holds a row group of parquet, or one sample.",
    example="tarexport train.shards.json -o train-%06d.parquet",
)
@click.argument("shards", nargs=-1, required=True, type=FILE)
@list_option
@ignore_zeros_option
@click.option(
    "-o", "--output", required=True, metavar="PATTERN", help="Files to write, such as out-%06d.parquet; or a folder."
)
@click.option("--format", type=click.Choice(FORMATS), help="What to write.  [default: by the name of the output]")
@parallel_option("Processes", 0)
@max_errors_option
@overwrite_option
@sync_option
@quiet_option
def main(
    shards: tuple[str, ...],
    lists: tuple[str, ...],
    ignore_zeros: bool,
    output: str,
    format: str | None,
    parallel: int,
    max_errors: int | None,
    overwrite: bool,
    sync: bool,
    quiet: bool,
) -> None:
    """Write each of SHARDS to a file of another format, or their members to files in a folder.

    The columns are __key__ and the fields. Shards that tarimport wrote get the columns back that were imported: their
    names, types and order. If the command is killed, the same command line resumes it.
    """
    from tarshards.formats.exporting import export_dataset

    convert(
        export_dataset,
        all_specs(shards, lists),
        output,
        format=format,
        concatenated=ignore_zeros,
        parallel=parallel,
        max_errors=max_errors,
        overwrite=overwrite,
        sync=sync,
        quiet=quiet,
    )
