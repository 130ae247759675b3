"""Done-markers: small JSON files that record what was made, written once it is in place."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from tarshards.errors import OpenError
from tarshards.storage.location import Location
from tarshards.storage.streams import is_missing

Record = dict[str, Any]

MAX_BYTES = 1 << 24  # of a marker


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can hold.

    >>> digest_of("0001", ["cat", "0001.tar"])
    '67213ac0778853211647'
    """
    return blake2b(json.dumps(parts).encode(errors="surrogatepass"), digest_size=10).hexdigest()


def read_marker(url: str | Location) -> Record | None:
    """Return the record at *url*, None if it is missing or incomplete; raise OpenError if that cannot be told."""
    try:
        text = Location.of(url).read(MAX_BYTES)
    except OpenError as error:
        if is_missing(error):
            return None
        raise
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def write_marker(url: str | Location, record: Record, *, sync: bool = True) -> None:
    """Write *record* to *url*, whole or not at all and with *sync* to the disk; make a local folder that is missing."""
    location = Location.of(url)
    location.make_folder()
    with location.open("wb", sync=sync) as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def remove_marker(url: str | Location) -> None:
    """Remove the record at *url*, if there is one; where nothing can be removed, write an empty one over it."""
    try:
        Location.of(url).remove()
    except OpenError:
        if read_marker(url):
            write_marker(url, {})
