"""List samples."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, writes_file
from tarshards.cli.program import tool, usage_errors
from tarshards.cli.terminal import colored

if TYPE_CHECKING:
    from tarshards.storage.location import Location

EPILOG = """Without SHARDS, or for -, a tar is read from stdin. One sample is held at a time; --summary remembers the
keys too, about 150 bytes each, of up to 10 million samples."""


@tool(epilog=EPILOG, example="tarshow -c 2 small.tar")
@reads_samples
@click.option("--summary", is_flag=True, help="Show a summary: samples, fields, sizes, duplicate keys.")
@click.option("--images", is_flag=True, help="Show images too, as colour blocks.")
@click.option("--table", is_flag=True, help="Show columns with a header, as on a terminal, also in a file or pipe.")
@writes_file(click.option, "--html", help="Write a contact sheet for a browser instead.")
def main(source: Input, summary: bool, images: bool, table: bool, html: Location | None) -> None:
    """List the samples of SHARDS: one line each, with the key, then every field as NAME:BYTES=PREVIEW.

    On a terminal the lines are a table, whose columns are cut to fit.
    """
    if summary + images + table + (html is not None) > 1:
        raise click.UsageError("--summary, --images, --table and --html cannot be combined")
    if html is not None:
        _write_html(source, html)
    elif summary:
        _sum_up(source)
    elif table or (sys.stdout.isatty() and not images):
        _tabulate(source)
    else:
        _list(source, images)


def _tabulate(source: Input) -> None:
    from tarshards.verbs.show import tabulate

    how: dict[str, int] = {}
    if sys.stdout.isatty():
        source.quiet = True  # else the bar would appear between the lines
        size = shutil.get_terminal_size()
        how = {"width": size.columns, "lines": max(2, size.lines - 2)}
    stdout = sys.stdout.buffer
    for line in tabulate(source, mark=_colored, **how):
        stdout.write(line.encode() + b"\n")
        stdout.flush()


def _colored(text: str, color: Any) -> str:
    return colored(text, color, sys.stdout)


def _list(source: Input, images: bool) -> None:
    from tarshards.verbs.show import PICTURE, draw_pictures, list_sample

    source.quiet |= sys.stdout.isatty()
    terminal = _terminal() if images else None
    stdout = sys.stdout.buffer  # click.echo takes twice the time
    for sample in source:
        stdout.write(list_sample(sample).encode() + b"\n")
        stdout.flush()
        if terminal is not None:
            for picture in draw_pictures(sample, columns=min(PICTURE, terminal.width)):
                terminal.print(picture)


def _terminal() -> Any:
    from tarshards.samples.codecs.registry import require

    with usage_errors():
        require("rich_pixels", extra="show")
        return require("rich.console", extra="show").Console(force_terminal=True, markup=False, highlight=False)


def _sum_up(source: Input) -> None:
    from tarshards.verbs.show import Summary

    summary = Summary()
    for sample in source:
        summary.add(sample)
    click.echo(str(summary))


def _write_html(source: Input, target: Location) -> None:
    from tarshards.storage.expressions import spec_name
    from tarshards.view.contact_sheet import write_contact_sheet

    check_output(target)
    write_contact_sheet(source, target, title=" ".join(map(spec_name, source.specs)))
