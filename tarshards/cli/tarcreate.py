"""Create a tar."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import click

from tarshards.cli.input import ACCEPT, Losses, leaves_out, required
from tarshards.cli.output import OUTPUT, check_output, output_options
from tarshards.cli.parameters import (
    FILE,
    FOLDER,
    allow_empty_option,
    allow_pipe_option,
    dry_run_option,
    quiet_option,
    typed,
)
from tarshards.cli.program import say, tool
from tarshards.errors import SampleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarshards.samples.keys import Sample
    from tarshards.samples.ledger import Ledger
    from tarshards.storage.location import Location

EPILOG = """Without PLAN, or for -, the plan is read from stdin, once, row by row. One sample is held at a time,
and with --dir the names of one folder. URLs are fetched ahead, up to 32 at once, into at most a quarter of the
memory; the order stays."""
SHOWN = 10  # extensions that an error names
OF_FOLDER = "--exts, --missing, --class-field and --classes"


@tool(epilog=EPILOG)
@click.argument("plan", required=False, type=FILE)
@click.option("--dir", "folder", type=FOLDER, help="Read the files below FOLDER instead of a plan.")
@click.option("--lines", type=FILE, help="Read lines NAME SOURCE instead of a plan; - is stdin.")
@click.option("--jsonl", type=FILE, help="Read lines of JSON instead of a plan; - is stdin.")
@click.option("-C", "base", default="", show_default=False, type=FOLDER, help="Paths are relative to FOLDER.")
@click.option("-k", "--key", metavar="TEMPLATE", help='Keys, such as "{record:09d}"; columns are names too.')
@click.option("--delimiter", metavar="TEXT", help="Separator of the columns.  [default: a comma for .csv, else a tab]")
@allow_pipe_option
@click.option("--exts", metavar="FIELDS", help='With --dir: read these fields, such as "jpg;png cls".')
@click.option(
    "--missing",
    type=click.Choice(["fail", "skip", "ignore"]),
    help="With --exts: samples that lack a field.  [default: fail]",
)
@click.option("--class-field", metavar="FIELD", help="With --dir: add the number of the first folder.")
@click.option("--classes", type=OUTPUT, help="Write the names and numbers of the classes to FILE, not to stderr.")
@output_options
@leaves_out
@allow_empty_option
@dry_run_option
@quiet_option
def main(
    plan: str | None,
    folder: str | None,
    lines: str | None,
    jsonl: str | None,
    base: str,
    key: str | None,
    delimiter: str | None,
    allow_pipe: bool,
    exts: str | None,
    missing: str | None,
    class_field: str | None,
    classes: Location | None,
    output: Location,
    losses: Losses,
    allow_empty: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Create a tar of samples from PLAN, a table of fields and files; from a folder; from lines; or from JSON.

    The first row of PLAN names the columns: __key__, fields, and @jpg for a column of paths or URLs of jpg files.
    """
    inputs = [source for source in (plan, folder, lines, jsonl) if source is not None]
    from_plan = plan is not None or not inputs
    if len(inputs) > 1:
        raise click.UsageError("PLAN, --dir, --lines and --jsonl cannot be combined")
    if plan is not None and os.path.isdir(plan):
        raise click.UsageError(f"{plan} is a folder: read the files in it with --dir {plan}")
    if folder is None and (exts or missing or class_field or classes):
        raise click.UsageError(f"{OF_FOLDER} require --dir")
    if not from_plan and (key or delimiter):
        raise click.UsageError("-k and --delimiter require PLAN")
    if jsonl is not None and (base or allow_pipe):
        raise click.UsageError("-C and --allow-pipe require PLAN or --lines")
    if missing and not exts:
        raise click.UsageError("--missing requires --exts")
    if classes and not class_field:
        raise click.UsageError("--classes requires --class-field")
    if delimiter is not None:
        delimiter = delimiter.replace("\\t", "\t")
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise click.UsageError(f"--delimiter is one character, not {delimiter!r}")
    for target in [] if dry_run else [output, classes]:
        if target is not None:
            check_output(target)
    from tarshards.samples.tree import FileTree
    from tarshards.verbs.create import FieldSources, read_member_lines, read_plan
    from tarshards.verbs.jsonl import read_json_lines
    from tarshards.write.shards import write_samples

    skipped: Counter[str] = Counter()
    sources, ledger = FieldSources(base, allow_pipe), losses.ledger
    if folder is not None:
        missing = missing or "fail"
        samples = FileTree(folder).read(
            fields=exts, missing=missing, class_field=class_field, skipped=skipped, on_error=ledger
        )
    elif lines is not None:
        samples = read_member_lines(typed(lines), sources=sources, on_error=ledger)
    elif jsonl is not None:
        samples = read_json_lines(typed(jsonl), on_error=ledger)
    else:
        samples = read_plan(typed(plan or "-"), key=key, delimiter=delimiter, sources=sources, on_error=ledger)
    if not allow_empty:
        source = next((source for source in (folder, lines, jsonl, plan) if source is not None), "-")
        samples = required(samples, partial(_refuse_nothing, source, folder, exts, skipped, losses))
    if not quiet:
        from tarshards.stream.ops import progress

        samples = progress(samples)
    if dry_run:
        _count(samples, output, ledger)
    else:
        write_samples(_counted(samples, ledger), output)
    for reason, count in sorted(skipped.items()):
        say(f"skipped {count} {reason}")
    if folder is not None and class_field is not None:
        _show_classes(folder, None if dry_run else classes)


def _counted(samples: Iterator[Sample], ledger: Ledger) -> Iterator[Sample]:
    for sample in samples:
        ledger.count(samples=1)
        yield sample


def _refuse_nothing(source: str, folder: str | None, exts: str | None, skipped: Counter[str], losses: Losses) -> None:
    from tarshards.samples.tree import FileTree

    why = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    reason = f"no samples{f'; skipped {why}' if why else ''}"
    if losses.first is not None:
        reason += f": {losses.count} errors, the first: {losses.first}"
    if folder is not None and exts is not None and (fields := FileTree(folder).count_fields()):
        there = ", ".join(f"{field} ({count})" for field, count in fields.most_common(SHOWN))
        reason = f"no file has an extension of --exts {exts!r}; the extensions are {there}"
    raise SampleError(f"{reason}; {ACCEPT}", url=source)


def _count(samples: Iterator[Sample], output: Location, ledger: Ledger) -> None:
    from tarshards.samples.grouping import encode_sample
    from tarshards.tar.read import end_of, pack_members

    size = 0
    for sample in _counted(samples, ledger):
        encoded = encode_sample(sample)
        size += sum(map(len, pack_members(sample["__key__"], *encoded)))
    say(f"would write {ledger.samples} samples, {size + len(end_of(size))} bytes, to {output}")


def _show_classes(folder: str, target: Location | None) -> None:
    from tarshards.samples.lines import escape
    from tarshards.samples.tree import FileTree
    from tarshards.storage.opening import open_shard

    found = FileTree(folder).classes()
    rows = [(escape(name), number) for name, number in found.items()]
    if target is None:
        for name, number in rows:
            say(f"class {number} is {name}")
        return
    with open_shard(target, "wb") as file:
        file.write("".join(f"{name}\t{number}\n" for name, number in rows).encode())
