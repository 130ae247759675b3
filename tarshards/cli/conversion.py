"""Common parts of the tools that import and export other formats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from tarshards.cli.input import too_many
from tarshards.cli.output import overwrite_option, sync_option, written
from tarshards.cli.parameters import max_errors_option, parallel_option, quiet_option
from tarshards.cli.program import say, usage_errors
from tarshards.errors import TarshardsError


def conversion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every import and export, for ``convert``."""
    parallel = parallel_option("Processes", 0)
    for option in (quiet_option, sync_option, overwrite_option, max_errors_option, parallel):
        command = option(command)
    return command


def convert(
    function: Callable[..., list[str]],
    source: Any,
    target: str,
    *,
    parallel: int,
    max_errors: int | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Run an import or export with *parallel* processes, and report the number of samples and the files."""
    from tarshards.parallel.process_pool import ProcessPool
    from tarshards.samples.ledger import Ledger

    errors: list[Exception] = []
    ledger = Ledger(max_errors=max_errors or 0, on_error=errors.append)
    shows = not quiet and sys.stderr.isatty()
    try:
        with usage_errors(), ProcessPool(parallel) as pool:
            made = function(source, written(target), executor=pool, on_error=ledger, progress=shows, **options)
    except TarshardsError as error:
        if max_errors is None or len(errors) <= max(1, max_errors):
            raise
        raise too_many(len(errors), max_errors, errors[0]) from error
    if ledger.quarantined:
        click.echo(str(ledger), err=True)
    if not quiet:
        say(f"{ledger.samples} samples in {' to '.join([made[0], *made[1:][-1:]])}")
