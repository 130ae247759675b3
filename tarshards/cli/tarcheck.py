"""Check a dataset, and save what is whole of a damaged one."""

from __future__ import annotations

import os
import sys

import click

from tarshards.cli._common import check_output, overwrite_option, say, tool


@tool(epilog="Reads headers only, unless --decode asks for more. Without SHARDS, or for -, a tar is read from stdin.")
@click.argument("shards", nargs=-1, metavar="[SHARDS]...")
@click.option("-T", "--list", "lists", multiple=True, metavar="FILE", help="Read shards from FILE too.")
@click.option("--decode", is_flag=True, help="Decode all fields, but none that can run code.")
@click.option("-j", "--jobs", type=click.IntRange(min=0), default=1, show_default=True, help="Threads; 0: the cores.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as one JSON object.")
@click.option("--strict", is_flag=True, help="Exit with 3 where there are only warnings.")
@click.option("--repair", metavar="OUT", help="Write every whole sample to the tar OUT.")
@overwrite_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def main(
    shards: tuple[str, ...],
    lists: tuple[str, ...],
    decode: bool,
    jobs: int,
    as_json: bool,
    strict: bool,
    repair: str | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Check SHARDS: damage, missing fields, duplicate keys, undecodable fields, indexes; and count what they hold.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, pipe:command.

    The report goes to stdout. --repair goes on behind damage at the next sound header.
    """
    from tarshards.storage.expressions import expand_urls
    from tarshards.verbs.check import check_shards
    from tarshards.verbs.repair import repair_shards

    urls = list(expand_urls([*shards, *(f"@{name}" for name in lists)] or ["-"]))
    if repair is not None:
        check_output(repair, overwrite)
        if repair == "-" or "-" in urls:
            raise click.UsageError("--repair reads files and writes a file: neither SHARDS nor OUT can be -")
    shown = _progress(urls, quiet)
    jobs = jobs or os.cpu_count() or 1
    if repair is None:
        report = check_shards(shown, decode=decode, jobs=jobs, allow_pipe=True)
    else:
        report, saved = repair_shards(shown, repair, decode=decode, jobs=jobs, allow_pipe=True)
        say(f"{saved} samples are in {repair}")
    if as_json:
        import json

        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        click.echo(str(report))
    if report.total("error"):
        sys.exit(1)
    if strict and report.total("warning"):
        sys.exit(3)


def _progress(urls: list[str], quiet: bool):
    if quiet or not sys.stderr.isatty():
        return urls
    from tqdm import tqdm

    return tqdm(urls, unit=" shards")
