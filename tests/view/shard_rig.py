"""A small set with a field of each kind, some of them hostile, and a server of its page."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import numpy as np

from tarshards import ShardWriter
from tarshards.view.server import ViewServer
from tarshards.view.view_api import ViewApi

GONE = "document.title='gone'"
HOSTILE = f'<script>{GONE}</script><img src=x onerror="{GONE}">\x1b[31m\u202ejavascript:{GONE}'


def sample(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    image = np.full((60, 80, 3), rng.integers(0, 255, 3), np.uint8)
    mask = np.zeros((60, 80), np.uint8)
    mask[10:30, 20:50] = 255
    return {
        "__key__": f"part{number % 3}/{number:05d}",
        "jpg": image,
        "seg.png": mask,
        "cls": number % 5,
        "json": {"boxes": [[20, 10, 30, 20]], "score": number / 100, "text": HOSTILE, HOSTILE: [1, {"deep": None}]},
        "txt": f"text {number} {HOSTILE}",
        "npy": rng.normal(size=(16, 24)).astype("f4"),
        "mp": {"packed": [1, 2, {"bin": b"123"}]},
        "raw": bytes(range(200)) + bytes(number % 100),
        "svg": f'<svg xmlns="http://www.w3.org/2000/svg" onload="{GONE}"></svg>'.encode(),
        "html": HOSTILE.encode(),
    }


def write_set(folder: Any, samples: int = 60, each: int = 20, *, index: bool = True) -> str:
    with ShardWriter(f"{folder}/set-%03d.tar", max_samples=each, index=index) as writer:
        for number in range(samples):
            writer.write(sample(number))
    return f"{folder}/set-{{000..{samples // each - 1:03d}}}.tar"


@contextmanager
def serving(urls: Any, **options: Any) -> Iterator[ViewServer]:
    server = ViewServer(ViewApi(urls, **options))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(url: str, **headers: str) -> tuple[int, Any, bytes]:
    """Return the status, the headers and the body of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def get_json(url: str) -> Any:
    return json.loads(get(url)[2])
