"""The commands that check a loader: ``resume``, ``epoch``, ``shuffle``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tarshards.cli.parameters import seed_option
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


def checks_loader(check: Callable[..., Any]) -> Callable[..., None]:
    """Add the arguments and options of a check of a loader to it; print its report, or the fault, and exit with 1."""

    @click.argument("make_loader", type=FunctionName(), metavar="MODULE:FUNCTION")
    @click.option(
        "--read",
        type=FunctionName(),
        metavar="MODULE:FUNCTION",
        help="Function from a batch to the numbers of its samples.",
    )
    @click.option(
        "--tail",
        type=click.Choice(["exact", "pad", "drop"]),
        default="exact",
        help="Samples that do not divide evenly: deliver each once, repeat some, or drop some.",
    )
    @click.option(
        "--steady",
        type=Names("workers", "batch_size"),
        default="",
        help="Properties that do not affect the order of samples: workers, batch_size or both.",
    )
    @click.option("--processes", is_flag=True, help="Run each rank in a separate process.")
    @click.option("--limit", default=30.0, metavar="SECONDS", help="Seconds after which a run is taken to hang.")
    @wraps(check)
    def command(make_loader: Any, read: Any, **options: Any) -> None:
        if read is not None:
            options["read"] = read
        try:
            with usage_errors():
                report = check(make_loader, **options)
        except LoaderFault as fault:
            click.echo(fault)
            sys.exit(1)
        click.echo(f"ok: {report}")

    return command


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
@checks_loader
def resume(
    make_loader: Any,
    chain: str | None,
    seed: int,
    chains: int,
    worlds: int,
    times: int,
    changes: tuple[str, ...],
    **options: Any,
) -> Any:
    """Stop a loader in small worlds at every batch, and resume it.

    MODULE:FUNCTION makes a loader for a tarshards.testing.Setup. Exit code 1: the loader is wrong; the shortest chain
    that shows the fault is printed.
    """
    if chain is not None:
        with usage_errors("--chain"):
            one = Chain.parse(chain)
        return check_chain(make_loader, one, **options)
    counts: dict[str, Any] = {"seed": seed, "chains": chains, "worlds": worlds, "times": times}
    return check_resume(make_loader, changes=changes, **counts, **options)


@tool()
@click.option("--setups", default=500, metavar="N", help="Number of small setups, of 1,872.")
@checks_loader
def epoch(make_loader: Any, **options: Any) -> Any:
    """Compare three epochs of all ranks with the dataset, and the steps of the ranks with each other.

    MODULE:FUNCTION makes a loader for a tarshards.testing.Setup. Exit code 1: the loader is wrong.
    """
    return check_epoch(make_loader, **options)


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
@checks_loader
def shuffle(make_loader: Any, **options: Any) -> Any:
    """Compare the orders of a loader with uniform random permutations.

    MODULE:FUNCTION makes a loader for a tarshards.testing.Setup. Prints how many standard deviations they are from the
    expectation. Exit code 1: the loader is less random than promised.
    """
    return check_shuffle(make_loader, **options)
