"""Take the first sample that matches."""

from __future__ import annotations

import click

from tarshards.cli._common import Input, check_output, output_option, overwrite_option, reads_samples, tool
from tarshards.errors import SampleError, TarshardsError
from tarshards.samples.conditions import Condition
from tarshards.samples.fields import parse_selection, pick_field
from tarshards.samples.read import Sample
from tarshards.storage.opening import open_url
from tarshards.write.shards import write_samples


@tool(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
@click.option("--where", metavar="EXPR", help="""Condition on the sample: 'cls > 3 and json["ok"]'.""")
@click.option("--tar", "whole", is_flag=True, help="Write the whole sample, as a tar.")
@output_option
@overwrite_option
def main(source: Input, where: str | None, whole: bool, output: str, overwrite: bool) -> None:
    """Write the first file named by -f of SHARDS: that of the first sample that has it and meets the condition.

    -f "jpg;png" is one file, the first of the alternatives that the sample has; samples that have none of them do not
    match. With --tar -f only says what a sample must have, and the whole sample is written.

    EXPR is a condition in Python's syntax. Names are fields, decoded by their extension (cls, json, txt, npy ...);
    key, shard; fields["seg.png"]; has("json") asks for a field that may be missing, which is an error otherwise.

    One sample is held at a time. Exits with 1 when no sample matches.
    """
    wanted = _alternatives(source.fields, whole)
    source.fields = None  # nothing is selected from the sample before the condition has seen it
    condition = _condition(where)
    if whole or output != "-":
        check_output(output, overwrite)
    sample = _first(source, wanted, condition)
    if whole:
        write_samples([sample], output, allow_pipe=True)
        return
    field = pick_field(sample, wanted[0])
    with open_url(output, "wb", allow_pipe=True) as stream:
        stream.write(sample[field])


def _alternatives(fields: str | None, whole: bool) -> list[list[str]]:
    terms = [] if fields is None else parse_selection(fields)
    if any(term.name is not None or term.alternatives == ["*"] for term in terms):
        raise click.UsageError('-f names files: -f "jpg;png"')
    if not whole and len(terms) != 1:
        raise click.UsageError('one file is written: name it with -f "jpg;png", or take the sample with --tar')
    return [term.alternatives for term in terms]


def _condition(where: str | None) -> Condition:
    try:
        return Condition("True" if where is None else where)
    except ValueError as error:
        raise click.UsageError(f"--where: {error}") from error


def _first(source: Input, wanted: list[list[str]], condition: Condition) -> Sample:
    for sample in source:
        if all(any(field in sample for field in alternatives) for alternatives in wanted):
            try:
                if condition(sample):
                    return sample
            except TarshardsError as error:
                source.reject(sample, error)
    raise SampleError("no sample matches")
