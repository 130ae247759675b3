"""Lines of text to samples."""

from __future__ import annotations

import click

from tarshards.cli.input import ACCEPT, ShardArguments, required
from tarshards.cli.output import check_output, output_options
from tarshards.cli.parameters import FILE, allow_empty_option, quiet_option
from tarshards.cli.program import tool, usage_errors
from tarshards.cli.terminal import with_bar
from tarshards.errors import SampleError
from tarshards.storage.location import Location
from tarshards.verbs.create import read_text
from tarshards.write.shards import write_samples


@tool(epilog="Without FILES, or for -, lines are read from stdin. One line is held at a time.")
@click.argument("files", nargs=-1, metavar="[FILES]...", type=FILE)
@click.option("-k", "--key", default="{record:09d}", metavar="TEMPLATE", help="Keys of the samples.")
@click.option("--field", default="txt", metavar="FIELD", help="The field that a line becomes.")
@output_options
@allow_empty_option
@quiet_option
def main(files: tuple[str, ...], output: Location, allow_empty: bool, quiet: bool, **names: str) -> None:
    """Write a tar with a sample for each line of FILES, which are text, compressed or not.

    FILES are shard expressions: part-{000..146}.txt.gz, globs, @listfile, http: and other URLs, pipe:command.
    """
    with usage_errors():
        samples = read_text(ShardArguments([*files]).named(), **names)
    check_output(output)
    if not allow_empty:
        samples = required(samples, _refuse_nothing)
    write_samples(with_bar(samples, quiet), output)


def _refuse_nothing() -> None:
    raise SampleError(f"the input has no lines; {ACCEPT}")
