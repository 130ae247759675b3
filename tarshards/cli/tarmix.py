"""Mix streams of samples by weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import click

from tarshards.cli._common import Input, check_output, output_option, overwrite_option, reads_samples, seed_option, tool
from tarshards.cli.tarcat import write
from tarshards.errors import TarshardsError
from tarshards.stream.ops import rekey
from tarshards.verbs.mix import mix_streams, parse_sources, read_sources


class Until(click.ParamType[Any]):
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
@reads_samples
@click.option("--yaml", "config", metavar="FILE", help="Take the sources from this file.")
@click.option("--allow-pipe", is_flag=True, help="Let sources in the file be pipe:COMMAND.")
@click.option("--until", type=Until(), default="first", show_default=True, help="When it ends.")
@click.option("--shuffle", "buffer", type=click.IntRange(min=1), help="Mix each source in a buffer of N samples.")
@seed_option
@click.option("--rekey", "template", metavar="TEMPLATE", help='New keys: "{shard}/{index:06d}", "{index}-{key}".')
@output_option
@overwrite_option
def main(
    source: Input,
    config: str | None,
    allow_pipe: bool,
    until: Literal["first", "last"] | int,
    buffer: int | None,
    seed: int,
    template: str | None,
    output: str,
    overwrite: bool,
) -> None:
    """Mix samples in proportions that hold at every moment: of any n that were written each source has its share.

    SHARDS are sources, each a shard expression and its weight: a.tar:0.7 'b-{0..9}.tar:0.3'; or without weights, which
    then are equal. Each keeps its order.

    --until first: until a source has no more; last: until all were read once, others beginning again; N: so many
    samples.
    """
    if config is not None and source.specs != ["-"]:
        raise click.UsageError("the sources are SHARDS, or in --yaml")
    if config is None and allow_pipe:
        raise click.UsageError("--allow-pipe goes with --yaml")
    try:
        sources = parse_sources(source.specs) if config is None else read_sources(config)
        if buffer is not None:
            sources = [replace(each, shuffle=buffer) for each in sources]
        samples = mix_streams(
            sources, seed=seed, until=until, on_error=source.ledger, allow_pipe=config is None or allow_pipe
        )
        chosen = source.choose(samples)
        chosen = chosen if template is None else rekey(chosen, template)
    except TarshardsError:
        raise
    except (ValueError, ModuleNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    check_output(output, overwrite)
    write(chosen, output)
