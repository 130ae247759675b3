"""datago, plain tars by HTTP, since it does not open local ones: from a server on the loopback, in its own process."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datago import DatagoClient, initialize_logging
from sets import Data

PACKAGES = ("datago==2026.10.1", "numpy==2.4.6")
SYSTEM = ()
OWN = False
THREADS = ("decode",)
DECODERS = ("Rust, of its own",)
CANNOT = {
    "stream": "delivers decoded images; of other members, only texts",
    "arrays": "delivers images, one by one",
    "crop": "center crops only, for buckets of similar aspect; no random crops",
    "random": "no access by number",
    "write": "has no writer",
    "index": "has no index",
    "resume": "its client has no state; an epoch starts again",
}
initialize_logging(log_level="warn")


def serve(folder: Path) -> str:
    """Serve a folder until this process ends; return the URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--protocol", "HTTP/1.1", "--directory", str(folder), str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "http.server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    atexit.register(server.kill)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return f"http://127.0.0.1:{port}"


def expression(data: Data) -> str:
    """Return the shards' URLs by braces, which count through names of one length; local ones are served."""
    urls = data.urls
    if not urls[0].startswith("http"):
        for i, url in enumerate(urls):
            link = data.folder / f"{i:04d}.tar"
            if not link.is_symlink():
                link.symlink_to(Path(url).resolve())
        return f"{serve(data.folder)}/{{0000..{len(urls) - 1:04d}}}.tar"
    (begin, first, end), (_, last, _) = (re.fullmatch(r"(.*\D)(\d+)(\D*)", url).groups() for url in (urls[0], urls[-1]))
    return f"{begin}{{{first}..{last}}}{end}"


class Images:
    """An epoch for each iteration: decoded by datago's tasks, as many as workers."""

    def __init__(self, data: Data, workers: int):
        os.environ["DATAGO_MAX_TASKS"] = str(workers)
        source = {
            "url": expression(data),
            "random_sampling": False,
            "concurrent_downloads": workers,
            "rank": int(os.environ.get("RANK", 0)),
            "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        }
        buffers = {"prefetch_buffer_size": 128, "samples_buffer_size": 64, "limit": 1_000_000}
        self.client = DatagoClient(json.dumps({"source_type": "webdataset", "source_config": source, **buffers}))

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        self.client.start()
        try:
            while (sample := self.client.get_sample()) is not None:
                yield sample.image.to_numpy_array(), int(json.loads(sample.attributes)["cls"])
        finally:
            self.client.stop()


def decode(data: Data, *, workers: int) -> Images:
    return Images(data, workers)


def plain(task: str, item: tuple[np.ndarray, int], data: Data) -> Iterator[tuple[np.ndarray, int]]:
    yield item
