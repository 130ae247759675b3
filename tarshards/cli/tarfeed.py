"""Make batches for loaders on other hosts."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final

import click

from tarshards.cli.parameters import FOLDER, parallel_option
from tarshards.cli.program import say, tool

POSITIVE = click.IntRange(1)
RESTART = 1.0  # seconds before a process that has ended is replaced


@tool(
    "serve|status|keys|kubernetes ...",
    epilog="Each VERB has its own --help.",
    example="tarfeed serve train:loader --bind 'tcp://*:7700' --key-folder keys",
)
def main() -> None:
    """Make batches for loaders on other hosts.

    serve MODULE:FUNCTION makes the batches of a loader for RemoteLoader; status ADDRESS prints the load of feeders;
    keys FOLDER makes keys for encryption; kubernetes MODULE:FUNCTION prints the objects for a cluster.
    """


keys_option: Final = click.option(
    "--key-folder", "keys", type=FOLDER, metavar="FOLDER", help="The folder of `tarfeed keys`."
)
plain_option: Final = click.option(
    "--no-encryption", "plain", is_flag=True, help="Do not encrypt: for a trusted network."
)


@main.verb("serve")
@click.argument("spec", metavar="MODULE:FUNCTION")
@click.option("--bind", "address", default="tcp://127.0.0.1:7700", metavar="URL", help="The address to listen at.")
@keys_option
@plain_option
@parallel_option("Processes, at successive ports,", 1, "-p")
@click.option("--threads", type=POSITIVE, metavar="N", help="Batches at once in each process.  [default: cores, or 1]")
def serve(spec: str, address: str, keys: str | None, plain: bool, parallel: int, threads: int | None) -> None:
    """Make the batches of the loader that MODULE:FUNCTION returns, for every RemoteLoader that requests them.

    The module is found in the current folder or on Python's path. A feeder keeps no state: stop it, replace it, or
    start it after the training began. Python code in the pipeline runs in one thread of a process at a time, so such a
    loader needs as many processes as there are cores, with one thread each, which is the default with -p.

    On SIGTERM or SIGINT it stops, and other feeders make its unfinished batches.
    """
    if parallel > 1 and address.rpartition(":")[2] == "*":
        raise click.UsageError("-p takes successive ports, so name the first one")
    options: dict[str, Any] = {"spec": spec, "keys": keys, "encrypted": not plain}
    if parallel > 1:
        _serve_by(parallel, address, {**options, "threads": threads or 1})
        return
    from tarshards.feed.feeder import Feeder

    feeder = Feeder(address=address, threads=threads, **options)
    say(f"feeding {spec} at {feeder.address}")
    try:
        feeder.run()
    finally:
        feeder.close()


def _serve_by(processes: int, address: str, options: dict[str, Any]) -> None:
    """Run *processes* feeders at successive ports, and replace those that end."""
    from subprocess import PIPE

    from tarshards.feed.encryption import check_address
    from tarshards.parallel.children import ChildGroup

    check_address(address, options["keys"], options["encrypted"])
    host, _, port = address.rpartition(":")
    addresses = [f"{host}:{int(port) + number}" for number in range(processes)]

    def start(own: str) -> ChildGroup:
        arguments = json.dumps({**options, "address": own})
        return ChildGroup([sys.executable, "-m", "tarshards.feed", arguments], stdin=PIPE)

    children: list[ChildGroup] = []
    try:
        for own in addresses:
            children.append(start(own))
        say(f"feeding {options['spec']} at {host}:{{{port}..{int(port) + processes - 1}}}")
        while True:
            for number, (own, child) in enumerate(zip(addresses, children)):
                if not child.wait(RESTART / processes):
                    continue
                status = child.reap()
                os.close(child.stdin)
                if status == 1:  # it has printed its error
                    sys.exit(1)
                say(f"the feeder at {own} {child.how_it_ended}; it is replaced")
                time.sleep(RESTART)
                children[number] = start(own)
    finally:
        for child in children:
            child.end(RESTART)


@main.verb("status")
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
@keys_option
@plain_option
def status(addresses: tuple[str, ...], keys: str | None, plain: bool) -> None:
    """Print a line for each feeder at ADDRESS: its batches, how busy it is, and which side waits.

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


@main.verb("keys")
@click.argument("folder", type=FOLDER, metavar="FOLDER")
def keys(folder: str) -> None:
    """Write new keys to FOLDER: feeders and consumers each need a copy of the folder.

    A feeder reads server.key_secret and every client's *.key, a consumer client.key_secret and server.key. They
    need no other files.
    """
    from tarshards.feed.encryption import make_keys

    for path in make_keys(folder):
        click.echo(path)


@main.verb("kubernetes")
@click.argument("spec", metavar="MODULE:FUNCTION")
@click.option("--image", required=True, metavar="IMAGE", help="A container with the module and tarshards[feed].")
@click.option("--name", default="feeders", metavar="NAME", help="Name of the Service and the Deployment.")
@click.option("--replicas", type=POSITIVE, default=1, metavar="N", help="Pods.")
@click.option("--feeders", type=POSITIVE, default=1, metavar="N", help="Feeders, and cores, of each pod.")
@click.option("--port", type=click.IntRange(1, 65535), default=7700, metavar="N", help="The first port of a pod.")
@click.option("--key-secret", "keys", metavar="NAME", help="A Secret with the keys; without it, nothing is encrypted.")
def kubernetes(**options: Any) -> None:
    """Print a Service and a Deployment of feeders, for `kubectl apply -f -`.

    A RemoteLoader in the same namespace finds all pods as dns:NAME:{PORT..LAST}, including pods that join later.
    """
    from tarshards.feed.cluster import kubernetes_objects

    click.echo(json.dumps(kubernetes_objects(**options), indent=1))
