"""``tarshards conformance``: check a reader of tar files with the cases of the convention."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tarshards.cli.program import tool
from tarshards.testing.conformance import CASES, LIMIT, VERDICTS, examine, load_cases, table


@tool(name="conformance", example="tarshards conformance tarshards:read_samples")
@click.argument("reader")
@click.option(
    "--cases",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    default=CASES,
    show_default="spec/cases of the checkout",
    help="The folder of the cases.",
)
@click.option("--limit", type=click.IntRange(1), default=LIMIT, metavar="SECONDS", help="Seconds per case.")
def conformance(reader: str, folder: Path, limit: int) -> None:
    """Run the cases of the convention over READER, and print the verdicts.

    READER is a function, module:function, which takes an expression and returns samples, dicts of __key__ and bytes; or
    a command, which gets the expression as its last argument and prints the samples as lines of JSON.

    Exit code 1: the reader lost or changed data without an error, crashed or hung.
    """
    cases = load_cases(folder)
    if not cases:
        raise click.UsageError(f"no cases in {folder}; they are in the repository, in the folder spec/cases")
    results = examine(reader, cases, limit=limit)
    click.echo("\n".join(table(results)))
    sys.exit(int(any(result.verdict in VERDICTS[2:] for result in results)))
