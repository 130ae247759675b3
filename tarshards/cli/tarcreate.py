"""Create a tar."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tarshards.cli.input import ACCEPT, Losses, leaves_out, required
from tarshards.cli.output import OUTPUT, check_output, output_options
from tarshards.cli.parameters import (
    FILE,
    FOLDER,
    allow_empty_option,
    allow_pipe_option,
    as_values,
    dry_run_option,
    quiet_option,
    typed,
)
from tarshards.cli.program import say, tool
from tarshards.cli.terminal import with_bar
from tarshards.errors import SampleError

if TYPE_CHECKING:
    from tarshards.samples.keys import Sample
    from tarshards.samples.ledger import Ledger
    from tarshards.storage.location import Location

EPILOG = """Without PLAN, or for -, the plan is read from stdin, once, row by row. One sample is held at a time,
and with --dir the names of one folder. URLs are fetched ahead, up to 32 at once, into at most a quarter of the
memory; the order stays."""
SHOWN = 10  # extensions that an error names
OF_FOLDER = "--exts, --missing, --class-field and --classes"


class Sources(NamedTuple):
    """What samples are made of: one of the first four, by default a plan from stdin; and how."""

    plan: str | None
    folder: str | None
    lines: str | None
    jsonl: str | None
    base: str
    key: str | None
    delimiter: str | None
    allow_pipe: bool
    exts: str | None
    missing: str | None
    class_field: str | None
    classes: Location | None

    @property
    def given(self) -> list[str]:
        """Those of the first four that are given."""
        return [source for source in (self.folder, self.lines, self.jsonl, self.plan) if source is not None]

    @property
    def separator(self) -> str | None:
        """The delimiter, which may be written as an escape."""
        return None if self.delimiter is None else self.delimiter.replace("\\t", "\t")

    def check(self) -> None:
        """Refuse options that do not go together."""
        from_plan = self.plan is not None or not self.given
        if len(self.given) > 1:
            raise click.UsageError("PLAN, --dir, --lines and --jsonl cannot be combined")
        if self.plan is not None and os.path.isdir(self.plan):
            raise click.UsageError(f"{self.plan} is a folder: read the files in it with --dir {self.plan}")
        if self.folder is None and (self.exts or self.missing or self.class_field or self.classes):
            raise click.UsageError(f"{OF_FOLDER} require --dir")
        if not from_plan and (self.key or self.delimiter):
            raise click.UsageError("-k and --delimiter require PLAN")
        if self.jsonl is not None and (self.base or self.allow_pipe):
            raise click.UsageError("-C and --allow-pipe require PLAN or --lines")
        if self.missing and not self.exts:
            raise click.UsageError("--missing requires --exts")
        if self.classes and not self.class_field:
            raise click.UsageError("--classes requires --class-field")
        delimiter = self.separator
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise click.UsageError(f"--delimiter is one character, not {delimiter!r}")

    def read(self, skipped: Counter[str], ledger: Ledger) -> Iterator[Sample]:
        """Yield the samples; *skipped* counts what is passed over in a folder, by the reason."""
        from tarshards.samples.tree import FileTree
        from tarshards.verbs.create import FieldSources, read_member_lines, read_plan
        from tarshards.verbs.jsonl import read_json_lines

        if self.folder is not None:
            how: Any = {"missing": self.missing or "fail", "class_field": self.class_field, "skipped": skipped}
            return FileTree(self.folder).read(fields=self.exts, on_error=ledger, **how)
        sources = FieldSources(self.base, self.allow_pipe)
        if self.lines is not None:
            return read_member_lines(typed(self.lines), sources=sources, on_error=ledger)
        if self.jsonl is not None:
            return read_json_lines(typed(self.jsonl), on_error=ledger)
        how = {"key": self.key, "delimiter": self.separator}
        return read_plan(typed(self.plan or "-"), sources=sources, on_error=ledger, **how)

    def refuse_nothing(self, skipped: Counter[str], losses: Losses) -> None:
        """Raise SampleError, which says why there was no sample."""
        from tarshards.samples.tree import FileTree

        why = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        reason = f"no samples{f'; skipped {why}' if why else ''}"
        if losses.first is not None:
            reason += f": {losses.count} errors, the first: {losses.first}"
        if self.folder is not None and self.exts is not None and (fields := FileTree(self.folder).count_fields()):
            there = ", ".join(f"{field} ({count})" for field, count in fields.most_common(SHOWN))
            reason = f"no file has an extension of --exts {self.exts!r}; the extensions are {there}"
        raise SampleError(f"{reason}; {ACCEPT}", url=next(iter(self.given), "-"))


@tool(epilog=EPILOG)
@as_values(sources=Sources)
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
def main(sources: Sources, output: Location, losses: Losses, allow_empty: bool, dry_run: bool, quiet: bool) -> None:
    """Create a tar of samples from PLAN, a table of fields and files; from a folder; from lines; or from JSON.

    The first row of PLAN names the columns: __key__, fields, and @jpg for a column of paths or URLs of jpg files.
    """
    sources.check()
    for target in [] if dry_run else [output, sources.classes]:
        if target is not None:
            check_output(target)
    from tarshards.write.shards import write_samples

    skipped: Counter[str] = Counter()
    ledger = losses.ledger
    samples = sources.read(skipped, ledger)
    if not allow_empty:
        samples = required(samples, partial(sources.refuse_nothing, skipped, losses))
    samples = iter(with_bar(samples, quiet))
    if dry_run:
        _count(samples, output, ledger)
    else:
        write_samples(_counted(samples, ledger), output)
    for reason, count in sorted(skipped.items()):
        say(f"skipped {count} {reason}")
    if sources.folder is not None and sources.class_field is not None:
        _show_classes(sources.folder, None if dry_run else sources.classes)


def _counted(samples: Iterator[Sample], ledger: Ledger) -> Iterator[Sample]:
    for sample in samples:
        ledger.count(samples=1)
        yield sample


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
