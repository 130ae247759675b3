"""Show shards in a browser."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from tarshards.cli.input import requires_shards
from tarshards.cli.output import check_output, writes_file
from tarshards.cli.parameters import FILE
from tarshards.cli.program import say, tool, usage_errors

if TYPE_CHECKING:
    from tarshards.storage.manifest import Shard
    from tarshards.view.viewed_shards import ViewedShards


@tool(
    epilog="Only this machine reaches the address, which has a secret token; elsewhere: ssh -L PORT:127.0.0.1:PORT.",
    example="tarview --port 8000 train-{000..146}.tar",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=False,
    metavar="N",
    help="Port to serve at.  [default: any free]",
)
@click.option("--browse", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--ledger", type=FILE, metavar="FILE", help="JSON list of the samples that a ledger left out, to link on the page."
)
@click.option("--state", type=FILE, metavar="FILE", help="State or checkpoint from which batches are counted.")
@writes_file(click.option, "--static", metavar="FOLDER", help="Write a page that needs no tarview into FOLDER.")
@requires_shards(
    "name shards: a page needs to read them at any offset, which stdin does not allow",
    metavar="[SHARDS]...",
    has_index_dir=True,
)
def main(shards: list[Shard], port: int, browse: bool, ledger: str | None, state: str | None, static: Any) -> None:
    """Show the contents of SHARDS, local or remote, on a page for a browser on this machine.

    Nothing is written. Shards without an index are indexed in memory, as you scroll.
    """
    if static is not None:
        from tarshards.storage.location import Location
        from tarshards.view.static_page import PAGE, write_static_page

        check_output(Location.of(f"{static.url.rstrip('/')}/{PAGE}"), is_field=True)
        click.echo(write_static_page(shards, static).name)
        return
    from tarshards.view.epoch_batches import read_state
    from tarshards.view.server import ViewServer
    from tarshards.view.view_api import ViewApi

    begun = None if state is None else read_state(_typed(state))
    api = ViewApi(shards, left_out=_entries(ledger), state=begun)
    server = ViewServer(api, port)
    click.echo(server.url)
    sys.stdout.flush()
    if sys.stderr.isatty():
        say(_told(api.viewed))
    if browse:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def _told(viewed: ViewedShards) -> str:
    """Return what the page shows, and how to end it."""
    count = len(viewed.shards)
    samples = f"{viewed.total} samples" if viewed.is_complete else "indexed as you scroll"
    names = f"{viewed.name}: {count} shard{'s' * (count != 1)}, {samples}"
    return f"{names}; open this address in a browser, and end it here with Ctrl-C"


def _typed(name: str) -> bytes:
    """Return the content of a file that a user named: it may be the output of a command."""
    from tarshards.storage.location import Location

    return Location.of(name, allow_pipe=True).read()


def _entries(ledger: str | None) -> list[dict[str, Any]]:
    if ledger is None:
        return []
    with usage_errors("--ledger"):
        entries = json.loads(_typed(ledger))
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("a JSON list of objects with shard, key, field, offset and reason")
    return entries
