"""Common parts of the tools that import and export other formats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from tarshards.cli.input import Losses, leaves_out
from tarshards.cli.output import may_overwrite, writing_options, written
from tarshards.cli.parameters import options, parallel_option, quiet_option
from tarshards.cli.program import say, usage_errors

#: The options of every import and export, for ``convert``.
conversion_options: Final = options(parallel_option("Processes", 0), leaves_out, writing_options, quiet_option)


def convert(
    function: Callable[..., list[str]],
    source: Any,
    target: str,
    *,
    parallel: int,
    losses: Losses,
    quiet: bool,
    **options: Any,
) -> None:
    """Run an import or export with *parallel* processes, and report the number of samples and the files."""
    from tarshards.parallel.process_pool import ProcessPool

    shows = not quiet and sys.stderr.isatty()
    with usage_errors(), ProcessPool(parallel) as pool:
        made = function(
            source,
            written(target),
            executor=pool,
            on_error=losses.ledger,
            overwrite=may_overwrite(),
            progress=shows,
            **options,
        )
    if not quiet:
        say(f"{losses.ledger.samples} samples in {' to '.join([made[0], *made[1:][-1:]])}")
