"""Done-markers: small JSON files that record that an output is complete, so that it is made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
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
    """Return the record at *url*, None if it is missing or incomplete; raise OpenError if that cannot be determined."""
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


def write_marker(url: str | Location, record: Record) -> None:
    """Write *record* to *url*, whole or not at all; create a missing local folder."""
    location = Location.of(url)
    location.make_folder()
    with location.open("wb") as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def find_made(url: str | Location, digest: str | None, output: Location | None = None) -> Record | None:
    """Return the record at *url* if ``is_made`` holds for it, else None.

    A record with this digest is removed if its output is missing. Otherwise it would become valid as soon as a new
    output exists, even if files written after the output, such as its index, are still missing.
    """
    record = read_marker(url)
    if is_made(record, digest, output):
        return record
    if is_of(record, digest):
        remove_marker(url)
    return None


def is_made(record: Record | None, digest: str | None, output: Location | None = None) -> bool:
    """Return whether a marker records the work with this *digest*, and *output*, if given, still exists."""
    return is_of(record, digest) and (output is None or output.exists())


def is_of(record: Record | None, digest: str | None) -> bool:
    """Return whether a marker records the work with this *digest*; None matches a marker without a digest."""
    return bool(record) and record.get("digest") == digest  # type: ignore[union-attr]


def make_once(
    url: str | Location,
    digest: str | None,
    make: Callable[[], Record],
    *,
    output: Location | None = None,
    resume: bool = True,
) -> tuple[Record, bool]:
    """Return the record of an output, and whether an earlier call made the output; if none did, call *make*.

    *make* makes the output and returns its record, which is written to *url* with *digest*. ``find_made`` decides
    whether the record of an earlier call is valid; without *resume*, none is.
    """
    if not resume:
        with suppress(OpenError):  # of a server that removes nothing
            remove_marker(url)
    elif (record := find_made(url, digest, output)) is not None:
        return record, True
    made = make()
    record = made if digest is None else {"digest": digest, **made}
    write_marker(url, record)
    return record, False


def remove_marker(url: str | Location) -> None:
    """Remove the record at *url*, if there is one; if a server removes nothing, overwrite it with an empty one."""
    try:
        Location.of(url).remove()
    except OpenError:
        if read_marker(url):
            write_marker(url, {})
