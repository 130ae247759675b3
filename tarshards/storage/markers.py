"""Done-markers: small JSON files that say what has been made, written when it is in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, TypeVar

from tarshards.errors import OpenError, UrlError
from tarshards.storage.opening import open_url
from tarshards.storage.streams import is_missing, public

T = TypeVar("T")
Record = dict[str, Any]

LOOKUPS = 32  # at once, where markers are far away


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can hold.

    >>> digest_of("0001", ["cat", "0001.tar"])
    '67213ac0778853211647'
    """
    return blake2b(json.dumps(parts).encode(errors="surrogatepass"), digest_size=10).hexdigest()


def read_marker(url: str) -> Record | None:
    """Return the record at *url*, or None where there is none, or a torn one; raise OpenError if it cannot be known."""
    try:
        with open_url(url) as stream:
            record = json.loads(stream.readall())  # type: ignore[attr-defined]
    except OpenError as error:
        if is_missing(error):
            return None
        raise
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def write_marker(url: str, record: Record) -> None:
    """Write *record* to *url*, whole or not at all; a local folder is made where it is missing."""
    make_folder(url)
    with open_url(url, "wb") as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def make_folder(url: str) -> None:
    """Make the folder of a local file."""
    path = local_of(url)
    if path is not None and os.path.dirname(path):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            raise OpenError(error.strerror or str(error), url=os.path.dirname(path)) from error


def size_of(url: str) -> int | None:
    """Return the bytes of the object at *url*, or None where that cannot be told; raise OpenError if it is missing."""
    path = local_of(url)
    try:
        if path is not None:
            return os.stat(path).st_size
        if url.split(":")[0].lower() in ("pipe", "http", "https", "-"):
            return None
        import fsspec

        store, name = fsspec.core.url_to_fs(url)
        size = store.info(name).get("size")
        return None if size is None else int(size)
    except FileNotFoundError as error:
        raise OpenError("No such file or directory", url=public(url)) from error
    except Exception as error:
        raise OpenError(str(error) or type(error).__name__, url=public(url)) from error


def exists(url: str) -> bool:
    """Say whether there is something at *url*."""
    path = local_of(url)
    if path is not None:
        return os.path.exists(path)
    try:
        with open_url(url) as stream:
            stream.read(1)
    except OpenError as error:
        if is_missing(error):
            return False
        raise
    return True


def local_of(url: str) -> str | None:
    """Return the path that *url* names, or None if it names no local file.

    >>> local_of("a/b.tar"), local_of("file:///b.tar"), local_of("s3://bucket/b.tar")
    ('a/b.tar', '/b.tar', None)
    """
    from tarshards.storage.local import local_path

    scheme = url.partition(":")[0] if ":" in url else ""
    return local_path(url) if scheme.lower() in ("", "file") or "/" in scheme else None


def look_up(function: Callable[[str], T], urls: Iterable[str]) -> Iterator[T]:
    """Yield ``function(url)`` for every URL in their order, many at once where they are remote."""
    urls = list(urls)
    if all(local_of(url) is not None for url in urls):
        yield from map(function, urls)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(LOOKUPS) as executor:
        yield from executor.map(function, urls)


def common_name(urls: list[str]) -> str:
    """Return what the names of *urls* begin with, without digits and separators at its end.

    >>> common_name(["d/out-000.tar", "d/out-001.tar"]), common_name(["d/a.tar", "d/b.tar"]), common_name(["x.tar"])
    ('d/out', 'd/', 'x')
    """
    if not urls:
        raise UrlError("an empty list of shards has no name")
    if len(urls) == 1:
        return urls[0].partition(".tar")[0]
    low, high = min(urls), max(urls)
    length = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
    prefix = low[:length]
    folder, slash, base = prefix.rpartition("/")
    return folder + slash + base.rstrip("0123456789-_.")
