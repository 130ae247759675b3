"""Done-markers: small JSON files that record that an output is complete, so that it is made once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from tarshards.errors import OpenError, visible
from tarshards.storage.local import flush, synced_folder
from tarshards.storage.location import Location
from tarshards.storage.locks import is_locked, lock, release
from tarshards.storage.streams import failure, is_missing

log: logging.Logger = logging.getLogger("tarshards")

MAX_BYTES = 1 << 24  # of a marker


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can hold.

    >>> digest_of("0001", ["cat", "0001.tar"])
    '67213ac0778853211647'
    """
    return blake2b(json.dumps(parts).encode(errors="surrogatepass"), digest_size=10).hexdigest()


def read_marker(url: str | Location) -> dict[str, Any] | None:
    """Return the record at *url*, None if it is missing or incomplete; raise OpenError if that cannot be determined."""
    try:
        text = Location.of(url).read(MAX_BYTES)
    except OpenError as error:
        if is_missing(error):
            return None
        raise
    return _parsed(text)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def write_marker(url: str | Location, record: dict[str, Any]) -> None:
    """Write *record* to *url*, whole or not at all; create a missing local folder."""
    location = Location.of(url)
    location.make_folder()
    with location.open("wb") as stream:
        stream.write(_text(record))


def _text(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


class LockedMarker:
    """A marker that its process has locked, as long as that, or one that inherits its *descriptor*, is alive.

    While another process holds the lock, *wait* is called, which sleeps or raises; without *wait*, BlockingIOError is
    raised. A remote marker is not locked, and has no descriptor; nor is a local one on a file system without locks if
    the lock is *optional*. Raises OpenError.
    """

    def __init__(self, url: str | Location, wait: Callable[[], object] | None = None, *, optional: bool = False):
        self.location: Location = Location.of(url)
        self.descriptor: int | None = None
        self.location.make_folder()
        if self.location.path is None:
            return
        try:
            self.descriptor = lock(self.location.path, os.O_RDWR | os.O_CREAT, wait, optional=optional)
        except BlockingIOError:
            raise
        except OSError as error:
            raise failure(error, self.location.name) from error

    @staticmethod
    def held(path: str) -> dict[str, Any] | None:
        """Return the record of a local marker that is locked, {} if it has none yet; None if it is not locked."""
        return read_marker(path) or {} if is_locked(path) else None

    def read(self) -> dict[str, Any] | None:
        """Return the record, None if there is none or it is incomplete."""
        if self.descriptor is None:
            return read_marker(self.location)
        return _parsed(os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0))

    def write(self, record: dict[str, Any]) -> None:
        """Replace the record, and wait until it is on the disk."""
        if self.descriptor is None:
            write_marker(self.location, record)
            return
        try:
            with synced_folder(os.path.dirname(str(self.location.path)) or "."):
                os.ftruncate(self.descriptor, 0)
                os.pwrite(self.descriptor, _text(record), 0)
                flush(self.descriptor)
        except OSError as error:
            raise failure(error, self.location.name) from error

    def clear(self) -> None:
        """Leave a local marker empty."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)

    def release(self, *, unlock: bool = True) -> None:
        """Unlock the marker; with ``unlock=False`` processes that have inherited the descriptor keep the lock."""
        if self.descriptor is not None:
            release(self.descriptor, unlock=unlock)


class Provenance(NamedTuple):
    """What a marker must record for its output to be kept.

    *digest* is that of the work; None matches a marker without a digest. *earlier* is the digest that an earlier
    release gave the same work, if it gave another one. *output*, if given, must exist. No input of *inputs* may have
    another version than in the record, but it may be missing by now; a record without inputs is of an earlier release.
    """

    digest: str | None
    output: Location | None = None
    earlier: str | None = None
    inputs: dict[str, Any] | None = None

    def is_of(self, record: dict[str, Any] | None) -> bool:
        """Return whether a marker records this work, whatever has become of its inputs and its output."""
        found = record.get("digest") if record else None
        return bool(record) and (found == self.digest or (self.earlier is not None and found == self.earlier))

    def is_made(self, record: dict[str, Any] | None) -> bool:
        """Return whether a marker records that the output was made, and it can be kept."""
        if not self.is_of(record):
            return False
        recorded = (record or {}).get("inputs")
        if not isinstance(recorded, dict):
            recorded = {}
        for name, version in (self.inputs or {}).items():
            if version is not None and recorded.get(name, version) != version:
                return False
        return self.output is None or self.output.exists()

    def find(self, url: str | Location) -> dict[str, Any] | None:
        """Return the record at *url* if the output can be kept, else None.

        Any other record is removed, since the output will be made: the record would be valid for the new output as soon
        as that exists, before its index does, or when the work is what it was again.
        """
        record = read_marker(url)
        if self.is_made(record):
            return record
        if record:
            remove_marker(url)
        return None

    def make_once(
        self, url: str | Location, make: Callable[[], dict[str, Any]], *, resume: bool = True
    ) -> tuple[dict[str, Any], bool]:
        """Return the record of the output, and whether an earlier call made the output; if none did, call *make*.

        *make* makes the output and returns its record, which is written to *url* with the digest and the inputs. An
        output of an earlier call is kept as ``find`` says; without *resume*, none is.
        """
        if not resume:
            with suppress(OpenError):  # of a server that removes nothing
                remove_marker(url)
        elif (found := self.find(url)) is not None:
            return found, True
        identity = {"digest": self.digest, "inputs": self.inputs}
        record = {name: value for name, value in identity.items() if value is not None} | make()
        write_marker(url, record)
        return record, False


def versions_of(urls: Iterable[str | Location]) -> dict[str, Any]:
    """Return the printable names of files with their versions, None for a missing one."""
    found: dict[str, Any] = {}
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
