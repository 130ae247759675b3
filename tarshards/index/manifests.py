"""The manifests of datasets: how they are read, merged and written."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from tarshards.errors import OpenError, ShardIndexError, TarshardsError, UrlError
from tarshards.index.inventory import for_each_shard, read_head
from tarshards.index.sidecar import MISSING, Index
from tarshards.storage.derived import key_index_name
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, dump_manifest, series_url
from tarshards.storage.streams import is_missing


@dataclass(frozen=True)
class Writing:
    """How indexes, manifests and exports are written: not at all in a *dry_run*, and with *sync* to the disk."""

    dry_run: bool = False
    sync: bool = True

    def write(self, location: Location, content: bytes) -> str:
        """Write a file, unless this is a dry run; return its name."""
        if not self.dry_run:
            with Location.of(location, sync=self.sync).open("wb") as stream:
                stream.write(content)
        return location.name


TO_DISK = Writing()


def read_manifest(url: str) -> list[Shard]:
    """Return the shards of the manifest *url*; none if the file does not exist."""
    try:
        return list(find_shards(url))
    except OpenError as error:
        if is_missing(error):
            return []
        raise


def earlier_shards(url: str, below: Iterable[str]) -> list[Shard]:
    """Return the shards of the manifest *url*, and the shards that an interrupted run has left beside it.

    *below* names the shards with lower numbers than the next to be written, highest first; those before the first
    that the manifest names, or that has no index, are taken.
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
    """Return the written shard *url* with the counts from its index; None if it has no index."""
    try:
        index = Index.load(url)
    except ShardIndexError as error:
        if error.reason == MISSING:
            return None
        raise
    return index.shard(url)


def add_to_manifests(shards: Iterable[Shard], output: Location) -> list[Shard]:
    """Add new *shards* to the manifests of their series, with the digests in their indexes; return these entries.

    The manifests are flushed to the disk if *output*, the pattern or the first of the shards, is.
    """
    made = with_digests(shards)
    list(update_manifests(made, how=Writing(sync=output.sync)))
    return made


def with_digests(shards: Iterable[Shard]) -> list[Shard]:
    """Return *shards*, those that are indexed with the digests in their indexes."""
    found = list(shards)
    indexed = [shard.location() for shard in found if shard.indexed]
    digests = dict(zip((location.url for location in indexed), for_each_shard(_digest_of, indexed)))
    return [shard._replace(digest=digests.get(shard.url)) for shard in found]


def _digest_of(shard: Location) -> str | None:
    try:
        digest = read_head(shard).digest
    except TarshardsError:  # reading the shard reports the error
        return None
    return None if digest is None else digest.hex()


def update_manifests(
    shards: Iterable[Shard],
    url: str | None = None,
    *,
    unchanged: Container[str] = (),
    how: Writing = TO_DISK,
) -> Iterator[str]:
    """Write the manifest *url* of these *shards*, or by default one manifest per series; yield the names written.

    A series is the shards of one folder whose names differ only in their last number. Its manifest keeps other shards
    that it names and that still exist, and the checksums of shards that are *unchanged* and have the digest that it
    gives; shards are sorted by name. It is stored beside them, or beside their indexes in an *index_dir*.
    """
    if url is not None:
        series = {url: list(shards)}
    else:
        series = {}
        for shard in shards:
            series.setdefault(series_url(shard.location().described.url), []).append(shard)
    for name, given in series.items():
        location = Location.of(name, sync=how.sync)
        if url is None and not how.dry_run:
            location.make_folder()
        with nullcontext() if how.dry_run else location.folder_lock():
            group = given if url is not None else _merged(name, given, unchanged)
            if not how.dry_run:
                write_manifest(location, group)
        yield name


def _merged(url: str, shards: list[Shard], unchanged: Container[str]) -> list[Shard]:
    """Return *shards* and the other shards of the manifest *url*, sorted by name."""
    earlier = [shard for shard in read_manifest(url) if _may_exist(shard.location())]
    merged = {shard.location().recorded: shard for shard in earlier}
    for name, shard in _named(url, ((shard.location().recorded, shard) for shard in shards)).items():
        before = merged.get(name)
        if before and shard.url in unchanged and shard.sha256 is None and before.digest in (None, shard.digest):
            shard = shard._replace(sha256=before.sha256)
        merged[name] = shard
    return [merged[name] for name in sorted(merged, key=natural_order)]


def _named(url: str, named: Iterable[tuple[str, Shard]]) -> dict[str, Shard]:
    """Return shards by the names that the manifest *url* gives them; raise UrlError if two have the same."""
    found: dict[str, Shard] = {}
    for name, shard in named:
        if found.setdefault(name, shard) is not shard:
            reason = f"two shards are named {name}: a manifest leaves out the credentials of URLs"
            raise UrlError(reason, url=Location.of(url).name)
    return found


def natural_order(text: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in *text*, of any length, by value and the rest as text."""
    parts = [part.lstrip("0") if part.isdecimal() else part for part in re.split(r"(\d+)", text)]
    return [(len(part) if number % 2 else -1, part) for number, part in enumerate(parts)]


def _may_exist(location: Location) -> bool:
    """Say whether a shard is there; remote ones are not asked."""
    return not location.is_local or location.exists()


def write_manifest(url: str | Location, shards: Iterable[Shard]) -> None:
    """Write the manifest *url* of *shards*, whole or not at all; shards beside or below it get relative names.

    Other names are URLs without credentials. Raises UrlError if two shards then have the same name.
    """
    location = Location.of(url)
    named = _named(location.url, ((location.relative(shard.location()), shard) for shard in shards))
    text = dump_manifest(shard._replace(url=name) for name, shard in named.items())
    with location.open("wb") as stream:
        stream.write(text.encode())


def remove_manifest(url: str) -> None:
    """Remove the manifest *url*, and the key index beside it, if there are any.

    A server that removes nothing keeps them until they are written again.
    """
    manifest = Location.of(url)
    for location in (manifest, manifest.with_base(key_index_name(manifest.base))):
        if location.is_local:
            location.remove()
            continue
        with suppress(OpenError):
            if location.exists():
                location.remove()
