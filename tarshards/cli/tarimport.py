"""Other formats to shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.conversion import convert
from tarshards.cli.input import makes_files
from tarshards.cli.parameters import FILE
from tarshards.cli.program import tool

if TYPE_CHECKING:
    from tarshards.storage.location import Location

FORMATS = ("parquet", "csv", "jsonl", "msgpack", "tfrecord", "mds", "zarr", "folder", "huggingface")


@tool(
    epilog="Streams: each process holds a batch of rows.",
    example="tarimport 'data/train-*.parquet' -o train-%06d.tar",
)
@click.argument("source", nargs=-1, required=True, type=FILE)
@click.option("--format", type=click.Choice(FORMATS), help="What SOURCE is.  [default: by its name]")
@click.option("--split", metavar="NAME", help="The split of a Hugging Face dataset.")
@click.option("-k", "--key", metavar="TEMPLATE", help='Keys, such as "{file}/{record:09d}"; columns are names too.')
@click.option(
    "--types",
    metavar="NAME=TYPE,...",
    callback=lambda context, parameter, types: None if types is None else dict(map(_column_type, types.split(","))),
    help="Types of columns of csv: text, int, float, bool, date, timestamp.",
)
@makes_files("Shards to write: out-%06d.tar or out-{shard:06d}.tar.", makes_tars=True, size="1e9", reads_shards=False)
def main(source: tuple[str, ...], output: Location, max_bytes: int | None, **options: Any) -> None:
    """Write the rows of SOURCE, data in another format, as samples to shards.

    SOURCE is files of parquet, csv, jsonl or TFRecord, a folder of MDS or Zarr, a folder with a folder of files for
    each class, or a Hugging Face dataset: a folder written by save_to_disk, or a name with --format huggingface.
    Columns become fields: image.jpg, text.txt, label.cls. If the command is killed, the same command line resumes it.
    """
    from tarshards.formats.importing import MAX_BYTES, import_dataset

    one_or_more = source[0] if len(source) == 1 else list(source)
    convert(import_dataset, one_or_more, output, max_bytes=max_bytes or MAX_BYTES, **options)


def _column_type(text: str) -> tuple[str, str]:
    column, equals, kind = text.rpartition("=")
    if not equals or not column:
        raise click.UsageError(f"--types: {text!r} is not NAME=TYPE")
    return column, kind.strip()
