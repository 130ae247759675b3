"""Concatenate shards."""

from __future__ import annotations

import click

from tarshards.tools._common import Input, check_output, output_option, overwrite_option, reads_samples
from tarshards.writer import write_samples


@click.command(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
@output_option
@overwrite_option
def main(source: Input, output: str, overwrite: bool) -> None:
    """Concatenate the samples of SHARDS into one tar.

    SHARDS are shard expressions: train-{000..146}.tar, globs, @listfile, http: and other URLs, pipe:command.
    """
    check_output(output, overwrite)
    write_samples(source, output, allow_pipe=True)
