"""What describes a shard beside it, its index and its counts in manifests: forgotten when the shard is replaced."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader

from tarshards.errors import OpenError, visible
from tarshards.storage.location import Location
from tarshards.storage.manifest import SUFFIX, without_counts
from tarshards.storage.streams import failure, is_answer, is_missing

INDEX = ".index"  # how much longer the name of a shard's index is
COLUMNS = ".columns.parquet"  # and that of its columns
FORMAT = "tarshards-index"  # the first entry of an index, a map of fewer than 16 entries
_HEAD = b"\xa6format\xaf" + FORMAT.encode()


def forget(location: Location, *, sync: bool = True) -> None:
    """Remove the index of the shard at *location*, and its counts from manifests; called before it is replaced.

    So a new shard never stands beside the index or the counts of an old one, whenever the process dies. Where a local
    file is replaced, its columns and key index are removed, and the manifests ``*.shards.json`` in its folder
    corrected. Only an index of ours is removed; indexes for other programs are named in a warning. Raises OpenError
    where an index cannot be removed.
    """
    if location.is_stream:
        return
    _remove_index(location)
    path = location.path
    if path is not None and os.path.isfile(path):
        Location(path + COLUMNS).remove()
        _forget_counts(path, sync)
        _name_exports(path)
    if path is not None and os.path.islink(path):  # writing replaces the file that it leads to
        forget(Location(os.path.realpath(path)), sync=sync)


def _remove_index(location: Location) -> None:
    sidecar = location.sibling(INDEX)
    try:
        with BufferedReader(sidecar.open()) as stream:  # type: ignore[type-var]
            head = stream.read(1 + len(_HEAD))
    except OpenError as error:
        if is_missing(error) or (location.is_remote and is_answer(error)):
            return
        raise
    if head[1:] == _HEAD:
        sidecar.remove()


def key_index_name(manifest: str) -> str:
    """Return the name of the key index beside a manifest.

    >>> key_index_name("train.shards.json")
    'train.shards.keys'
    """
    return manifest.removesuffix("json") + "keys"


def _forget_counts(path: str, sync: bool) -> None:
    folder, base = os.path.split(os.path.abspath(path))
    with os.scandir(folder) as entries:
        manifests = [entry.path for entry in entries if entry.name.endswith(SUFFIX[1:]) and entry.is_file()]
    if not manifests:
        return

    def is_replaced(url: str) -> bool:
        if url.rpartition("/")[2] != base and "%" not in url:  # most of many
            return False
        shard = Location(url)
        found = shard.path if shard.scheme in ("", "file") else None
        return found is not None and os.path.normpath(os.path.join(folder, found)) == os.path.join(folder, base)

    with locked(folder):  # others may be replacing other shards of the same manifest
        for manifest in manifests:
            try:
                with open(manifest, "rb") as file:
                    text = without_counts(file.read(), is_replaced)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise failure(error, manifest) from error
            if text is not None:
                Location(key_index_name(manifest)).remove()
                with Location(manifest).open("wb", sync=sync) as stream:
                    stream.write(text.encode())


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder, which waits for another process that changes a manifest or catalog in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _name_exports(path: str) -> None:
    """Warn of indexes that ``tarindex --format`` may have written for the shard at *path*."""
    stem = path.removesuffix(".tar")
    for name in [f"{path}.idx", f"{stem}.idx"] if stem != path else []:
        if os.path.isfile(name):
            import logging

            reason = "may be of the shard that is replaced; write it again with `tarindex --format`"
            logging.getLogger("tarshards").warning("%s: %s", visible(name), reason)
