"""The page in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from os import PathLike
from threading import Thread
from typing import Any

from tarshards.samples.ledger import Ledger
from tarshards.storage.remote import Remote
from tarshards.view.server import ViewServer
from tarshards.view.view_api import ViewApi


class Shown:
    """A page served at *url*, which notebooks show in a frame. ``close`` stops its server."""

    def __init__(self, server: ViewServer, height: int):
        self.server = server
        self.height = height
        self.url: str = server.url
        Thread(target=server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()

    def _repr_html_(self) -> str:
        return f'<iframe src="{escape(self.url)}" title="tarview" width="100%" height="{self.height}"></iframe>'

    def __repr__(self) -> str:
        return f"<tarview at {self.url}>"


def show(
    urls: Any,
    *,
    ledger: Ledger | Iterable[Mapping[str, Any]] = (),
    state: Mapping[str, Any] | None = None,
    remote: Remote | None = None,
    index_dir: str | PathLike[str] | None = None,
    height: int = 700,
) -> Shown:
    """Serve a page of the samples of *urls*, a shard expression, to browsers on this machine; notebooks show it.

    The *ledger* of a run adds a list of the samples that it left out, with links. With the *state* of a loader, the
    page counts batches from that state. *remote* and *index_dir* are as for ``Stream.from_shards``. *height* is the
    height of the frame in pixels. The page is served until ``close()`` or the end of the process. Its URL contains a
    secret token.
    """
    if isinstance(ledger, Ledger):
        ledger = [entry._asdict() for entry in ledger.quarantined]
    api = ViewApi(urls, left_out=ledger, state=state, remote=remote, index_dir=index_dir)
    return Shown(ViewServer(api, framed=True), height)
