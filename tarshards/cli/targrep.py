"""Select the samples in which a pattern is found, for which a condition holds, or of given keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import click

from tarshards.cli._common import Input, check_output, output_option, overwrite_option, reads_samples, say, tool
from tarshards.samples.conditions import Condition
from tarshards.samples.fields import parse_selection
from tarshards.samples.read import Sample
from tarshards.storage.opening import open_shard
from tarshards.verbs.grep import Keys, Pattern, matching, read_keys
from tarshards.verbs.table import escape
from tarshards.write.shards import write_samples


def takes_pattern(command: Callable[..., Any]) -> Callable[..., Any]:
    """Take the first of SHARDS for the pattern where no option says what to look for."""

    @wraps(command)
    def with_pattern(shards: tuple[str, ...], **options: Any) -> Any:
        if not options["patterns"] and options["where"] is None and options["keys"] is None:
            if not shards:
                raise click.UsageError("what is looked for? Give a PATTERN, --where or --keys")
            options["patterns"], shards = shards[:1], shards[1:]
        return command(shards=shards, **options)

    return with_pattern


@tool(options_metavar="[OPTIONS] [PATTERN]", epilog="Streams. Without SHARDS, or for -, a tar is read from stdin.")
@takes_pattern
@partial(reads_samples, count=("--count",), verbose=("--verbose",))
@click.option("-e", "--regexp", "patterns", multiple=True, metavar="PATTERN", help="Look for this, and for others.")
@click.option("-E/-F", "regular", default=True, help="Patterns are regular expressions, or texts.  [default: -E]")
@click.option("-i", "--ignore-case", is_flag=True, help="Letters match in either case.")
@click.option("--where", metavar="EXPR", help="""Condition on the sample: 'cls > 3 and json["ok"]'.""")
@click.option("--keys", metavar="FILE", help="Samples of these keys, one a line; by index where there are some.")
@click.option("-v", "--invert-match", "invert", is_flag=True, help="The other samples.")
@click.option("-m", "--max-count", "most", type=click.IntRange(min=0), help="Stop after so many found.")
@click.option("-l", "--list-keys", is_flag=True, help="Write the keys, one a line, rather than a tar.")
@output_option
@overwrite_option
def main(
    source: Input,
    patterns: tuple[str, ...],
    regular: bool,
    ignore_case: bool,
    where: str | None,
    keys: str | None,
    invert: bool,
    most: int | None,
    list_keys: bool,
    output: str,
    overwrite: bool,
) -> None:
    """Write a tar of the samples of SHARDS that have PATTERN in one of their fields, or of those in -f.

    Without -e, --where and --keys the first argument is the PATTERN. Of several of these all must hold; of several -e
    one must.

    Exits with 0 when all was read, also if nothing was found, which stderr says.
    """
    if keys is not None and (most is not None or source.count is not None or source.slice is not None):
        raise click.UsageError("--keys looks for all of them; it goes without -m, --count and --slice")
    if keys == "-" and "-" in source.specs:
        raise click.UsageError("both the keys and a tar would be read from stdin")
    if output != "-" or not list_keys:
        check_output(output, overwrite)
    conditions: list[Callable[[Sample], bool]] = []
    pattern = wanted = None
    try:
        if where is not None:
            conditions.append(Condition(where))
        if patterns:
            pattern = Pattern(patterns, fields=_fields(source), fixed=not regular, ignore_case=ignore_case)
            conditions.append(pattern)
        elif source.fields is not None:
            raise ValueError("-f says where to look for a PATTERN, and there is none")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    source.fields = None  # the samples stay whole
    samples = iter(source)
    if keys is not None:
        wanted = Keys(read_keys(keys, allow_pipe=True))
        conditions.insert(0, wanted)
        if not invert:
            samples = source.choose(wanted.candidates(source.specs, on_error=source.ledger, allow_pipe=True))

    def found() -> Iterator[Sample]:
        yield from matching(
            samples, lambda s: all(holds(s) for holds in conditions), invert=invert, most=most, reject=source.reject
        )
        if wanted is not None:
            wanted.check(source.ledger if source.ledger.max_errors else None)

    count = _write_keys(found(), output) if list_keys else write_samples(found(), output, allow_pipe=True)
    for name, missing in pattern.missing.items() if pattern else ():
        say(f"{missing} samples have no field {name}")
    if not count:
        say("no sample is found")


def _fields(source: Input) -> list[list[str]] | None:
    if source.fields is None:
        return None
    terms = parse_selection(source.fields)
    if any(term.name is not None or term.alternatives == ["*"] for term in terms):
        raise ValueError('-f names fields: -f "txt json;jsn"')
    return [term.alternatives for term in terms]


def _write_keys(samples: Iterator[Sample], output: str) -> int:
    count = 0
    with open_shard(output, "wb", allow_pipe=True) as stream:
        for count, sample in enumerate(samples, 1):  # noqa: B007
            stream.write(escape(sample["__key__"].encode(errors="surrogateescape")).encode() + b"\n")
    return count
