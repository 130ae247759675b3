"""Mix streams of samples by weights."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, output_options, write_new_keys
from tarshards.cli.parameters import (
    FILE,
    allow_pipe_option,
    keep_metadata_option,
    rekey_option,
    seed_option,
    shuffle_option,
    words,
)
from tarshards.cli.program import say, tool, usage_errors
from tarshards.storage.expressions import spec_name
from tarshards.storage.location import Location
from tarshards.verbs.mix import mix_streams, parse_sources, read_sources


class Until(click.ParamType):
    """When a mixture ends.

    >>> Until().convert("last", None, None), Until().convert("1000", None, None)
    ('last', 1000)
    """

    name = "first|last|N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Literal["first", "last"] | int:
        if value in ("first", "last"):
            return value
        if not str(value).isdecimal():
            self.fail(f"{value!r} is not first, last or a number of samples", param, ctx)
        return int(value)


@tool(
    options_metavar="[OPTIONS]",
    epilog="Streams: holds one sample of each source, and N with --shuffle N. - is a tar from stdin.",
)
@partial(reads_samples, may_be_empty=False)
@keep_metadata_option
@click.option("--yaml", "config", type=FILE, help="Take the sources from this file.")
@allow_pipe_option
@click.option(
    "--until",
    type=Until(),
    default="first",
    metavar="first|last|N",
    shell_complete=words("first", "last"),
    help="When the mixture ends.",
)
@shuffle_option
@seed_option
@rekey_option
@output_options
def main(
    source: Input,
    config: str | None,
    allow_pipe: bool,
    until: Literal["first", "last"] | int,
    buffer: int | None,
    seed: int,
    template: str | None,
    output: Location,
) -> None:
    """Mix samples in given proportions: for every n, the first n samples contain each source's share.

    SHARDS are sources, each a shard expression and its weight: a.tar:0.7 'b-{0..9}.tar:0.3'. Without any weights, all
    are equal. Each source keeps its order; --shuffle shuffles each.

    --until first: until a source is exhausted; last: until all have been read once, while exhausted ones start again;
    N: this many samples.
    """
    if config is not None and source.specs != ["-"]:
        raise click.UsageError("SHARDS and --yaml cannot be combined: both name the sources")
    if config is None and allow_pipe:
        raise click.UsageError("--allow-pipe requires --yaml")
    with usage_errors():
        sources = parse_sources(source.specs) if config is None else read_sources(config)
        names = [spec_name(each.shards) for each in sources]
        for each in sources:
            may_run = config is None or allow_pipe
            each.shards = [shard._replace(allow_pipe=may_run) for shard in source.named(each.shards)]
            each.shuffle = buffer or each.shuffle
        samples = mix_streams(
            sources,
            seed=seed,
            until=until,
            on_error=source.ledger,
            on_end=(lambda number: _tell_end(names[number])) if len(sources) > 1 else None,
        )
        chosen = source.choose(samples, lambda: until if isinstance(until, int) else None)
        if template is not None:
            from tarshards.stream.ops import rekey

            chosen = rekey(chosen, template)
    check_output(output)
    write_new_keys(chosen, output, source.reject)


def _tell_end(name: str) -> None:
    say(f"{name} has ended, and the mixture with it; --until last takes all samples")
