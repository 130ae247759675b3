"""Shuffle and cut datasets anew."""

from __future__ import annotations

import os

import click

from tarshards.cli._common import Size, overwrite_option, say, seed_option, tool
from tarshards.errors import OpenError


@tool(epilog="Streams in two passes: holds 16 MB a process, and as many bytes as the input has on disk.")
@click.argument("shards", nargs=-1, required=True)
@click.option("-T", "--list", "lists", multiple=True, metavar="FILE", help="Read shards from FILE too.")
@click.option(
    "-o", "--output", required=True, metavar="PATTERN", help="Shards to write: out-%06d.tar or out-{shard:06d}.tar."
)
@click.option("-n", "--samples", type=Size(), metavar="SAMPLES", help="Most samples of a shard.")
@click.option("-s", "--size", type=Size(), help="Most bytes of a shard.  [default: 1e9, without -n and --shards]")
@click.option("--shards", "count", type=click.IntRange(min=1), help="So many shards, equal within one sample.")
@seed_option
@click.option("--keep-order", is_flag=True, help="Only cut anew: the samples keep their order.")
@click.option("--rekey", metavar="TEMPLATE", help="New keys, of {index} in the input, {key} and {shard}.")
@click.option("-j", "--jobs", type=click.IntRange(min=0), default=0, help="Processes.  [default: 0, all cores]")
@click.option("--tmpdir", type=click.Path(exists=True, file_okay=False), help="Where the samples lie in between.")
@overwrite_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def main(
    shards: tuple[str, ...],
    lists: tuple[str, ...],
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

    The order follows from --seed and the input alone; the bytes are the same for any -j. Run the same line again after
    it was killed, and it goes on where it was.
    """
    from tarshards.parallel import ProcessPool
    from tarshards.storage.location import Location
    from tarshards.write.reshard import reshard, work_folder
    from tarshards.write.shards import shard_name

    try:
        resumes = os.path.exists(work_folder(output, tmpdir))
        if not overwrite and not resumes and (first := Location.of(shard_name(output, 0))).exists():
            raise OpenError("the file exists; --overwrite replaces it", url=first.name)
        with ProcessPool(jobs or None) as pool:
            made = reshard(
                [*shards, *(f"@{name}" for name in lists)],
                output,
                shuffle=not keep_order,
                seed=seed,
                max_bytes=size,
                max_samples=samples,
                shards=count,
                rekey=rekey,
                executor=pool,
                tmpdir=tmpdir,
                progress=not quiet,
            )
    except ValueError as error:
        if isinstance(error, OpenError) or hasattr(error, "reason"):
            raise
        raise click.UsageError(str(error)) from error
    if not quiet:
        say(f"{sum(shard.samples or 0 for shard in made)} samples in {len(made)} shard{'s' * (len(made) != 1)}")
