"""Samples to lines of JSON."""

from __future__ import annotations

import json

import click

from tarshards.cli.input import Input, reads_samples
from tarshards.cli.output import check_output, output_options
from tarshards.cli.program import shown, tool
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.verbs.jsonl import json_lines


@tool(epilog="Streams: holds one sample. Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
@click.option("--omit-binary", is_flag=True, help="Leave out fields that need base64.")
@output_options
def main(source: Input, omit_binary: bool, output: Location) -> None:
    """Write a line of JSON for each sample of SHARDS: an object with __key__ and the fields, all or those of -f.

    Fields such as json and cls are values, those such as txt are strings, and all others {"base64": "..."}. tarcreate
    --jsonl converts such lines back into samples.
    """
    if output.url != "-":
        check_output(output)
    fields = source.take_fields() or "*"  # the type of a field follows from its old name, not the new one
    with open_shard(output, "wb") as stream:
        lines = json_lines(source, fields, binary=not omit_binary, reject=source.reject)
        for line in source.require(lines):
            # Bytes of names that are not UTF-8 are surrogates in a str; JSON has the same escapes for them.
            stream.write(shown(line, output.url, _escape).encode(errors="backslashreplace") + b"\n")


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]
