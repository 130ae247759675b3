"""What a tool writes: checks of its target before it begins, and tars whose keys may be new."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from tarshards.cli.parameters import typed
from tarshards.cli.program import refuse
from tarshards.errors import SampleError, TarshardsError, UrlError

if TYPE_CHECKING:
    from tarshards.samples.keys import Sample


def check_output(target: str, overwrite: bool, *, is_field: bool = False) -> None:
    """Refuse a tar onto a terminal, a folder, an existing file, local or remote, and a local one that others write.

    Refuse the name of another format too, unless a field is written, which is of any format. Who overwrites may replace
    what another writes at the same time: the later one stays.
    """
    from tarshards.storage.claims import Claims
    from tarshards.storage.location import Location

    refuse(target == "-" and sys.stdout.isatty(), "stdout is a terminal: name a file with -o, or pipe it on")
    if not is_field:
        check_suffix(target)
    location = Location.of(target)
    refuse(not overwrite and location.is_taken(), f"{location.name} exists; --overwrite replaces it")
    path = location.path
    refuse(path is not None and os.path.isdir(path), f"{target} is a folder; name a file in it")
    if not overwrite:
        click.get_current_context().with_resource(Claims()).take(location)


def check_suffix(target: str) -> None:
    """Refuse the name of a compression or format that is not written, for an output or a pattern of outputs."""
    from tarshards.storage.compression import named_compression
    from tarshards.storage.location import Location

    try:
        named_compression(Location.of(target))
    except UrlError as error:
        raise click.UsageError(str(error)) from error


def write_new_keys(
    samples: Iterable[Sample], output: str, reject: Callable[[Sample, TarshardsError], object], *, sync: bool
) -> None:
    """Write *samples* to *output* in a tool with --rekey, and give *reject* those that the output cannot take."""
    from tarshards.write.shards import DUPLICATE_KEY, write_samples

    def refuse(sample: Sample, error: TarshardsError) -> None:
        if error.reason.startswith(DUPLICATE_KEY):
            error = SampleError(f"{error.reason}; --rekey makes new keys", url=error.url, key=error.key)
        reject(sample, error)

    write_samples(samples, typed(output), reject=refuse, sync=sync)
