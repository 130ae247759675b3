"""Make batches for loaders on other hosts."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.parameters import FOLDER
from tarshards.cli.program import Verbs, refuse, say, tool

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tarshards.parallel.children import ChildGroup

RESTART = 1.0  # seconds before a process that has ended is replaced


class FeedVerbs(Verbs):
    """The commands of tarfeed."""


def _complete_verb(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return FeedVerbs.complete(incomplete)


@click.command(
    cls=FeedVerbs,
    epilog="Each VERB has its own --help.",
    example="tarfeed serve train:loader --bind 'tcp://*:7700' --keys keys",
)
@click.argument("words", nargs=-1, metavar="serve|status|keys ...", shell_complete=_complete_verb)
def main(words: tuple[str, ...]) -> None:
    """Make batches for loaders on other hosts.

    serve MODULE:FUNCTION makes the batches of a loader for RemoteLoader; status ADDRESS prints what feeders do; keys
    FOLDER makes the keys that encrypt what they send.
    """
    *others, last = FeedVerbs.verbs
    known = f"{', '.join(others)} or {last}"
    raise click.UsageError(f"the first word is {known}, not {words[0]!r}" if words else f"say what to do: {known}")


keys_option = click.option("--keys", "keys", type=FOLDER, metavar="DIR", help="The folder of `tarfeed keys`.")
plain_option = click.option(
    "--no-encryption", "plain", is_flag=True, help="Let addresses of a network that is trusted do without keys."
)


@tool()
@click.argument("spec", metavar="MODULE:FUNCTION")
@click.option("--bind", "address", default="tcp://127.0.0.1:7700", show_default=True, metavar="ADDRESS")
@keys_option
@plain_option
@click.option("-p", "--processes", type=click.IntRange(1), default=1, show_default=True, help="At successive ports.")
@click.option("--threads", type=click.IntRange(1), help="Batches made at once, in each process (default: the cores).")
@click.option("--of", "parent", hidden=True, is_flag=True)
def serve(
    spec: str, address: str, keys: str | None, plain: bool, processes: int, threads: int | None, parent: bool
) -> None:
    """Make the batches of the loader that MODULE:FUNCTION returns, for each RemoteLoader that asks.

    The module is found in the current folder or on Python's path. A feeder keeps no state: it may be ended, replaced,
    or begin later than the training. Python code in the pipeline runs in one thread of a process at a time, so give
    such a loader as many processes as there are cores, with one thread each.

    On SIGTERM or SIGINT it ends; the batches that it was making are made by others.
    """
    refuse(processes > 1 and address.rpartition(":")[2] == "*", "-p takes successive ports, so name the first one")
    if processes > 1:
        _serve_by(processes, spec, address, keys, plain, threads)
        return
    from tarshards.feed.feeder import Feeder

    feeder = Feeder(spec, address, keys=keys, encrypted=not plain, threads=threads)
    if not parent:
        click.echo(f"feeding {spec} at {feeder.address}", err=True)
    try:
        feeder.run(until_closed=0 if parent else None)
    finally:
        feeder.close()


def _serve_by(processes: int, spec: str, address: str, keys: str | None, plain: bool, threads: int | None) -> None:
    """Run *processes* feeders at successive ports, and replace those that end."""
    from tarshards.parallel.children import PIPE, ChildGroup, ending

    host, _, port = address.rpartition(":")
    options = [*(["--keys", keys] if keys else []), *(["--no-encryption"] if plain else [])]
    options += ["--threads", str(threads)] if threads else ["--threads", "1"]

    def start(number: int) -> ChildGroup:
        own = f"{host}:{int(port) + number}"
        command = [sys.executable, sys.argv[0], "serve", spec, "--bind", own, *options, "--of"]
        return ChildGroup(command, stdin=PIPE)

    children: list[ChildGroup] = []
    try:
        for number in range(processes):
            children.append(start(number))
        click.echo(f"feeding {spec} at {host}:{{{port}..{int(port) + processes - 1}}}", err=True)
        while True:
            for number, child in enumerate(children):
                if not child.wait(RESTART / processes):
                    continue
                status = child.reap()
                os.close(child.stdin)
                if status in (1, 2):  # it has said why
                    sys.exit(status)
                say(f"the feeder at {host}:{int(port) + number} {ending(status)}; it is replaced")
                time.sleep(RESTART)
                children[number] = start(number)
    finally:
        for child in children:
            child.end(RESTART)


@tool()
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
@keys_option
@plain_option
def status(addresses: tuple[str, ...], keys: str | None, plain: bool) -> None:
    """Print a line for each feeder at ADDRESS: what it has made, how busy it is, and who waits for whom.

    Exit code: 0 all answered; 1 some did not, within 5 seconds.
    """
    from tarshards.feed.feeders import ask_status

    answers = ask_status(addresses, keys=keys, encrypted=not plain)
    for address, words in answers.items():
        click.echo(f"{address}\t{'silent' if words is None else _in_words(words)}")
    sys.exit(1 if None in answers.values() else 0)


def _in_words(words: dict[str, Any]) -> str:
    busy = words["making"]
    rate = words["batches"] / max(words["seconds"], 1e-9)
    waits = "consumers wait for it" if words["queued"] else "it waits for consumers"
    return (
        f"{words['batches']:,} batches, {words['bytes'] / 1e6:,.1f} MB, {rate:.1f} batches/s; "
        f"{words['threads']} threads, busy {busy:.0%}; {waits}"
    )


@tool()
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
def keys(folder: str) -> None:
    """Write new keys to DIR: feeders and consumers each need a copy of the folder.

    A feeder reads server.key_secret and every client's *.key, a consumer client.key_secret and server.key. Other files
    need not be there.
    """
    from tarshards.feed.keys import make_keys

    for path in make_keys(folder):
        click.echo(path)


FeedVerbs.verbs = {"serve": serve, "status": status, "keys": keys}
