"""The loader of the peer that PEER names, for `tarshards chaos --loader chaos_peer:make_loader`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from sets import Data


class Loader:
    """Yields what a peer delivers, as samples with keys; it has a worker process, if the peer has any."""

    def __init__(self, peer: Any, data: Data):
        self.peer, self.data = peer, data

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self.samples(self.stream())

    def stream(self) -> Iterable[Any]:
        if self.peer.THREADS is not True:
            with suppress(NotImplementedError):
                return self.peer.stream(self.data, shuffled=False, workers=1)
        return self.peer.stream(self.data, shuffled=False, workers=0)

    def samples(self, items: Iterable[Any], task: str = "stream") -> Iterator[list[dict[str, Any]]]:
        for item in items:
            pairs = self.peer.plain(task, item, self.data)
            yield [{"__key__": f"{int(label):08d}", "bin": bytes(payload)} for payload, label in pairs]


class ResumableLoader(Loader):
    """The loader of a peer that has states."""

    state: bytes | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self.state is not None:
            return self.samples(self.peer.restore(self.data, self.state, workers=1), "resume")
        loader, self.state_dict = self.peer.start(self.data, workers=1)
        return self.samples(loader, "resume")

    def load_state_dict(self, state: bytes) -> None:
        self.state = state


def make_loader(urls: list[str]) -> Loader:
    """Return the peer's loader of shards of the kind raw."""
    peer = import_module(f"peers.{os.environ['PEER']}")
    data = Data("raw-2k", "raw", len(urls), tuple(urls), Path(tempfile.mkdtemp()))
    return (ResumableLoader if hasattr(peer, "start") else Loader)(peer, data)
