"""Samples to lines of JSON."""

from __future__ import annotations

import click

from tarshards.cli._common import Input, check_output, output_option, overwrite_option, reads_samples, tool
from tarshards.storage.opening import open_shard
from tarshards.verbs.jsonl import json_lines


@tool(epilog="Streams: holds one sample. Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
@click.option("--omit-binary", is_flag=True, help="Leave out the fields that only base64 could hold.")
@output_option
@overwrite_option
def main(source: Input, omit_binary: bool, output: str, overwrite: bool) -> None:
    """Write a line of JSON for each sample of SHARDS: an object of __key__ and the fields, all or those of -f.

    Fields like json and cls are values, those like txt are strings, and all others {"base64": "..."}. tarcreate --json
    makes samples of such lines again.
    """
    if output != "-":
        check_output(output, overwrite)
    fields, source.fields = source.fields or "*", None  # what a field is its own name says, not its new one
    with open_shard(output, "wb", allow_pipe=True) as stream:
        for line in json_lines(source, fields, binary=not omit_binary, reject=source.reject):
            # Of names that are no UTF-8, what is left in a str are escapes to JSON too.
            stream.write(line.encode(errors="backslashreplace") + b"\n")
