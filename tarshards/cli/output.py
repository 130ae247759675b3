"""The output of a tool: its options, checks of its target before it begins, and tars whose keys may be new."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import click

from tarshards.cli.parameters import Name, options
from tarshards.errors import SampleError, TarshardsError, UrlError

if TYPE_CHECKING:
    from tarshards.samples.keys import Sample
    from tarshards.storage.location import Location

NO_SYNC, OVERWRITE = "tarshards.no_sync", "tarshards.overwrite"  # keys in click's context
OVERWRITES = "Replace existing files."


class Output(Name):
    """A file to write: the option's value is its ``written`` location."""

    def __init__(self) -> None:
        super().__init__("file")

    def convert(self, value: Any, param: Any, ctx: Any) -> Location:
        return written(value)


def written(name: str | Location) -> Location:
    """Return the location of an output that a user typed: it may run a command, and obeys --no-sync."""
    from tarshards.storage.location import Location

    return Location.of(name, allow_pipe=True, sync=waits_for_disk())


def waits_for_disk() -> bool:
    """Return whether outputs wait until they are on the disk, that is, without --no-sync."""
    return not click.get_current_context().meta.get(NO_SYNC)


def _keep(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    context.meta[f"tarshards.{parameter.name}"] = is_given


OUTPUT = Output()


#: Eager, so that it is known when the other options become locations.
sync_option: Final = click.option(
    "--no-sync",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_keep,
    help="Do not wait for the disk: for scratch data.",
)


def writes_file(parameter: Callable[..., Any], *names: str, replaces: bool = True, **how: Any) -> Callable[[Any], Any]:
    """Return *parameter*, click's option or argument, for a file to write, --no-sync, and --overwrite if it *replaces*.

    *how* is click's. The value is a ``written`` location, which ``check_output`` checks.
    """
    overwrite = click.option("--overwrite", is_flag=True, expose_value=False, callback=_keep, help=OVERWRITES)
    return options(parameter(*names, type=OUTPUT, **how), *([overwrite] if replaces else []), sync_option)


output_options: Final = writes_file(
    click.option, "-o", "--output", default="-", show_default=False, help="Write to FILE rather than to stdout."
)


def pattern_options(meaning: str, *, makes_tars: bool = False) -> Callable[[Any], Any]:
    """Return -o, --overwrite and --no-sync of a tool that writes files named by a pattern.

    It gets *output*, a ``written`` location, and whether to *overwrite* files. If it *makes_tars*, a pattern of another
    format is refused.
    """

    def accept(context: click.Context, parameter: click.Parameter, pattern: str) -> Location:
        if makes_tars:
            check_suffix(pattern)
        return written(pattern)

    name = click.option("-o", "--output", required=True, metavar="PATTERN", callback=accept, help=meaning)
    return options(name, click.option("--overwrite", is_flag=True, help=OVERWRITES), sync_option)


def check_output(target: Location, *, is_field: bool = False, replaces: bool = False) -> None:
    """Refuse a terminal, a folder, an existing file (local or remote), and a local file that others are writing.

    Refuse a name of another format too, except when a field is written, which may have any format. With --overwrite, or
    if the tool *replaces* the file anyway, two tools may write it at the same time: the one that ends later wins.
    """
    from tarshards.storage.claims import Claims

    if target.url == "-" and sys.stdout.isatty():
        raise click.UsageError("stdout is a terminal: name a file with -o, or pipe it on")
    if not is_field:
        check_suffix(target)
    path = target.path
    if path is not None and os.path.isdir(path):
        raise click.UsageError(f"{target.url} is a folder; name a file in it")
    context = click.get_current_context()
    if not (replaces or context.meta.get(OVERWRITE)):
        context.with_resource(Claims()).take(target)
        if target.is_taken():
            raise click.UsageError(f"{target} exists; --overwrite replaces it")


def check_suffix(target: str | Location) -> None:
    """Refuse an output, or a pattern, whose name requests a compression or format that no tool writes."""
    from tarshards.storage.location import Location

    try:
        Location.of(target).compression()
    except UrlError as error:
        raise click.UsageError(str(error)) from error


def write_new_keys(
    samples: Iterable[Sample], output: Location, reject: Callable[[Sample, TarshardsError], object]
) -> None:
    """Write *samples* to *output* in a tool that has --rekey; *reject* gets samples that the output refuses."""
    from tarshards.write.shards import DUPLICATE_KEY, write_samples

    def refuse(sample: Sample, error: TarshardsError) -> None:
        if error.reason.startswith(DUPLICATE_KEY):
            error = SampleError(f"{error.reason}; --rekey makes new keys", url=error.url, key=error.key)
        reject(sample, error)

    write_samples(samples, output, reject=refuse)
