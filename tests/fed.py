"""Feeders in threads of this process, and a RemoteLoader of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tarshards import RemoteLoader
from tarshards.feed.feeder import Feeder


@contextmanager
def fed(spec: str, count: int = 1, *, threads: int = 2, **options: Any) -> Iterator[RemoteLoader]:
    """Run *count* feeders in threads, and give a RemoteLoader of them."""
    feeders = [Feeder(f"feed_specs:{spec}", "tcp://127.0.0.1:*", threads=threads) for _ in range(count)]
    running = [threading.Thread(target=feeder.run, daemon=True) for feeder in feeders]
    for thread in running:
        thread.start()
    loader = RemoteLoader(f"feed_specs:{spec}", [feeder.address for feeder in feeders], timeout=20, **options)
    try:
        yield loader
    finally:
        loader.close()
        for feeder, thread in zip(feeders, running):
            feeder.stop()
            thread.join()
            feeder.close()
