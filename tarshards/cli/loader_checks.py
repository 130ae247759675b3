"""The commands that check a loader: ``resume``, ``epoch``, ``shuffle``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from tarshards.cli.parameters import options, seed_option
from tarshards.cli.program import tool, usage_errors
from tarshards.testing.chains import Chain, LoaderFault
from tarshards.testing.epochs import check_epoch
from tarshards.testing.resume import CHANGES, check_chain, check_resume
from tarshards.testing.shuffle import DEGREES, check_shuffle


class Names(click.ParamType):
    """Some of a set of names, separated by commas."""

    name = "NAME,..."

    def __init__(self, *names: str):
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(filter(None, value.split(","))) if isinstance(value, str) else value
        if wrong := sorted(set(names) - set(self.names)):
            self.fail(f"{', '.join(wrong)} is none of {', '.join(self.names)}", param, ctx)
        return names


class FunctionName(click.ParamType):
    """A function in a module of the current folder or the environment."""

    name = "MODULE:FUNCTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Callable[..., Any]:
        if callable(value):
            return value
        from tarshards.run.samples.runners import load

        sys.path.insert(0, str(Path.cwd()))
        try:
            return load(value)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            self.fail(f"{value}: {error}; name a function as module:function", param, ctx)


#: The arguments and options that these commands share.
of_loader: Final = options(
    click.argument("make_loader", type=FunctionName(), metavar="MODULE:FUNCTION"),
    click.option(
        "--read",
        type=FunctionName(),
        metavar="MODULE:FUNCTION",
        help="Function from a batch to the numbers of its samples.",
    ),
    click.option(
        "--tail",
        type=click.Choice(["exact", "pad", "drop"]),
        default="exact",
        help="Samples that do not divide evenly: deliver each once, repeat some, or drop some.",
    ),
    click.option(
        "--steady",
        type=Names("workers", "batch_size"),
        default="",
        help="Properties that do not affect the order of samples: workers, batch_size or both.",
    ),
    click.option("--processes", is_flag=True, help="Run each rank in a separate process."),
    click.option("--limit", default=30.0, metavar="SECONDS", help="Seconds after which a run is taken to hang."),
)


def conclude(check: Callable[..., Any], make_loader: Any, read: Any, **options: Any) -> None:
    """Run a check, print what it found, and exit with 1 at a fault."""
    if read is not None:
        options["read"] = read
    try:
        with usage_errors():
            report = check(make_loader, **options)
    except LoaderFault as fault:
        click.echo(fault)
        sys.exit(1)
    click.echo(f"ok: {report}")


@tool()
@click.option("--chain", metavar="TEXT", help="Run only this chain, as printed with a fault.")
@seed_option
@click.option("--chains", default=50, metavar="N", help="Number of random chains of larger worlds.")
@click.option("--worlds", default=500, metavar="N", help="Number of small worlds, of 14,976.")
@click.option("--times", default=2, metavar="N", help="Number of consecutive resumes.")
@click.option(
    "--changes",
    type=Names(*CHANGES),
    default=",".join(CHANGES),
    metavar="NAME,...",
    help="Properties that may differ after a resume.",
)
@of_loader
def resume(chain: str | None, make_loader: Any, read: Any, **options: Any) -> None:
    """Stop a loader in small worlds at every batch, and resume it.

    MODULE:FUNCTION makes a loader for a tarshards.testing.Setup. Exit code 1: the loader is wrong; the shortest chain
    that shows the fault is printed.
    """
    if chain is None:
        conclude(check_resume, make_loader, read, **options)
        return
    with usage_errors("--chain"):
        one = Chain.parse(chain)
    tested = {name: options[name] for name in ("tail", "steady", "processes", "limit")}
    conclude(partial(check_chain, chain=one), make_loader, read, **tested)


@tool()
@click.option("--setups", default=500, metavar="N", help="Number of small setups, of 1,872.")
@of_loader
def epoch(make_loader: Any, read: Any, **options: Any) -> None:
    """Compare three epochs of all ranks with the dataset, and the steps of the ranks with each other.

    MODULE:FUNCTION makes a loader for a tarshards.testing.Setup. Exit code 1: the loader is wrong.
    """
    conclude(check_epoch, make_loader, read, **options)


@tool()
@click.option(
    "--degrees",
    type=Names(*DEGREES),
    default=",".join(DEGREES),
    metavar="NAME,...",
    help="Properties that are promised to be random.",
)
@click.option("--window", type=int, metavar="N", help="Samples that are mixed with each other.  [default: all]")
@click.option("--seeds", default=150, metavar="N", help="Number of seeds.")
@of_loader
def shuffle(make_loader: Any, read: Any, **options: Any) -> None:
    """Compare the orders of a loader with uniform random permutations.

    MODULE:FUNCTION makes a loader for a tarshards.testing.Setup. Prints how many standard deviations they are from the
    expectation. Exit code 1: the loader is less random than promised.
    """
    conclude(check_shuffle, make_loader, read, **options)
