"""``tarshards chaos``: check a loader while ranks, workers, network, shards and machine fail."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import click

from tarshards.cli.parameters import seed_option
from tarshards.cli.program import say, tool
from tarshards.testing.chains import LoaderFault
from tarshards.testing.chaos import BAD, CHOSEN, FAULTS, Suite, can_read, our_readers, preload


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> range | None:
    """Return the numbers that N or N-M names."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise click.BadParameter(f"{text!r} is no number N of a round, and no range N-M of them")
    return range(int(first), int(last or first) + 1)


def _faults(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in FAULTS]:
        raise click.BadParameter(f"no faults {', '.join(unknown)}; there are: {', '.join(FAULTS)}")
    return names


@tool(example="tarshards chaos --minutes 10 'train-{000..099}.tar'")
@click.argument("shards", nargs=-1, required=True)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10.0, metavar="N", help="How long to run.")
@click.option("--loader", metavar="MODULE:FUNCTION", help="Your loader: a function of a list of URLs.")
@seed_option
@click.option("--round", "rounds", callback=_numbers, metavar="ROUNDS", help="Run only round 3, or rounds 3-7.")
@click.option(
    "--faults",
    default=",".join(FAULTS),
    callback=_faults,
    metavar="NAME,...",
    help="Only faults of these kinds, separated by commas.",
)
@click.option("--report", type=click.Path(dir_okay=False), help="Write FILE.md and FILE.json.", metavar="FILE")
def chaos(
    shards: tuple[str, ...],
    minutes: float,
    loader: str | None,
    seed: int,
    rounds: range | None,
    faults: tuple[str, ...],
    report: str | None,
) -> None:
    """Read SHARDS while ranks, workers, network, shards and machine fail, and compare the samples with the plan.

    SHARDS are only read; faults are applied to copies of their beginnings. The loader gets URLs of shards, and its rank
    from RANK and WORLD_SIZE; iterating over it must yield samples, lists of samples or batches, with their keys as
    __key__. If it has state_dict and load_state_dict, it is stopped and resumed. Without --loader, our loaders are
    tested.

    Exits with 1 if samples were missing, repeated or wrong without an error.
    """
    from tarshards.storage.expressions import expand_urls
    from tarshards.testing.chaos_shards import ShardCopies

    if loader is not None and loader.count(":") != 1:
        raise click.UsageError(f"--loader is MODULE:FUNCTION, not {loader!r}")
    sys.path.insert(0, os.getcwd())
    urls = [url for spec in shards for url in expand_urls(spec)]
    chosen = sorted(random.Random(f"chaos/{seed}/shards").sample(urls, min(CHOSEN, len(urls))))
    suite = Suite(chosen, seed, [loader] if loader else our_readers(), faults=faults)
    suite.storage = [reader for reader in suite.readers if can_read(reader, chosen)]
    preload(suite.readers)
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="tarshards-chaos-") as folder:
        copies = ShardCopies.make(chosen, Path(folder, "shards"))
        try:
            suite.learn(copies, Path(folder, "undisturbed"))
        except LoaderFault as fault:
            raise click.ClickException(str(fault)) from None
        for each in rounds or range(sys.maxsize):
            outcome = suite.play(copies, each, Path(folder, f"{each}"))
            world = suite.rounds[-1][0]
            if rounds is not None or outcome.outcome in BAD:
                say(f"round {each}, {world.reader}, {world.source}, {world.nemesis}: {outcome}")
            if rounds is None and time.monotonic() >= end:
                break
    click.echo(suite.as_markdown(), nl=False)
    if report is not None:
        Path(f"{report}.md").write_text(suite.as_markdown())
        Path(f"{report}.json").write_text(json.dumps(suite.as_json(), indent=1) + "\n")
    if suite.bad:
        sys.exit(1)
