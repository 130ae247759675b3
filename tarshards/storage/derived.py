"""Files derived from a shard and stored beside it: names, marks, and their removal when the shard is replaced."""

from __future__ import annotations

import os
from contextlib import suppress
from io import BufferedReader
from time import time_ns

from tarshards.errors import OpenError, UrlError, visible
from tarshards.kernels._sidecars_py import FORMAT
from tarshards.kernels._sidecars_py import INDEX as INDEX
from tarshards.storage.location import Location
from tarshards.storage.locks import locked
from tarshards.storage.manifest import SUFFIX, parse_manifest, series_url, without_counts
from tarshards.storage.streams import failure, is_answer, is_missing

COLUMNS = ".columns.parquet"  # the suffix of its columns
SETTLED = 2 * 10**9  # nanoseconds: two changes further apart give a file different times, also on FAT
_HEAD = b"\xa6format\xaf" + FORMAT.encode()


def mark_of(shard: Location) -> int | None:
    """Return the time that marks a derived file as right until its local shard changes; None if none does.

    Take it before the shard is read. It is a nanosecond after the ctime, the time of the file's last change, which no
    program can set and no copy keeps; no derived file has this time by chance. There is none if the file changed a
    moment ago, since the next change may have the same ctime, nor if the ctime is before the mtime, as on file systems
    that store another time there.
    """
    if shard.path is None or not os.path.isfile(shard.path):
        return None
    with suppress(OSError), shard.open() as file:  # some network file systems tell the latest time only of open files
        status = os.fstat(file.fileno())
        if status.st_mtime_ns <= status.st_ctime_ns < time_ns() - SETTLED:
            return status.st_ctime_ns + 1
    return None


def is_marked(derived: Location, mark: int | None) -> bool:
    """Return whether a derived file has the *mark* of its shard."""
    if derived.path is not None and mark is not None:
        with suppress(OSError):
            return os.stat(derived.path).st_mtime_ns == mark
    return False


def set_mark(derived: Location, mark: int | None) -> None:
    """Mark a derived file, if it is local and not of another owner."""
    if derived.path is not None and mark is not None:
        with suppress(OSError):
            os.utime(derived.path, ns=(mark, mark))


def forget(location: Location) -> None:
    """Remove the files that are derived from the shard at *location*, before it is replaced.

    A new shard thus never has an old index, whenever the process dies. The derived files are the index and,
    for a local shard, its columns; the key indexes of its series and of each manifest ``*.shards.json`` in its folder
    that names it; its counts in these manifests; and its indexes for DALI and Energon, which a warning names. Only
    files with the right contents are removed; a warning names others that may be indexes. Raises OpenError if an index
    cannot be removed.
    """
    if location.is_stream:
        return
    _remove_index(location)
    path = location.path
    if path is None or (os.path.exists(path) and not os.path.isfile(path)):  # such as /dev/null
        return
    Location(path + COLUMNS).remove()
    Location(key_index_name(series_url(path))).remove()
    _remove_exports(path)
    if os.path.isfile(path):
        _forget_counts(path, location)
        _forget_energon(path)
    if os.path.islink(path):  # writing replaces the target of the link
        forget(location.at(os.path.realpath(path)))


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


def _forget_counts(path: str, location: Location) -> None:
    folder, base = os.path.split(os.path.abspath(path))
    with os.scandir(folder) as entries:
        manifests = [entry.path for entry in entries if entry.name.endswith(SUFFIX[1:]) and entry.is_file()]
    if not manifests:
        return

    def local(url: str) -> str | None:
        shard = Location(url)
        found = shard.path if shard.scheme in ("", "file") else None
        return None if found is None else os.path.normpath(os.path.join(folder, found))

    def is_replaced(url: str) -> bool:
        if url.rpartition("/")[2] != base and "%" not in url:  # a quick test, which excludes most
            return False
        return local(url) == os.path.join(folder, base)

    with locked(folder):  # other processes may replace other shards of the same manifest
        for manifest in manifests:
            try:
                with open(manifest, "rb") as file:
                    shards = parse_manifest(text := file.read(), "")
            except (FileNotFoundError, UrlError):
                continue
            except OSError as error:
                raise failure(error, manifest) from error
            if replaced := [shard.url for shard in shards if is_replaced(shard.url)]:
                if (first := local(shards[0].url)) is not None:
                    Location(key_index_name(series_url(first))).remove()
                if (bare := without_counts(text, replaced)) is not None:
                    with location.at(manifest).open("wb") as stream:
                        stream.write(bare.encode())


def _remove_exports(path: str) -> None:
    """Remove the indexes that ``tarindex --format`` writes beside the shard at *path*; name others in a warning."""
    for name in sorted({f"{path}.idx", f"{path.removesuffix('.tar')}.idx"}):
        try:
            with open(name, "rb") as file:
                data = file.read()
        except IsADirectoryError:
            continue
        except OSError as error:
            if is_missing(failed := failure(error, name)):
                continue
            raise failed from error
        is_dali = data.startswith(b"v1.")
        if is_dali or _are_offsets(data):
            Location(name).remove()
            format = "dali" if is_dali else "tar.idx"
            _warn(name, f"removed with the shard that it described; write it again with `tarindex --format {format}`")
        else:
            _warn(name, "may be of the shard that is replaced; write it again with `tarindex --format`")


def _are_offsets(data: bytes) -> bool:
    """Return whether *data* is a ``.tar.idx``: ascending offsets of headers, each an unsigned integer of 8 bytes."""
    if not data or len(data) % 8:
        return False
    offsets = memoryview(data).cast("Q")
    return not any(offset % 512 for offset in offsets) and sorted(offsets) == list(offsets)


def _forget_energon(path: str) -> None:
    """Remove Energon's index of a dataset in a folder above the shard at *path*, if it lists the shard."""
    import json

    folder = path = os.path.abspath(path)
    while (folder := os.path.dirname(above := folder)) != above:
        info = f"{folder}/.nv-meta/.info.json"
        try:
            with open(info, "rb") as file:
                listed = os.path.relpath(path, folder) in json.load(file)["shard_counts"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if listed:
            for name in (f"{folder}/.nv-meta/index.sqlite", f"{folder}/.nv-meta/index.uuid", info):
                Location(name).remove()
            _warn(info, "removed with a shard that it described; write it again with `tarindex --format energon`")


def _warn(name: str, reason: str) -> None:
    import logging

    logging.getLogger("tarshards").warning("%s: %s", visible(name), reason)
