"""Shuffle a dataset into new shards."""

from __future__ import annotations

import os

import click

from tarshards.cli._common import (
    Size,
    all_specs,
    ignore_zeros_option,
    list_option,
    overwrite_option,
    quiet_option,
    say,
    seed_option,
    tool,
    usage_errors,
)
from tarshards.errors import OpenError


@tool(epilog="Streams in two passes: holds 16 MB for each process, and needs as much disk space as the input.")
@click.argument("shards", nargs=-1, required=True)
@list_option
@ignore_zeros_option
@click.option(
    "-o", "--output", required=True, metavar="PATTERN", help="Shards to write: out-%06d.tar or out-{shard:06d}.tar."
)
@click.option("-n", "--samples", type=Size(), metavar="SAMPLES", help="Most samples of a shard.")
@click.option("-s", "--size", type=Size(), help="Most bytes of a shard.  [default: 1e9, without -n and --shards]")
@click.option("--shards", "count", type=click.IntRange(min=1), help="Write this many shards, equal within one sample.")
@seed_option
@click.option("--keep-order", is_flag=True, help="Keep the order of the samples.")
@click.option("--rekey", metavar="TEMPLATE", help="New keys from {index} in the input, {key} and {shard}.")
@click.option("-j", "--jobs", type=click.IntRange(min=0), default=0, help="Processes.  [default: 0, all cores]")
@click.option(
    "--tmpdir", type=click.Path(exists=True, file_okay=False), help="Where the samples lie between the two passes."
)
@overwrite_option
@quiet_option
def main(
    shards: tuple[str, ...],
    lists: tuple[str, ...],
    ignore_zeros: bool,
    output: str,
    samples: int | None,
    size: int | None,
    count: int | None,
    seed: int,
    keep_order: bool,
    rekey: str | None,
    jobs: int,
    tmpdir: str | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Write the samples of SHARDS to other shards, in a random order of them all.

    The order depends only on --seed and the input; the bytes are the same for any -j. If the command is killed, the
    same command line resumes it.
    """
    from tarshards.parallel import ProcessPool
    from tarshards.storage.location import Location
    from tarshards.write.reshard import reshard, work_folder
    from tarshards.write.shards import shard_name

    with usage_errors():
        resumes = os.path.exists(work_folder(output, tmpdir))
        if not overwrite and not resumes and (first := Location.of(shard_name(output, 0))).exists():
            raise OpenError("the file exists; --overwrite replaces it", url=first.name)
        with ProcessPool(jobs or None) as pool:
            made = reshard(
                all_specs(shards, lists),
                output,
                shuffle=not keep_order,
                seed=seed,
                max_bytes=size,
                max_samples=samples,
                shards=count,
                rekey=rekey,
                concatenated=ignore_zeros,
                executor=pool,
                tmpdir=tmpdir,
                progress=not quiet,
            )
    if not quiet:
        say(f"{sum(shard.samples or 0 for shard in made)} samples in {len(made)} shard{'s' * (len(made) != 1)}")
