"""Concatenate shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.input import Input, reads_samples, rekeyed, selects_samples, sliced
from tarshards.cli.output import check_output, output_options, write_new_keys
from tarshards.cli.parameters import COUNT, keep_metadata_option, options, rekey_option, seed_option, shuffle_option
from tarshards.cli.program import refuse, tool

if TYPE_CHECKING:
    from tarshards.samples.keys import Sample
    from tarshards.storage.location import Location


def arranges_samples(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that arrange samples to a command; it gets *arrange*, a function from samples to samples.

    The command also gets *holds*, whether the function holds samples until others are read, and *leaves*, whether it
    leaves all samples unchanged.

    The options apply in the order skip, shuffle, slice, count, fields, source, rekey.
    """

    @wraps(command)
    def with_arrange(
        source: Input,
        skip_: int | None,
        buffer: int | None,
        seed: int,
        template: str | None,
        add: bool,
        **values: Any,
    ) -> Any:
        leaves = not skip_ and buffer is None and template is None and not add
        if template is not None:
            rekeyed((), template)

        def left() -> int | None:
            total = source.known()
            return None if total is None else max(0, total - (skip_ or 0))

        def arrange(samples: Iterable[Sample]) -> Iterator[Sample]:
            samples = source.require(samples)
            if leaves:
                return source.choose(samples, left)
            from tarshards.stream.ops import add_source, map_fields, shuffle

            if skip_:
                samples = sliced(samples, slice(skip_, None), source.ledger, "--skip")
            if buffer is not None:
                samples = shuffle(samples, buffer, initial=buffer, seed=seed)
            samples = source.choose(samples, left)
            if add:
                samples = map_fields(add_source(samples), {"source": str.encode})
            return iter(samples if template is None else rekeyed(samples, template))

        return command(source=source, arrange=arrange, holds=buffer is not None, leaves=leaves, **values)

    return options(
        rekey_option,
        click.option("--skip", "skip_", type=COUNT, metavar="N", help="Skip the first N samples."),
        shuffle_option,
        seed_option,
        click.option("--source", "add", is_flag=True, help="Add the shard's URL as the field source."),
    )(with_arrange)


@tool(
    epilog="Without SHARDS, or for -, a tar is read from stdin.",
    example="gsutil cat gs://lpr-imagenet/imagenet_train-0000.tgz | tarcat -c 10 > small.tar",
)
@reads_samples
@keep_metadata_option
@selects_samples
@arranges_samples
@click.option(
    "--interleave", "width", type=click.IntRange(min=1), metavar="N", help="Take samples of N shards in turn."
)
@output_options
def main(
    source: Input,
    arrange: Callable[..., Iterator[Sample]],
    holds: bool,
    leaves: bool,
    width: int | None,
    output: Location,
) -> None:
    """Concatenate the samples of SHARDS into one tar.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, pipe:command.

    One sample is held at a time; --shuffle N holds N, --interleave N has N shards open.
    """
    check_output(output)
    refuse(width is not None and any(source.selection), "--interleave cannot be combined with --where or --keys")
    if width is None:
        samples = source.read(to_copy=not holds, packed=leaves)
    else:
        from tarshards.verbs.cat import interleave

        samples = interleave(source.shards, width, on_error=source.ledger)
    write_new_keys(arrange(samples), output, source.reject)
