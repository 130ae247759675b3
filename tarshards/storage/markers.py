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


class Marker:
    """The record at *url*; its methods raise OpenError if they fail.

    While this process has locked it, *descriptor* is its open file, which a command may inherit.
    """

    def __init__(self, url: str | os.PathLike[str] | Location):
        self.location: Location = Location.of(url)
        self.descriptor: int | None = None

    def read(self) -> dict[str, Any] | None:
        """Return the record, None if it is missing or incomplete; raise OpenError if that cannot be determined."""
        try:
            if self.descriptor is None:
                text = self.location.read(MAX_BYTES)
            else:
                text = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        except OpenError as error:
            if is_missing(error):
                return None
            raise
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None

    def write(self, record: dict[str, Any]) -> None:
        """Write *record*, whole or not at all unless the marker is locked; create a missing local folder."""
        text = json.dumps(record).encode() + b"\n"
        self.location.make_folder()
        if self.descriptor is None:
            with self.location.open("wb") as stream:
                stream.write(text)
            return
        try:
            with synced_folder(os.path.dirname(str(self.location.path)) or "."):
                os.ftruncate(self.descriptor, 0)
                os.pwrite(self.descriptor, text, 0)
                flush(self.descriptor)
        except OSError as error:
            raise failure(error, self.location.name) from error

    def remove(self) -> None:
        """Remove the record, if there is one; if a server removes nothing, overwrite it with an empty one."""
        try:
            self.location.remove()
        except OpenError:
            if self.read():
                self.write({})

    def lock(self, wait: Callable[[], object] | None = None, *, optional: bool = False) -> None:
        """Lock the file of a local marker, until ``release`` or the end of this process and all that inherit it.

        While another process holds the lock, *wait* is called, which sleeps or raises; without *wait*, BlockingIOError
        is raised. A remote marker is not locked, nor, if the lock is *optional*, one on a file system without locks.
        """
        self.location.make_folder()
        if self.location.path is None:
            return
        try:
            self.descriptor = lock(self.location.path, os.O_RDWR | os.O_CREAT, wait, optional=optional)
        except BlockingIOError:
            raise
        except OSError as error:
            raise failure(error, self.location.name) from error

    @property
    def is_locked(self) -> bool:
        """Whether a process on this machine has locked it."""
        return self.location.path is not None and is_locked(self.location.path)

    def clear(self) -> None:
        """Leave the locked file empty."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)

    def release(self, *, unlock: bool = True) -> None:
        """Close the locked file; with ``unlock=False`` processes that have inherited its descriptor keep the lock."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            release(descriptor, unlock=unlock)


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
        marker = Marker(url)
        record = marker.read()
        if self.is_made(record):
            return record
        if record:
            marker.remove()
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
                Marker(url).remove()
        elif (found := self.find(url)) is not None:
            return found, True
        identity = {"digest": self.digest, "inputs": self.inputs}
        record = {name: value for name, value in identity.items() if value is not None} | make()
        Marker(url).write(record)
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
