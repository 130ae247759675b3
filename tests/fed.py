"""Feeders in threads of this process, and a RemoteLoader of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tarshards import RemoteLoader
from tarshards.feed.feeder import Feeder


@contextmanager
def feeders_of(spec: str, count: int = 1, *, threads: int = 2) -> Iterator[list[Feeder]]:
    """Run *count* feeders in threads."""
    feeders = [Feeder(f"feed_specs:{spec}", "tcp://127.0.0.1:*", threads=threads) for _ in range(count)]
    running = [threading.Thread(target=feeder.run, daemon=True) for feeder in feeders]
    for thread in running:
        thread.start()
    try:
        yield feeders
    finally:
        for feeder, thread in zip(feeders, running):
            feeder.stop()
            thread.join()
            feeder.close()


@contextmanager
def remote(spec: str, *addresses: str, **options: Any) -> Iterator[RemoteLoader]:
    """Give a RemoteLoader of the feeders at *addresses*."""
    loader = RemoteLoader(f"feed_specs:{spec}", addresses, **{"timeout": 20, **options})
    try:
        yield loader
    finally:
        loader.close()


@contextmanager
def fed(spec: str, count: int = 1, *, threads: int = 2, **options: Any) -> Iterator[RemoteLoader]:
    """Run *count* feeders in threads, and give a RemoteLoader of them."""
    with (
        feeders_of(spec, count, threads=threads) as feeders,
        remote(spec, *(feeder.address for feeder in feeders), **options) as loader,
    ):
        yield loader
