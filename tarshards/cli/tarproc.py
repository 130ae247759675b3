"""Map commands over samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import click

from tarshards.cli.input import Input, Losses, reads_samples, rekeyed, selects_samples
from tarshards.cli.output import check_output, output_options, write_new_keys, written
from tarshards.cli.parameters import COUNT, FILE, parallel_option, rekey_option, tmpdir_option
from tarshards.cli.program import say, tool, usage_errors
from tarshards.errors import OpError, SampleError
from tarshards.samples.keys import Sample
from tarshards.storage.location import Location

WAYS = ("command", "script", "python", "server")


@tool(
    epilog="Holds running samples and, unless --unordered, finished ones that wait for an earlier one: up to 4 per "
    "slot, or more of short ones up to 64 MB. "
    "Exit code: 0 done, with no more failures than --failed and --max-errors allow; 1 otherwise.",
    example="tarproc -p 5 -c 'ls; gm mogrify -size 256x256 *.jpg -resize 256x256' small.tar > out.tar",
)
@partial(reads_samples, count=("--count",))
@selects_samples
@click.option("-c", "--command", metavar="CMD", help="Run this line of bash for each sample.")
@click.option(
    "--script", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Run this program, or script."
)
@click.option("--python", metavar="MODULE:FUNCTION", help="Call this with a dict of bytes.")
@click.option("--server", metavar="CMD", help="Send samples to a server that this line of bash starts.")
@parallel_option("Samples run", 1, "-p", "-P", "slots")
@click.option("--unordered", is_flag=True, help="Write results as they finish, not in input order.")
@click.option("-S", "--subdirs", is_flag=True, help="Make a sample of each subdirectory.")
@click.option("--add-log", metavar="EXT", help="Store what the command prints as this field.")
@click.option(
    "--strip",
    metavar="FIELDS",
    default="",
    callback=lambda context, parameter, fields: fields.split(),
    help="Remove a newline at the end of these fields.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Kill a command that runs longer."
)
@click.option("--retries", type=COUNT, metavar="N", default=0, help="Retries of a failed sample.")
@click.option(
    "--failed",
    type=click.Choice(["abort", "skip", "keep"]),
    help="If a sample fails: abort the run, skip it, or keep it unchanged.  [default: abort; skip with --halt]",
)
@click.option("--halt", metavar="now|soon,fail=N|N%", help="End the run after this many failures.")
@click.option("--joblog", type=FILE, help="Write a line per sample to this file.")
@click.option("--resume", is_flag=True, help="Keep finished samples until the run is complete, and start with them.")
@click.option("--resume-failed", is_flag=True, help="The same, but rerun failed samples.")
@click.option("--state", type=FILE, help="Where --resume keeps samples.  [default: OUTPUT.tarproc]")
@tmpdir_option("scratch directories", "/dev/shm, $TMPDIR or /tmp")
@rekey_option
@output_options
def main(
    source: Input,
    template: str | None,
    output: Location,
    unordered: bool,
    failed: str | None,
    halt: str | None,
    resume: bool,
    resume_failed: bool,
    **options: Any,
) -> None:
    """Map a command over the samples of SHARDS.

    Each sample gets a scratch directory with a file sample.EXT per field. The files sample.* that the command leaves
    are the result; sample-SUFFIX.EXT is another sample, whose key ends in -SUFFIX. The environment has TAR_KEY,
    TAR_INDEX, TAR_SHARD and TAR_SLOT. What the command prints goes to stderr.
    """
    ways = sum(options[way] is not None for way in WAYS)
    if ways != 1:
        raise click.UsageError("give one of -c, --script, --python and --server")
    aborts = halt is not None and failed == "abort"
    if aborts:
        raise click.UsageError("--halt does not go with --failed abort; use --failed skip or keep")
    resume, state, joblog = resume or resume_failed, options.pop("state"), options["joblog"]
    if state is not None and not resume:
        raise click.UsageError("--state goes with --resume or --resume-failed")
    if resume and state is None:
        if not output.is_local:
            raise click.UsageError("--resume needs -o FILE, or --state FILE")
        state = f"{output.url}.tarproc"
    from tarshards.run.samples.journal import add_end, has_ended

    split = [] if source.split == "first" else [source.split]
    choice = source.specs, source.count, str(source.slice), source.fields, template, *source.selection, *split
    run = repr((choice, [options[name] for name in (*WAYS, "subdirs", "add_log")] + options["strip"]))
    check_output(output, replaces=state is not None and has_ended(state, run))
    if joblog is not None:
        check_output(written(joblog), replaces=resume)

    from tarshards.run.samples.command import Halt, map_command

    samples = source if template is None else rekeyed(source, template)
    policy = failed or ("abort" if halt is None and source.losses.max_errors is None else "skip")
    failures = _Failures(source.losses, aborts=policy == "abort" and not source.losses.goes_on)
    with usage_errors():
        rule = Halt.parse(halt) if halt is not None else None
        outputs = map_command(
            samples,
            **options,
            ordered=not unordered,
            halt=rule,
            on_error=None if policy == "abort" else failures.add,
            keep_failed=policy == "keep",
            state=state,
            retry_failed=resume_failed,
        )

    def finished() -> Iterator[Sample]:
        yield from outputs
        if state is not None:
            add_end(state, run)

    try:
        with closing(outputs):  # type: ignore[type-var]
            write_new_keys(source.require(finished()), output, failures.refuse)
    except OpError as error:
        if rule is not None and rule.reached and source.losses.first is not None:
            raise OpError(f"{error.reason}; the first: {source.losses.first}") from error
        raise
    if failures.refused:
        results = f"{failures.refused} result{'s' * (failures.refused != 1)}"
        raise SampleError(f"{results} could not be written; all others are in this file", url=output.name)
    if state is not None and not failures.count:
        with suppress(FileNotFoundError):
            os.unlink(state)


class _Failures:
    """Reports and counts failed samples, and writes them to the quarantine tar if there is one."""

    def __init__(self, losses: Losses, *, aborts: bool):
        self.losses, self.count, self.aborts = losses, 0, aborts
        self.refused = 0  # in a run that allows no failures

    def refuse(self, sample: Any, error: Exception) -> None:
        """Leave out a result that the output cannot accept, and continue, even if failures abort the run."""
        if self.aborts:
            say(str(error), failed=True)
            self.refused += 1
        else:
            self.add(sample, error)

    def add(self, sample: Any, error: Exception) -> None:
        self.count += 1
        say(str(error), failed=True)
        self.losses.reject_and_go_on(sample, error)
