"""Lines of text to samples."""

from __future__ import annotations

import click

from tarshards.cli._common import check_output, output_option, overwrite_option, tool
from tarshards.samples.conditions import Template
from tarshards.stream.ops import progress
from tarshards.verbs.create import is_field, read_text
from tarshards.write.shards import write_samples


@tool(epilog="Without FILES, or for -, lines are read from stdin. One line is held at a time.")
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option("-k", "--key", default="{record:09d}", metavar="TEMPLATE", help="Keys.", show_default=True)
@click.option("-f", "--field", default="txt", help="The field that a line becomes.", show_default=True)
@output_option
@overwrite_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def main(files: tuple[str, ...], key: str, field: str, output: str, overwrite: bool, quiet: bool) -> None:
    """Write a tar with a sample for each line of FILES, which are UTF-8 text, maybe compressed.

    FILES are shard expressions: part-{000..146}.txt.gz, globs, @listfile, http: and other URLs, pipe:command.
    """
    try:
        Template(key, {"record": 0})
    except ValueError as error:
        raise click.UsageError(f"-k: {error}") from error
    if not is_field(field):
        raise click.UsageError(f"-f: {field!r} cannot name a field")
    check_output(output, overwrite)
    samples = read_text(list(files) or ["-"], field=field, key=key, allow_pipe=True)
    write_samples(samples if quiet else progress(samples), output, allow_pipe=True)
