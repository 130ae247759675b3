"""Small photographs in indexed shards."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from tarshards import TarWriter
from tarshards.index.build import build_index

collect_ignore_glob = [] if find_spec("nvidia") and find_spec("nvidia.dali") else ["*.py"]


@pytest.fixture
def write(tmp_path) -> Callable[..., list[str]]:
    """Return a function that writes samples to indexed shards of *size* samples each, and returns their names."""

    def write(samples: list[dict[str, Any]], size: int = 20, name: str = "set") -> list[str]:
        urls = []
        for first in range(0, max(len(samples), 1), size):
            urls.append(str(tmp_path / f"{name}-{first // size:03d}.tar"))
            with TarWriter(urls[-1]) as writer:
                for sample in samples[first : first + size]:
                    writer.write(sample)
            build_index(urls[-1]).save(urls[-1])
        return urls

    return write


@pytest.fixture
def photos(write) -> Callable[..., list[str]]:
    """Return a function that writes *count* photos labelled by their numbers; *bad* maps numbers to other bytes."""

    def photos(count: int, bad: dict[int, bytes] | None = None, **options: Any) -> list[str]:
        from dali_photos import jpeg_of

        samples = [
            {"__key__": f"{i:05d}", "jpg": bad[i] if bad and i in bad else jpeg_of(i), "cls": i} for i in range(count)
        ]
        return write(samples, **options)

    return photos
