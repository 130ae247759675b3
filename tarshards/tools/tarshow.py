"""List samples."""

from __future__ import annotations

import click

from tarshards.keys import is_reserved
from tarshards.tools._common import Input, reads_samples


@click.command(epilog="Without SHARDS, or for -, a tar is read from stdin.")
@reads_samples
def main(source: Input) -> None:
    """List the samples of SHARDS: a line each with the key, then every field with its size in bytes."""
    for sample in source:
        sizes = [f"{field}:{len(sample[field])}" for field in sample if not is_reserved(field)]
        click.echo("\t".join([_visible(sample["__key__"])] + [_visible(size) for size in sizes]))


def _visible(text: str) -> str:
    """Escape what would not be seen, or would break a line: control characters, and bytes that are no UTF-8."""
    return "".join(c if c.isprintable() else repr(c)[1:-1].replace("\\udc", "\\x") for c in text)
