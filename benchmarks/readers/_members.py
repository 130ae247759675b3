"""What readers share. `read` yields the samples of an archive, for conformance; `load` returns a loader, for chaos."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

BATCH = 8
RULE = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$", re.DOTALL)


def one_file(expression: str) -> str:
    if "{" in expression:
        raise NotImplementedError("takes the paths of files, no expressions")
    return expression


def grouped(members: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield samples of adjacent members with the same key, by the rule of the convention."""
    sample: dict[str, Any] = {}
    for name, data in members:
        match = RULE.match(name)
        if match is None or any(re.fullmatch("__.*__", part) for part in name.split("/")):
            continue
        key, field = match[1], match[2].lower()
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        if field in sample:
            raise ValueError(f"{name}: a field twice")
        sample["__key__"] = key
        sample[field] = bytes(data)
    if sample:
        yield sample


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def own_shards(urls: list[str]) -> list[str]:
    """Return this rank's shards, for a loader that splits none itself."""
    return urls[rank() :: ranks()]


def samples_of(urls: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of shards, read by Python's tarfile, for writers of other formats."""
    from tarfile_ import read

    for url in urls:
        yield from read(url)


def made_once(urls: list[str], make: Callable[[Path], Any]) -> Path:
    """Return the folder that *make* fills from these shards, whichever rank is the first."""
    place = Path(tempfile.gettempdir(), blake2b("\n".join(urls).encode(), digest_size=8).hexdigest())
    if not place.exists():
        part = Path(tempfile.mkdtemp(dir=place.parent))
        make(part)
        try:
            part.rename(place)
        except OSError:  # another rank's is there
            shutil.rmtree(part)
    return place
