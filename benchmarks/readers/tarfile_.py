"""Python's tarfile, a member at a time, grouped by the rule."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

from _members import grouped, one_file, own_shards


def members(path: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for info in archive:
            if (file := archive.extractfile(info)) is not None:
                yield info.name, file.read()


def read(expression: str) -> Iterator[dict[str, Any]]:
    return grouped(members(one_file(expression)))


def load(urls: list[str]) -> Iterator[dict[str, Any]]:
    for url in own_shards(urls):
        yield from read(url)
