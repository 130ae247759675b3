"""Split samples into shards."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.input import Input, reads_samples, selects_samples
from tarshards.cli.output import check_suffix, pattern_options, written
from tarshards.cli.parameters import (
    COUNT,
    dry_run_option,
    keep_metadata_option,
    parallel_option,
    samples_option,
    seed_option,
    size_option,
)
from tarshards.cli.program import say, shown, tool

if TYPE_CHECKING:
    from tarshards.storage.location import Location
    from tarshards.write.split import Route


@tool(
    epilog="Streams: holds one sample. Without SHARDS, or for -, a tar is read from stdin.",
    example="tar -cf - --sort=name -C raw train | tarsplit -s 1e9 -o imagenet_train --maxshards 2",
)
@reads_samples
@keep_metadata_option
@selects_samples
@pattern_options("Shards to write: out-%06d.tar or out-{shard:06d}.tar, or just out.")
@samples_option
@size_option("1e9, without -n")
@click.option("--start", "first", type=COUNT, default=0, metavar="N", help="Number of the first shard.")
@click.option(
    "--maxshards", "max_shards", type=click.IntRange(min=1), metavar="N", help="Stop reading when N shards are full."
)
@click.option("--by", metavar="FIELD", help="A series of shards for each value of FIELD; {FIELD} in PATTERN.")
@click.option(
    "--ratios", metavar="NAME=R,...", help="A series for each name, such as train=.9,val=.1; {split} in PATTERN."
)
@seed_option
@click.option("--post", metavar="CMD", help="Run CMD with bash for each finished shard, {} or $TAR_SHARD.")
@parallel_option("Commands of --post", 1)
@click.option("--delete", is_flag=True, help="Remove each shard after its --post succeeds.")
@click.option("--index", is_flag=True, help="Write indexes and a manifest too.")
@dry_run_option
def main(
    source: Input,
    output: Location,
    by: str | None,
    ratios: str | None,
    seed: int,
    post: str | None,
    parallel: int,
    delete: bool,
    **options: Any,
) -> None:
    """Split the samples of SHARDS into shards, in their order.

    A shard is full when the next sample would make it larger than -n samples or -s bytes; only a single sample of more
    than -s bytes exceeds that.
    """
    from tarshards.write.shards import SHARD_BYTES
    from tarshards.write.split import ShardCommand, route_by_field, route_by_ratios, split_samples

    if delete and not post:
        raise click.UsageError("--delete requires --post")
    if delete and options["index"]:
        raise click.UsageError("--index cannot be combined with --delete; let --post run tarindex")
    routes: dict[str, Route] = {}
    if ratios is not None:
        routes["split"] = route_by_ratios(_parse_ratios(ratios), seed=seed)
    if by is not None:
        if by == "shard" or by in routes:
            raise click.UsageError(f"--by {by}: {{{by}}} has another meaning in the pattern")
        routes[by] = route_by_field(by)
    if options["max_samples"] is None and options["max_bytes"] is None:
        options["max_bytes"] = SHARD_BYTES
    command = ShardCommand(post, jobs=parallel, delete=delete) if post else None
    with command or nullcontext():
        shards = split_samples(
            source.chosen(source.read("fields" if by is None else None)),
            written(_full_pattern(output.url, list(routes))),
            **options,
            routes=routes,
            on_finish=command,
            reject=source.reject,
            leave_out=source.ledger.leave_out,
        )
    if source.ledger.filtered.get("max_shards"):
        say(f"stopped after {options['max_shards']} shards; the rest of the input was not read")
    if not shards:
        source.check_nothing()
    if options["dry_run"]:
        for shard in shards:
            click.echo(shown(f"{shard.name}\t{shard.samples} samples\t{shard.bytes} bytes"))


def _full_pattern(pattern: str, variables: list[str]) -> str:
    """Complete a bare name; refuse a pattern that lacks a variable, or has one more."""
    from tarshards.storage.compression import TAR_ENDING

    if not re.search(r"[%{}]", pattern) and not TAR_ENDING.search(pattern):
        pattern = "-".join([pattern, *(f"{{{variable}}}" for variable in variables), "%06d.tar"])
    found = set(re.findall(r"\{([^{}:]+)[^{}]*\}", pattern))
    for variable in variables:
        lacks = variable not in found or "{" + variable + "}" not in pattern
        if lacks:
            raise click.UsageError(f"-o {pattern}: the pattern needs {{{variable}}}")
    if unknown := found - {"shard", *variables}:
        raise click.UsageError(f"-o {pattern}: unknown {{{min(unknown)}}}; --by FIELD and --ratios make them known")
    has_number = re.search(r"%0?\d*d|\{shard(:0?\d*d?)?\}", pattern)
    if not has_number:
        raise click.UsageError(f"-o {pattern}: the pattern needs a shard number, %06d or {{shard:06d}}")
    check_suffix(pattern)
    return pattern


def _parse_ratios(text: str) -> dict[str, float]:
    from tarshards.write.split import is_safe, route_by_ratios

    try:
        ratios = {name: float(ratio) for name, _, ratio in (part.partition("=") for part in text.split(","))}
        route_by_ratios(ratios)
    except ValueError as error:
        raise click.UsageError(f"--ratios {text}: write train=.9,val=.1, with a sum of 1") from error
    for name in ratios:
        if not is_safe(name):
            raise click.UsageError(f"--ratios {text}: {name!r} is not safe in a file name")
    if len(ratios) <= text.count(","):
        raise click.UsageError(f"--ratios {text}: a name occurs twice")
    return ratios
