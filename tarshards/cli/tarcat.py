"""Concatenate shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tarshards.cli.input import Input, reads_samples, rekeyed, selects_samples, sliced
from tarshards.cli.output import check_output, output_options, write_new_keys
from tarshards.cli.parameters import (
    COUNT,
    as_values,
    keep_metadata_option,
    options,
    rekey_option,
    seed_option,
    shuffle_option,
)
from tarshards.cli.program import tool

if TYPE_CHECKING:
    from tarshards.samples.grouping import Copies
    from tarshards.samples.keys import Sample
    from tarshards.storage.location import Location


class Arrangement(NamedTuple):
    """The options that arrange samples, in the order skip, shuffle, slice, count, fields, source, rekey."""

    skipped: int | None
    buffer: int | None
    seed: int
    template: str | None
    add: bool

    @property
    def copies(self) -> Copies | None:
        """What may be read for ``read_shard`` to copy: whole samples if unchanged, none if some are held."""
        if self.buffer is not None:
            return None
        return "fields" if self.skipped or self.template is not None or self.add else "samples"

    def __call__(self, samples: Iterable[Sample], source: Input) -> Iterator[Sample]:
        """Return *samples*, all that *source* has, as they are written."""
        samples = source.require(samples)
        if self.skipped:
            samples = sliced(samples, slice(self.skipped, None), source.ledger, "--skip")
        if self.buffer is not None:
            from tarshards.stream.ops import shuffle

            samples = shuffle(samples, self.buffer, initial=self.buffer, seed=self.seed)
        samples = source.choose(samples, lambda: self._left(source.known()))
        if self.add:
            from tarshards.stream.ops import add_source, map_fields

            samples = map_fields(add_source(samples), {"source": str.encode})
        return iter(samples if self.template is None else rekeyed(samples, self.template))

    def _left(self, total: int | None) -> int | None:
        return None if total is None else max(0, total - (self.skipped or 0))


def arranges_samples(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that arrange samples to a command; it gets them as *arrange*, an ``Arrangement``."""

    @wraps(command)
    def with_arrangement(arrange: Arrangement, **values: Any) -> Any:
        if arrange.template is not None:
            rekeyed((), arrange.template)
        return command(arrange=arrange, **values)

    return options(
        rekey_option,
        click.option("--skip", "skipped", type=COUNT, metavar="N", help="Skip the first N samples."),
        shuffle_option,
        seed_option,
        click.option("--source", "add", is_flag=True, help="Add the shard's URL as the field source."),
    )(as_values(arrange=Arrangement)(with_arrangement))


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
    arrange: Arrangement,
    width: int | None,
    output: Location,
) -> None:
    """Concatenate the samples of SHARDS into one tar.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, pipe:command.

    One sample is held at a time; --shuffle N holds N, --interleave N has N shards open.
    """
    check_output(output)
    if width is not None and any(source.selection):
        raise click.UsageError("--interleave cannot be combined with --where or --keys")
    if width is None:
        samples = source.read(arrange.copies)
    else:
        from tarshards.verbs.cat import interleave

        samples = interleave(source.shards, width, on_error=source.ledger)
    write_new_keys(arrange(samples, source), output, source.reject)
