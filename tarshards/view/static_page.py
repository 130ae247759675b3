"""A page beside the shards: one file that reads indexes and members by range requests from any server or bucket."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlsplit

from tarshards.errors import OpenError, ShardIndexError
from tarshards.index.inventory import find_indexed
from tarshards.storage.expressions import common_name, find_shards
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.stream.indexed_shards import IndexedShards
from tarshards.view.page_text import whole_page

PAGE = "index.html"


def write_static_page(urls: Any, folder: str | Location) -> Location:
    """Write ``index.html`` into *folder*, a path or URL, for the indexed shards *urls*; return its location.

    The page refers to shards in or below the folder by relative names, and to others by their http URLs. The server
    must support ranges, and allow them for pages of another origin (CORS). Raises ShardIndexError for shards without
    indexes, and OpenError for shards that the page cannot reach.
    """
    shards = find_shards(urls).split_by("first")
    found = find_indexed(shards)
    if found is None:
        raise ShardIndexError("the page reads shards by their indexes; run `tarindex` first", url=shards.urls[0])
    counts = IndexedShards(found).counts.tolist()
    folder = Location.of(folder)
    target = Location.of(f"{folder.url.rstrip('/')}/{PAGE}", sync=folder.sync)
    names = [_name_for(target, url) for url in found.urls]
    listed = [{"url": name, "samples": count} for name, count in zip(names, counts)]
    origins = {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, names) if parts.netloc}
    name = common_name(names) or "shards"
    config = {"transport": "static", "name": name, "shards": listed}
    begin, end = whole_page(f"tarview: {name}", config, connect=" ".join(["'self'", *sorted(origins)]))
    with open_url(target, "wb") as file:
        file.write((begin + end).encode())
    return target


def _name_for(page: Location, url: str) -> str:
    """Return the name by which the *page* refers to a shard."""
    shard = Location.of(url)
    if shard.is_local and page.is_local:
        name = os.path.relpath(str(shard.path), os.path.dirname(str(page.path)))
        if not name.startswith(".."):
            return quote(name)
    elif shard.url.startswith(page.folder):
        return shard.url[len(page.folder) :]
    if urlsplit(shard.url).scheme in ("http", "https"):
        if shard.url != shard.name:
            raise OpenError("the page would show the credentials or the query in the URL of this shard", url=shard.name)
        return shard.url
    raise OpenError(
        "a page in that folder cannot reach this shard: it is neither below it nor at an http URL", url=shard.name
    )
