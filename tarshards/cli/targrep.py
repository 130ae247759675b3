"""Select samples by a pattern, a condition or their keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import islice
from typing import Any, Final, NamedTuple

import click

from tarshards.cli.input import Input, counted, reads_samples
from tarshards.cli.output import check_output, output_options
from tarshards.cli.parameters import (
    COUNT,
    as_values,
    index_dir_option,
    keep_metadata_option,
    keys_option,
    typed,
    where_option,
)
from tarshards.cli.program import say, shown, tool, usage_errors
from tarshards.cli.terminal import colored, has_colors
from tarshards.samples.conditions import Condition
from tarshards.samples.keys import Sample
from tarshards.samples.lines import escape, escape_bytes, read_keys
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.verbs.grep import Duplicate, KeyFilter, Pattern, containing, matching
from tarshards.write.shards import write_samples


class Search(NamedTuple):
    """What is looked for: samples that meet all that is given, or with *invert* the others; at most *most* of them."""

    patterns: tuple[str, ...]
    regular: bool
    words: bool
    ignore_case: bool
    where: str | None
    keys: str | None
    duplicates: bool
    invert: bool
    most: int | None

    def check(self, source: Input) -> None:
        """Refuse a search that does not go with the other options."""
        chosen = self.most is not None or source.count is not None or source.slice is not None
        if self.keys is not None and chosen:
            raise click.UsageError("--keys cannot be combined with -m, --count or --slice")
        if self.keys == "-" and "-" in source.specs:
            raise click.UsageError("both the keys and a tar would be read from stdin")
        if source.fields and not self.patterns and not self.duplicates:
            reason = "-f says in which fields to look for a PATTERN or --duplicates, and there is neither"
            raise click.UsageError(reason)

    def find(self, source: Input) -> tuple[Iterator[Sample], Pattern | Duplicate | None]:
        """Return the samples of *source* that are found, and what knows the fields that some samples lacked."""
        pattern = wanted = duplicate = None
        conditions: list[Callable[[Sample], bool]] = []
        fields = source.take_field_words() or None
        with usage_errors():
            if self.where is not None and self.invert:
                conditions.append(Condition(self.where))
            if self.patterns:
                how = {"fixed": not self.regular, "words": self.words, "ignore_case": self.ignore_case}
                pattern = Pattern(self.patterns, fields=fields, **how)
                conditions.append(pattern)
        if self.duplicates:
            conditions.append(duplicate := Duplicate(fields))
        if not self.invert:
            source.select(self.where, self.keys)
        elif self.keys is not None:
            wanted = KeyFilter(read_keys(typed(self.keys)))
            conditions.insert(0, wanted)
        samples: Iterator[Sample] = iter(source)
        if pattern is not None and pattern.text and not self.invert and self.most is None and not self.duplicates:
            samples = containing(samples, pattern, partial(source.ledger.leave_out, "targrep"))

        invert = self.invert

        def found() -> Iterator[Sample]:
            condition = counted(lambda s: all(holds(s) for holds in conditions) != invert, source.ledger, "targrep")
            yield from matching(samples, condition, most=self.most, reject=source.reject)
            if wanted is not None:
                wanted.check(source.ledger if source.losses.goes_on else None)

        return found(), pattern or duplicate


def takes_pattern(command: Callable[..., Any]) -> Callable[..., Any]:
    """Take the first of SHARDS as the pattern of the *search* if no option gives one."""

    @wraps(command)
    def with_pattern(shards: tuple[str, ...], lists: tuple[str, ...], search: Search, **values: Any) -> Any:
        if not search.patterns and search.where is search.keys is None and not search.duplicates:
            if not shards:
                raise click.UsageError("nothing to look for: give a PATTERN, --where, --keys or --duplicates")
            search, shards = search._replace(patterns=shards[:1]), shards[1:]
            (name,) = search.patterns
            if not shards and not lists and os.path.isfile(name):
                raise click.UsageError(
                    f"{name} is taken as the PATTERN, and a tar read from stdin: write PATTERN {name}, or -e {name}"
                )
        return command(shards=shards, lists=lists, search=search, **values)

    return with_pattern


quiet_option: Final = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Without -o, write nothing, and stop at the first found sample; no progress bar.",
)


@tool(options_metavar="[OPTIONS] [PATTERN]", epilog="Streams. Without SHARDS, or for -, a tar is read from stdin.")
@as_values(search=Search)
@takes_pattern
@partial(reads_samples, count=("--count",), ignore_zeros=("--ignore-zeros",), quiet=quiet_option)
@keep_metadata_option
@click.option("-e", "--regexp", "patterns", multiple=True, metavar="PATTERN", help="Search for this; may be repeated.")
@click.option(
    "-E/-F",
    "regular",
    default=True,
    show_default=False,
    help="Patterns are regular expressions (default), or plain text.",
)
@click.option("-w", "--word-regexp", "words", is_flag=True, help="Patterns match whole words only.")
@click.option("-i", "--ignore-case", is_flag=True, help="Ignore case.")
@where_option
@keys_option
@index_dir_option
@click.option("--duplicates", is_flag=True, help="Duplicates of earlier samples, in all fields or in those of -f.")
@click.option("-v", "--invert-match", "invert", is_flag=True, help="The other samples.")
@click.option("-m", "--max-count", "most", type=COUNT, metavar="N", help="Stop after N found samples.")
@click.option("-l", "--list-keys", is_flag=True, help="Write the keys, one per line, instead of a tar.")
@click.option(
    "-c", "--count-found", "counts", is_flag=True, help="Write the number of found samples, instead of a tar."
)
@output_options
def main(
    source: Input,
    search: Search,
    list_keys: bool,
    counts: bool,
    output: Location,
) -> None:
    """Write a tar of the samples of SHARDS that have PATTERN in one of their fields, or of those in -f.

    Without -e, --where, --keys and --duplicates the first argument is the PATTERN. If several of these are given, a
    sample must meet all of them, and at least one of several -e.

    Exits with 1 if nothing is found, as grep does; the output is then an empty tar. With --allow-empty it exits with 0.
    With -q and without -o, nothing is written, and reading ends at the first found sample.
    """
    is_silent = source.quiet and output.url == "-"
    if counts and list_keys:
        raise click.UsageError("-c cannot be combined with -l")
    search.check(source)
    if output.url != "-" or not (list_keys or counts or is_silent):
        check_output(output)
    found, looking = search.find(source)
    if is_silent:
        count = sum(1 for _ in islice(found, 1))
    elif counts:
        count = _write_count(found, output)
    else:
        count = _write_keys(found, output) if list_keys else write_samples(found, output, reject=source.reject)
    for name, missing in (looking.missing if looking else {}).items():
        say(f"{missing} samples have no field {name}")
    if not count:
        if not is_silent and not counts:
            say("no sample was found")
        if not source.may_be_empty:
            raise click.exceptions.Exit(1)


def _write_count(samples: Iterator[Sample], output: Location) -> int:
    with open_shard(output, "wb") as stream:
        count = sum(1 for _ in samples)
        stream.write(b"%d\n" % count)
    return count


def _write_keys(samples: Iterator[Sample], output: Location) -> int:
    count = 0
    marks = output.url == "-" and has_colors(sys.stdout)
    with open_shard(output, "wb") as stream:
        for count, sample in enumerate(samples, 1):  # noqa: B007
            line = shown(escape(sample["__key__"]), output.url, escape_bytes)
            stream.write((colored(line, "key", sys.stdout) if marks else line).encode() + b"\n")
    return count
