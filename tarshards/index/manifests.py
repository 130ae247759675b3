"""The manifests of datasets: where they lie, how they are read, merged and written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from urllib.parse import unquote

from tarshards.errors import OpenError, ShardIndexError
from tarshards.index.sidecar import MISSING, Index
from tarshards.storage.expressions import expand_shards
from tarshards.storage.local import local_path
from tarshards.storage.manifest import SUFFIX, Shard, dump_manifest
from tarshards.storage.opening import open_url, room_of
from tarshards.storage.streams import is_missing

_ENDING = re.compile(r"\.(tar|tgz|tbz2|txz)(\.\w+)?$", re.IGNORECASE)


def manifest_url(pattern: str) -> str:
    r"""Return the URL of the manifest of the shards that *pattern* names, which has a NUL where their numbers stand.

    >>> [manifest_url(pattern) for pattern in ("d/train-\0.tar", "\0.tar.gz", "http://h/\0/a_\0-x.tar?key", "a.tar")]
    ['d/train.shards.json', 'shards.json', 'http://h/a-x.shards.json?key', 'a.shards.json']
    """
    path, mark, query = pattern.partition("?") if room_of(pattern) == "http" else (pattern, "", "")
    before, *after = path.split("\0")
    folder = re.match("(?:file:)?(?:.*/)?", before, re.DOTALL | re.IGNORECASE)[0]  # type: ignore[index]
    *parts, last = [before[len(folder) :], *after]
    words = [part.replace("/", "-").strip("-_. ") for part in (*parts, _ENDING.sub("", last))]
    return folder + ("-".join(filter(None, words)) + SUFFIX).lstrip(".") + mark + query


def read_manifest(url: str) -> list[Shard]:
    """Return the shards of the manifest *url*; none where there is no such file."""
    try:
        return expand_shards(url)
    except OpenError as error:
        if is_missing(error):
            return []
        raise


def earlier_shards(url: str, below: Iterable[str]) -> list[Shard]:
    """Return the shards of the manifest *url*, and those of *below* that come before the first that it names.

    Theirs are what a run that was broken off has left: *below* ends at the first shard without an index.
    """
    shards = read_manifest(url)
    known = {shard.url for shard in shards}
    left: list[Shard] = []
    for name in below:
        if name in known or (shard := _describe(name)) is None:
            break
        left.append(shard)
    return shards + left[::-1]


def _describe(url: str) -> Shard | None:
    """Return the shard *url* with what its index says of it; None where it has no index."""
    try:
        index = Index.load(url)
    except ShardIndexError as error:
        if error.reason == MISSING:
            return None
        raise
    return Shard(url, len(index), index.shard_size)


def update_manifests(shards: Iterable[Shard], url: str | None = None, *, dry_run: bool = False) -> Iterator[str]:
    """Write the manifest *url* of just these *shards*, or else that of each series of theirs; yield what was written.

    A series are the shards of one folder whose names differ in their last number alone. Its manifest keeps what else
    it names and is still there; shards come in the order of their names.
    """
    if url is not None:
        series = {url: list(shards)}
    else:
        series = {}
        for shard in shards:
            series.setdefault(manifest_url(_without_number(shard.url)), []).append(shard)
        series = {name: _merged(name, group) for name, group in series.items()}
    for name, group in series.items():
        if not dry_run:
            write_manifest(name, group)
        yield name


def _without_number(url: str) -> str:
    r"""Return *url* with a NUL in place of the last number in its name.

    >>> _without_number("d7/a1-002.tar")
    'd7/a1-\x00.tar'
    """
    path, mark, query = url.partition("?") if room_of(url) == "http" else (url, "", "")
    folder, slash, name = path.rpartition("/")
    stem = _ENDING.sub("", name)
    return folder + slash + re.sub(r"\d+(?=\D*$)", "\0", stem) + name[len(stem) :] + mark + query


def _merged(url: str, shards: list[Shard]) -> list[Shard]:
    """Return *shards* and what else the manifest *url* names, by their names."""
    others = [shard for shard in read_manifest(url) if room_of(shard.url) != "local" or _exists(shard.url)]
    merged = {shard.url: shard for shard in [*others, *shards]}
    return sorted(merged.values(), key=lambda shard: _natural(shard.url))


def _natural(url: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers by their value, and else as text."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", url)]


def _exists(url: str) -> bool:
    return os.path.exists(local_path(url))


def write_manifest(url: str, shards: Iterable[Shard]) -> None:
    """Write the manifest *url* of *shards*, at once or not at all; those beside or below it by their relative names."""
    text = dump_manifest(shard._replace(url=name_in(url, shard.url)) for shard in shards)
    with open_url(url, "wb") as stream:
        stream.write(text.encode())


def remove_manifest(url: str) -> None:
    """Remove the manifest *url* where it is a local file."""
    if room_of(url) == "local":
        with suppress(FileNotFoundError):
            os.unlink(local_path(url))


def name_in(manifest: str, url: str) -> str:
    """Return the name that the shard *url* has in *manifest*.

    >>> name_in("d/a.shards.json", "d/b.tar"), name_in("d/a.shards.json", "e/b.tar"), name_in("a.json", "http://h/b.tar")
    ('b.tar', '../e/b.tar', 'http://h/b.tar')
    """
    room = room_of(url)
    if room != room_of(manifest):
        return url
    if room == "local":
        folder, path = os.path.dirname(local_path(manifest)), local_path(url)
        name = os.path.relpath(path, folder or ".")
        if name.startswith("../") and os.path.isabs(path):
            return path
    else:
        folder, query = _folder(manifest)
        if not url.startswith(folder) or _folder(url)[1] != query:
            return url
        path = url[len(folder) : len(url) - len(query)]
        name = unquote(path) if room == "http" else path
    return f"./{name}" if re.match("[^/]*:", name) else name


def _folder(url: str) -> tuple[str, str]:
    """Return the remote folder of *url*, and its query."""
    path, mark, query = url.partition("?") if room_of(url) == "http" else (url, "", "")
    return path[: path.rindex("/") + 1], mark + query
