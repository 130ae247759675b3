"""Take the first sample that matches."""

from __future__ import annotations

from functools import partial

import click

from tarshards.cli.input import Input, counted, reads_samples
from tarshards.cli.output import check_output, output_options
from tarshards.cli.parameters import where_option
from tarshards.cli.program import tool, usage_errors
from tarshards.errors import SampleError
from tarshards.samples.conditions import Condition
from tarshards.samples.fields import pick_field
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.verbs.grep import having, matching
from tarshards.write.shards import write_samples


@tool(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@partial(reads_samples, may_be_empty=False)
@where_option
@click.option("--tar", "whole", is_flag=True, help="Write the whole sample, as a tar.")
@output_options
def main(source: Input, where: str | None, whole: bool, output: Location) -> None:
    """Write the file named by -f of the first sample of SHARDS that has it and meets the condition.

    -f "jpg;png" is one file, the first of the alternatives that the sample has; samples that have none of them do not
    match. With --tar, -f only says what a sample must have, and the whole sample is written.

    EXPR is a condition in Python's syntax. Names are fields, decoded by their extension (cls, json, txt, npy ...);
    key, shard; fields["seg.png"]; has("json") asks for a field that may be missing, which is an error otherwise.

    One sample is held at a time. Exits with 1 when no sample matches.
    """
    wanted = source.take_field_words()
    if not whole and len(wanted) != 1:
        raise click.UsageError('name the file to write, -f "jpg;png", or write the whole sample with --tar')
    with usage_errors("--where"):
        condition = Condition("True" if where is None else where)
    if whole or output.url != "-":
        check_output(output, is_field=not whole)
    wants = counted(lambda sample: any(having([sample], wanted)) and condition(sample), source.ledger, "tarfirst")
    sample = next(matching(source, wants, reject=source.reject), None)
    if sample is None:
        raise SampleError("no sample matches")
    if whole:
        write_samples([sample], output)
    else:
        with open_url(output, "wb") as stream:
            stream.write(sample[pick_field(sample, wanted[0])])
