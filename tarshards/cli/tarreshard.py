"""Shuffle a dataset into new shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.input import makes_files, requires_shards
from tarshards.cli.parameters import (
    allow_empty_option,
    keep_metadata_option,
    keep_order_option,
    rekey_option,
    samples_option,
    seed_option,
    tmpdir_option,
)
from tarshards.cli.program import say, tool

if TYPE_CHECKING:
    from tarshards.storage.location import Location
    from tarshards.storage.manifest import Shard


@tool(epilog="Streams in two passes: holds 16 MB for each process, and needs as much disk space as the input.")
@samples_option
@makes_files(
    "Shards to write: out-%06d.tar or out-{shard:06d}.tar.", makes_tars=True, size="1e9, without -n and --shards"
)
@click.option("--shards", "count", type=click.IntRange(min=1), metavar="N", help="N shards, equal within one sample.")
@seed_option
@keep_order_option
@rekey_option
@tmpdir_option("the samples between the two passes", "beside the output")
@allow_empty_option
@requires_shards("name SHARDS to reshard")
@keep_metadata_option
def main(
    shards: list[Shard],
    output: Location,
    count: int | None,
    keep_order: bool,
    template: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Write the samples of SHARDS to new shards, in a random order of all samples.

    The order depends only on --seed and the input; the bytes are the same for any -j. If the command is killed, the
    same command line resumes it.
    """
    from tarshards.write.reshard import reshard

    made = reshard(shards, output, shuffle=not keep_order, shards=count, rekey=template, progress=not quiet, **options)
    if not quiet:
        say(f"{sum(shard.samples or 0 for shard in made)} samples in {len(made)} shard{'s' * (len(made) != 1)}")
