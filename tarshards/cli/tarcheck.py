"""Check a dataset, and save the whole samples of a damaged one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.input import ACCEPT, ShardArguments, refuse_terminal, takes_shards
from tarshards.cli.output import check_output, writes_file
from tarshards.cli.parameters import (
    allow_empty_option,
    index_dir_option,
    parallel_option,
    shards_argument,
)
from tarshards.cli.program import say, tool
from tarshards.cli.terminal import Color, colored, with_bar

if TYPE_CHECKING:
    from tarshards.storage.location import Location


@tool(epilog="Reads headers only, unless --decode is given. Without SHARDS, or for -, a tar is read from stdin.")
@shards_argument
@index_dir_option
@click.option("--decode", is_flag=True, help="Decode all fields but videos and those that can run code.")
@parallel_option("Threads", 1, "jobs")
@click.option("--json", "as_json", is_flag=True, help="Write the report as one JSON object.")
@click.option("--strict", is_flag=True, help="Exit with 3 if there are warnings and no errors.")
@writes_file(click.option, "--repair", help="Write every whole sample to the tar FILE.")
@allow_empty_option
@click.option("-q", "--quiet", is_flag=True, help="Write only errors; no progress bar.")
@takes_shards
def main(
    shards: ShardArguments,
    as_json: bool,
    strict: bool,
    repair: Location | None,
    quiet: bool,
    **how: Any,
) -> None:
    """Check SHARDS for damage, missing fields, duplicate keys, undecodable fields, bad indexes; count what they hold.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, pipe:command.

    The report goes to stdout. After damage, reading resumes at the next valid header.
    """
    from tarshards.verbs.check import check_shards
    from tarshards.verbs.repair import repair_shards

    refuse_terminal(not shards.specs)
    named = shards.named()
    if repair is not None:
        is_last = shards.split == "last"
        if is_last:
            raise click.UsageError("--repair cannot be combined with --split last: keys with dots cannot be written")
        if "-" in [repair.url, *(shard.url for shard in named)]:
            raise click.UsageError("--repair reads files and writes a file: neither SHARDS nor FILE can be -")
        check_output(repair)
    shown = with_bar(named, quiet, total=len(named), unit="shards")
    if repair is None:
        report = check_shards(shown, **how)
    else:
        report, saved = repair_shards(shown, repair, **how)
        wrote = f"{saved} samples are in {repair}"
        say(wrote if saved or how["allow_empty"] else f"no sample is whole, so {repair} is not written; {ACCEPT}")
    if as_json:
        import json

        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        lines = report.listed("error") if quiet else str(report).split("\n")
        click.echo("".join(f"{_colored(line)}\n" for line in lines), nl=False, color=True)
    if report.total("error"):
        sys.exit(1)
    if strict and report.total("warning"):
        sys.exit(3)


def _colored(line: str) -> str:
    """Return a line of a report with its severity in a colour, or whole if it counts what a damaged shard lost."""
    severities: tuple[Color, ...] = ("error", "warning")
    for severity in severities:
        if line.startswith(f"{severity}:"):
            return colored(f"{severity}:", severity, sys.stdout) + line[len(severity) + 1 :]
    return colored(line, "error", sys.stdout) if " samples are whole, " in line else line
