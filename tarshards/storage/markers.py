"""Done-markers: small JSON files that record that an output is complete, so that it is made once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from tarshards.errors import OpenError, visible
from tarshards.storage.location import Location
from tarshards.storage.streams import is_missing

log: logging.Logger = logging.getLogger("tarshards")

Record = dict[str, Any]
Versions = dict[str, list[Any] | None]

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


def find_made(
    url: str | Location,
    digest: str | None,
    output: Location | None = None,
    *,
    earlier: str | None = None,
    inputs: Versions | None = None,
) -> Record | None:
    """Return the record at *url* if ``is_made`` holds for it, else None.

    Any other record is removed, since the output will be made: the record would be valid for the new output as soon as
    that exists, before its index does, or when the work is what it was again.
    """
    record = read_marker(url)
    if is_made(record, digest, output, earlier=earlier, inputs=inputs):
        return record
    if record:
        remove_marker(url)
    return None


def is_made(
    record: Record | None,
    digest: str | None,
    output: Location | None = None,
    *,
    earlier: str | None = None,
    inputs: Versions | None = None,
) -> bool:
    """Return whether a marker records the work with this *digest*, and *output*, if given, still exists.

    No input of *inputs* may have another version than in the record, but it may be missing by now; a record without
    inputs is of an earlier release.
    """
    if not is_of(record, digest, earlier=earlier):
        return False
    recorded = (record or {}).get("inputs")
    if not isinstance(recorded, dict):
        recorded = {}
    if any(version is not None and recorded.get(name, version) != version for name, version in (inputs or {}).items()):
        return False
    return output is None or output.exists()


def is_of(record: Record | None, digest: str | None, *, earlier: str | None = None) -> bool:
    """Return whether a marker records the work with this *digest*; None matches a marker without a digest.

    *earlier* is the digest that an earlier release gave the same work, if it gave another one.
    """
    found = record.get("digest") if record else None
    return bool(record) and (found == digest or (earlier is not None and found == earlier))


def make_once(
    url: str | Location,
    digest: str | None,
    make: Callable[[], Record],
    *,
    earlier: str | None = None,
    inputs: Versions | None = None,
    output: Location | None = None,
    resume: bool = True,
) -> tuple[Record, bool]:
    """Return the record of an output, and whether an earlier call made the output; if none did, call *make*.

    *make* makes the output and returns its record, which is written to *url* with *digest* and *inputs*. ``find_made``
    decides whether the record of an earlier call is valid; without *resume*, none is.
    """
    if not resume:
        with suppress(OpenError):  # of a server that removes nothing
            remove_marker(url)
    elif (record := find_made(url, digest, output, earlier=earlier, inputs=inputs)) is not None:
        return record, True
    made = make()
    record = ({} if digest is None else {"digest": digest}) | ({} if inputs is None else {"inputs": inputs}) | made
    write_marker(url, record)
    return record, False


def versions_of(urls: Iterable[str | Location]) -> Versions:
    """Return the printable names of files with their versions, None for a missing one."""
    found: Versions = {}
    for location in map(Location.of, urls):
        try:
            found[location.name] = location.version()
        except OpenError as error:
            if not is_missing(error):
                raise
            found[location.name] = None
    return found


def say_kept(outputs: Sequence[str], kept: int, *, of_all: bool = True, unsure: int = 0, cure: str = "") -> None:
    """Log how many of the *outputs* were *kept* from an earlier run; with ``of_all=False`` they may become more.

    A change of the code or the inputs of the *unsure* ones would not be noticed: they have markers of an earlier
    release. *cure* says how to make all outputs again.
    """
    if kept:
        name = visible(Location.of(outputs[0]).name) + ", ..." * (len(outputs) > 1)
        number = f"{kept} of {len(outputs)}" if of_all else str(kept)
        note = f", {unsure} by an earlier release, which did not record code and inputs" if unsure else ""
        outputs_are = "output" if number == "1" else "outputs"
        log.warning("%s: %s %s kept from an earlier run%s%s", name, number, outputs_are, note, cure)


def remove_marker(url: str | Location) -> None:
    """Remove the record at *url*, if there is one; if a server removes nothing, overwrite it with an empty one."""
    try:
        Location.of(url).remove()
    except OpenError:
        if read_marker(url):
            write_marker(url, {})
