"""Map commands over samples."""

from __future__ import annotations

import os
import sys
from contextlib import closing, suppress
from functools import partial
from typing import Any

import click

from tarshards.cli._common import Input, check_output, output_option, overwrite_option, reads_samples, say, tool
from tarshards.errors import OpError
from tarshards.storage.location import Location
from tarshards.write.shards import write_samples

WAYS = ("command", "script", "python", "server")


@tool(
    epilog="Holds the samples under way and, unless --unordered, those done before an earlier one: at most 4 a slot, "
    "and more of quick ones up to 64 MB. "
    "Exit code: the number of samples that failed up to 100, 101 for more; 1 for bad data."
)
@partial(reads_samples, count=("--count",))
@click.option("-c", "--command", metavar="CMD", help="Run this line of bash for each sample.")
@click.option(
    "-s", "--script", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Run this program, or script."
)
@click.option("--python", metavar="MODULE:FUNCTION", help="Call this with a dict of bytes.")
@click.option("--server", metavar="CMD", help="Ask a worker that this line of bash starts.")
@click.option("-p", "-j", "--slots", type=click.IntRange(min=0), default=1, help="Run so many at once; 0: all cores.")
@click.option("--unordered", is_flag=True, help="Write results as they come, not in input order.")
@click.option("-S", "--subdirs", is_flag=True, help="Each subdirectory left behind is a sample.")
@click.option("--add-log", metavar="EXT", help="Keep what the command prints as this field.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Kill what runs longer."
)
@click.option("--retries", type=click.IntRange(min=0), default=0, help="Run what fails so many more times.")
@click.option(
    "-e",
    "--failed",
    type=click.Choice(["abort", "skip", "keep"]),
    help="A sample that fails: abort the run (default), leave it out, keep it as it came.",
)
@click.option("--halt", metavar="now|soon,fail=N|N%", help="End the run after so many failures.")
@click.option("--joblog", metavar="FILE", help="Write a line on each sample here.")
@click.option("--resume", is_flag=True, help="Keep what is done until all is; begin with what is kept.")
@click.option("--resume-failed", is_flag=True, help="The same, and run again what failed.")
@click.option("--state", metavar="FILE", help="Where --resume keeps it, not OUTPUT.tarproc.")
@click.option("--tmpdir", type=click.Path(exists=True, file_okay=False), help="Where scratch directories go.")
@output_option
@overwrite_option
def main(
    source: Input,
    output: str,
    overwrite: bool,
    slots: int,
    unordered: bool,
    failed: str | None,
    halt: str | None,
    joblog: str | None,
    resume: bool,
    resume_failed: bool,
    state: str | None,
    **options: Any,
) -> None:
    """Map a command over the samples of SHARDS.

    Each sample gets a scratch directory with a file sample.EXT for each field. What the command leaves under sample.*
    is the result; sample-SUFFIX.EXT is another sample, whose key ends in -SUFFIX. The command finds TAR_KEY TAR_INDEX
    TAR_SHARD TAR_SLOT in its environment; what it prints goes to stderr.
    """
    if sum(options[way] is not None for way in WAYS) != 1:
        raise click.UsageError("one of -c, -s, --python and --server says what to run")
    if halt is not None and failed == "abort":
        raise click.UsageError("--halt says when to end the run: use it with -e skip or -e keep")
    resume = resume or resume_failed
    if resume and state is None:
        if not Location.of(output).is_local:
            raise click.UsageError("--resume needs -o FILE, or --state FILE")
        state = f"{output}.tarproc"
    elif state is not None and not resume:
        raise click.UsageError("--state goes with --resume or --resume-failed")
    check_output(output, overwrite)
    if joblog is not None:
        check_output(joblog, overwrite or resume)

    from tarshards.run.samples.command import Halt, map_command

    policy = failed or ("abort" if halt is None else "skip")
    failures = _Failures(source)
    try:
        rule = Halt.parse(halt) if halt is not None else None
        outputs = map_command(
            source,
            **options,
            slots=slots or len(os.sched_getaffinity(0)),
            ordered=not unordered,
            halt=rule,
            on_error=None if policy == "abort" else failures.add,
            keep_failed=policy == "keep",
            joblog=joblog,
            state=state,
            retry_failed=resume_failed,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        with closing(outputs):  # type: ignore[type-var]
            write_samples(outputs, output, allow_pipe=True)
    except OpError as error:
        if rule is None or not rule.reached:
            raise
        say(str(error))
        failures.exit(rule.failed)
    if failures.count:
        failures.exit(failures.count)
    if state is not None:
        with suppress(FileNotFoundError):
            os.unlink(state)


class _Failures:
    """The samples whose command failed: told, counted, and kept in the quarantine's tar if there is one."""

    def __init__(self, source: Input):
        self.source, self.count = source, 0

    def add(self, sample: Any, error: Exception) -> None:
        self.count += 1
        say(str(error))
        if self.source.ledger.max_errors:
            self.source.reject(sample, error)

    def exit(self, count: int) -> None:
        """Exit with GNU parallel's code for so many failures."""
        say(f"{count} sample{'s' * (count != 1)} failed")
        if self.source.ledger.quarantined:
            click.echo(str(self.source.ledger), err=True)
        sys.exit(min(count, 101))
