"""Write the card of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.conversion import named_splits
from tarshards.cli.output import check_output, output_options
from tarshards.cli.parameters import FILE
from tarshards.cli.program import tool

if TYPE_CHECKING:
    from tarshards.storage.location import Location


@tool(
    epilog="SHARDS may be SPLIT=SHARDS, for several splits. Streams: holds the first 100 samples of each split.",
    example="tarcard train=train.shards.json val=val.shards.json --name digits --licence MIT -o digits.croissant.json",
)
@click.argument("shards", nargs=-1, metavar="SHARDS...", type=FILE)
@click.option("--name", required=True, metavar="NAME", help="Name of the dataset.")
@click.option("--description", metavar="TEXT", help="What the dataset is.")
@click.option("--licence", metavar="NAME", help="Its licence: a name of SPDX, such as CC-BY-4.0, or a URL.")
@click.option("--author", "authors", multiple=True, metavar="NAME", help='An author: "Name" or "Name <email>"; repeat.')
@click.option("--citation", metavar="TEXT", help="How to cite it, such as an entry of BibTeX.")
@click.option("--dataset-version", "release", metavar="NAME", help="Its version, such as 1.0.0.")
@click.option("--published", metavar="DATE", help="When it was published, such as 2026-11-23.")
@click.option("--homepage", "url", metavar="URL", help="The page of the dataset.")
@output_options
def main(
    shards: tuple[str, ...],
    release: str | None,
    output: Location,
    **about: Any,
) -> None:
    """Write the card of the dataset SHARDS, as JSON-LD of MLCommons' Croissant.

    It lists every shard with its size and SHA-256, and the fields of the samples. Values missing in the manifest are
    measured: for a SHA-256 the shard is read.
    """
    if not shards:
        raise click.UsageError("name SHARDS, or SPLIT=SHARDS")
    if output.url != "-":
        check_output(output)
    from tarshards.formats.croissant import write_card

    write_card(output, named_splits(shards), version=release, **about)
