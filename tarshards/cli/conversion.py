"""Common parts of the tools that import, export and describe datasets."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.program import say

if TYPE_CHECKING:
    from tarshards.samples.ledger import Ledger
    from tarshards.storage.location import Location


def convert(
    function: Callable[..., list[str]], source: Any, output: Location, *, ledger: Ledger, quiet: bool, **options: Any
) -> None:
    """Run an import or export, and report the number of samples and the files."""
    progress = not quiet and sys.stderr.isatty()
    made = function(source, output, on_error=ledger, progress=progress, **options)
    if not quiet:
        say(f"{ledger.samples} samples in {' to '.join([made[0], *made[1:][-1:]])}")


def named_splits(arguments: Iterable[str]) -> dict[str, list[str]]:
    """Return the shard expressions by split, from arguments SPLIT=SHARDS, or else all of them as one split.

    The one split is named after the common beginning of its shards.

    >>> named_splits(["train=a.tar", "train=b.tar", "val=c.tar"]), named_splits(["d/train-{0..9}.tar"])
    ({'train': ['a.tar', 'b.tar'], 'val': ['c.tar']}, {'train': ['d/train-{0..9}.tar']})
    """
    from tarshards.storage.expressions import common_name, expand_urls

    specs = list(arguments)
    found = [re.fullmatch(r"(\w[\w.+-]*)=(.+)", spec, re.DOTALL) for spec in specs]
    splits: dict[str, list[str]] = {}
    if not any(found):
        name = common_name(expand_urls(specs)).rpartition("/")[2].strip("0123456789-_.")
        return {re.sub(r"[^\w.+-]", "-", name) or "data": specs}
    for spec, match in zip(specs, found):
        if match is None:
            raise click.UsageError(f"{spec} has no split, but others have: write SPLIT=SHARDS")
        splits.setdefault(match[1], []).append(match[2])
    return splits
