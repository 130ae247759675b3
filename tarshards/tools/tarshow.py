"""List samples."""

from __future__ import annotations

import click

from tarshards.keys import is_reserved
from tarshards.ledger import Ledger
from tarshards.ops import keep_fields, take
from tarshards.samples import read_samples
from tarshards.tools._common import count_option, fields_option, shards_argument, tell_of_skipped


@click.command(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@shards_argument
@count_option
@fields_option
def main(shards: tuple[str, ...], count: int | None, fields: str | None) -> None:
    """List the samples of SHARDS: a line each with the key, then every field with its size in bytes."""
    ledger = Ledger()
    samples = read_samples(list(shards) or "-", on_error=ledger, allow_pipe=True)
    if fields is not None:
        samples = keep_fields(samples, fields)
    for sample in take(samples, count):
        sizes = [f"{field}:{len(sample[field])}" for field in sample if not is_reserved(field)]
        click.echo("\t".join([_visible(sample["__key__"])] + [_visible(size) for size in sizes]))
    tell_of_skipped(ledger)


def _visible(text: str) -> str:
    """Escape what would not be seen, or would break a line: control characters, and bytes that are no UTF-8."""
    return "".join(c if c.isprintable() else repr(c)[1:-1].replace("\\udc", "\\x") for c in text)
