"""Other formats to shards."""

from __future__ import annotations

from typing import Any

import click

from tarshards.cli.conversion import conversion_options, convert
from tarshards.cli.output import check_suffix
from tarshards.cli.parameters import FILE, max_ratio_option, size_option
from tarshards.cli.program import tool

FORMATS = ("parquet", "csv", "jsonl", "msgpack", "tfrecord", "mds", "zarr", "folder", "huggingface")


@tool(
    epilog="Streams: each process holds a batch of rows.",
    example="tarimport 'data/train-*.parquet' -o train-%06d.tar",
)
@click.argument("source", nargs=-1, required=True, type=FILE)
@click.option(
    "-o", "--output", required=True, metavar="PATTERN", help="Shards to write: out-%06d.tar or out-{shard:06d}.tar."
)
@click.option("--format", type=click.Choice(FORMATS), help="What SOURCE is.  [default: by its name]")
@click.option("--split", metavar="NAME", help="The split of a Hugging Face dataset.")
@click.option("-k", "--key", metavar="TEMPLATE", help='Keys, such as "{file}/{record:09d}"; columns are names too.')
@click.option(
    "--types", metavar="NAME=TYPE,...", help="Types of columns of csv: text, int, float, bool, date, timestamp."
)
@size_option("1e9")
@max_ratio_option
@conversion_options
def main(
    source: tuple[str, ...],
    output: str,
    format: str | None,
    split: str | None,
    key: str | None,
    types: str | None,
    size: int | None,
    **options: Any,
) -> None:
    """Write the rows of SOURCE, data in another format, as samples to shards.

    SOURCE is files of parquet, csv, jsonl or TFRecord, a folder of MDS or Zarr, a folder with a folder of files for
    each class, or a Hugging Face dataset: a folder written by save_to_disk, or a name with --format huggingface.
    Columns become fields: image.jpg, text.txt, label.cls. If the command is killed, the same command line resumes it.
    """
    from tarshards.formats.importing import MAX_BYTES, import_dataset

    check_suffix(output)
    convert(
        import_dataset,
        source[0] if len(source) == 1 else list(source),
        output,
        format=format,
        split=split,
        key=key,
        types=None if types is None else dict(_column_and_type(each) for each in types.split(",")),
        max_bytes=size or MAX_BYTES,
        **options,
    )


def _column_and_type(text: str) -> tuple[str, str]:
    column, equals, kind = text.rpartition("=")
    if not equals or not column:
        raise click.UsageError(f"--types: {text!r} is not NAME=TYPE")
    return column, kind.strip()
