"""Sort samples."""

from __future__ import annotations

from typing import Any

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, output_options
from tarshards.cli.parameters import keep_metadata_option, seed_option, spill_options
from tarshards.cli.program import say, tool, usage_errors
from tarshards.samples.keys import key_rule
from tarshards.storage.location import Location
from tarshards.verbs.sort import (
    join_parts,
    parse_sort_key,
    read_loose_members,
    regroup_members,
    shuffle_samples,
    sort_samples,
)
from tarshards.write.shards import write_samples


@tool(epilog="Buffers: holds up to -M, then spills to --tmpdir. Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
@keep_metadata_option
@output_options
@click.option(
    "--sort",
    "keys",
    multiple=True,
    metavar="FIELD[:KIND]",
    help="Sort by FIELD; later ones break ties. KIND: text, int, float, natural.",
)
@click.option("-r", "--reverse", is_flag=True, help="Descending order.")
@click.option("--shuffle", is_flag=True, help="A random order, by --seed.")
@seed_option
@click.option("--unique", type=click.Choice(["first", "last", "error"]), help="Keep one sample of each key.")
@click.option("--regroup", is_flag=True, help="Group the members of each key, wherever they are.")
@spill_options
def main(
    source: Input,
    output: Location,
    keys: tuple[str, ...],
    reverse: bool,
    shuffle: bool,
    seed: int,
    unique: str | None,
    regroup: bool,
    **spill: Any,
) -> None:
    """Sort the samples of SHARDS into one tar: by key, or by fields.

    Samples that compare equal keep their order. -c, --slice and -f apply before sorting. Sorting by key alone also
    groups the members of each key of a shard. With --regroup and without --sort the samples stay in the order of their
    first members.
    """
    if shuffle and (keys or reverse):
        raise click.UsageError("--shuffle cannot be combined with --sort or -r")
    if regroup and unique:
        raise click.UsageError("--regroup cannot be combined with --unique")
    if regroup and reverse and not keys:
        raise click.UsageError("--regroup can be combined with -r only if there is --sort")
    with usage_errors("--sort"):
        list(map(parse_sort_key, keys))
    check_output(output)
    # Sorting by key brings the members of a key together; what else is asked for counts, sorts or chooses samples.
    chooses = (source.count, source.slice, source.fields) != (None, None, None)
    groups = not (keys or shuffle or unique or regroup or chooses or source.losses.goes_on)
    if groups:
        source.shards = [shard._replace(adjacent=False) for shard in source.shards]
    source.phase = "reading"
    samples = iter(source)
    if regroup:
        members = read_loose_members(source.shards, ledger=source.ledger)
        rule = key_rule(source.split)
        regrouped = regroup_members(members, ledger=source.ledger, split=rule, **spill)
        samples = source.choose(source.require(regrouped))
    if shuffle:
        samples = shuffle_samples(samples, seed=seed, unique=unique, leave_out=source.ledger.leave_out, **spill)
    elif keys or not regroup:
        samples = sort_samples(
            samples,
            keys=keys or ("__key__",),
            reverse=reverse,
            unique=unique,
            reject=source.reject,
            leave_out=source.ledger.leave_out,
            **spill,
        )
    if groups:
        samples = join_parts(samples)
    samples = source.written(samples, phase="writing", are_all=not (unique or groups))
    write_samples(source.require(samples), output, reject=source.reject)
    if count := source.ledger.filtered.get("repeated key"):
        say(f"dropped {count} samples with repeated keys; --unique kept the {unique} of each")
