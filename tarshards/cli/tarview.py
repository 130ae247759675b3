"""Show shards in a browser."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from tarshards.cli.input import ShardArguments, takes_shards
from tarshards.cli.output import OUTPUT, check_output, writing_options
from tarshards.cli.parameters import FILE, index_dir_option, shards_argument, typed
from tarshards.cli.program import refuse, tool, usage_errors

MOST = 1 << 30  # most bytes of a ledger's list, and of a checkpoint


@tool(
    epilog="Only this machine reaches the address, which has a secret token; elsewhere: ssh -L PORT:127.0.0.1:PORT.",
    example="tarview --port 8000 train-{000..146}.tar",
)
@shards_argument
@index_dir_option
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Port to serve at.  [default: any free]"
)
@click.option("--browse", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--ledger", type=FILE, metavar="FILE", help="JSON list of the samples that a ledger left out, to link on the page."
)
@click.option("--state", type=FILE, metavar="FILE", help="State or checkpoint from which batches are counted.")
@click.option("--static", type=OUTPUT, metavar="FOLDER", help="Write a page that needs no tarview into FOLDER.")
@writing_options
@takes_shards
def main(shards: ShardArguments, port: int, browse: bool, ledger: str | None, state: str | None, static: Any) -> None:
    """Show the contents of SHARDS, local or remote, on a page for a browser on this machine.

    Nothing is written. Shards without an index are indexed in memory, as you scroll.
    """
    refuse(not shards.specs, "name shards: a page needs to read them at any offset, which stdin does not allow")
    if static is not None:
        from tarshards.storage.location import Location
        from tarshards.view.static_page import PAGE, write_static_page

        check_output(Location.of(f"{static.url.rstrip('/')}/{PAGE}"), is_field=True)
        click.echo(write_static_page(shards.named(), static).name)
        return
    from tarshards.view.epoch_batches import read_state
    from tarshards.view.server import ViewServer
    from tarshards.view.view_api import ViewApi

    begun = None if state is None else read_state(typed(state).read(MOST))
    server = ViewServer(ViewApi(shards.named(), left_out=_entries(ledger), state=begun), port)
    click.echo(server.url)
    sys.stdout.flush()
    if browse:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def _entries(ledger: str | None) -> list[dict[str, Any]]:
    if ledger is None:
        return []
    with usage_errors("--ledger"):
        entries = json.loads(typed(ledger).read(MOST))
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("a JSON list of objects with shard, key, field, offset and reason")
    return entries
