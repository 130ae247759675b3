"""The error tree; every error says where in the data it happened.

TarshardsError
├── UrlError         an invalid shard expression or URL (also a ValueError)
├── OpenError        a URL that cannot be opened, or fails while it is read or written
├── TarError         bytes that are not a complete, valid tar archive
├── SampleError      members that do not form samples, or samples that do not form members
├── OpError          a user's function that failed on a sample
├── DecodeError      a field whose bytes do not decode
├── EncodeError      a field whose value does not encode
├── WorldError       ranks, workers and shards that do not match
├── ShardIndexError  an index that is missing, stale or damaged
├── StateError       a state from another dataset, version or kind of run
└── AuditError       samples that were neither delivered nor accounted for

Bad arguments raise Python's own TypeError and ValueError.
"""

from __future__ import annotations

from typing import Any


class TarshardsError(Exception):
    """Base of all errors; *url*, *offset* (bytes), *key* and *field* are None where unknown.

    *cost* says what is lost where reading goes on after it, for a ledger.

    >>> str(TarshardsError("bad checksum", url="a.tar", offset=512))
    'a.tar: offset 512: bad checksum'
    """

    cost = ""

    def __init__(
        self,
        reason: str,
        *,
        url: str | None = None,
        offset: int | None = None,
        key: str | None = None,
        field: str | None = None,
    ):
        self.reason, self.url, self.offset, self.key, self.field = reason, url, offset, key, field
        name = ".".join(part for part in (key, field) if part is not None) or None
        place = [url, None if offset is None else f"offset {offset}", name]
        super().__init__(": ".join([part for part in place if part is not None] + [reason]))

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.reason, self.url, self.offset, self.key, self.field)


def _rebuild(kind: type[TarshardsError], reason: str, url: Any, offset: Any, key: Any, field: Any) -> TarshardsError:
    return kind(reason, url=url, offset=offset, key=key, field=field)


class UrlError(TarshardsError, ValueError):
    """An invalid shard expression or URL."""


class OpenError(TarshardsError):
    """A URL that cannot be opened, or fails while it is read or written."""


class TarError(TarshardsError):
    """Bytes that are not a complete, valid tar archive."""


class SampleError(TarshardsError):
    """Members that do not form samples, or samples that do not form members."""


class OpError(TarshardsError):
    """A user's function that failed on a sample; its own exception is the cause."""


class DecodeError(TarshardsError):
    """A field whose bytes do not decode."""


class EncodeError(TarshardsError):
    """A field whose value does not encode."""


class WorldError(TarshardsError):
    """Ranks, workers and shards that do not match."""


class ShardIndexError(TarshardsError):
    """An index that is missing, stale or damaged."""


class StateError(TarshardsError):
    """A state from another dataset, version or kind of run."""


class AuditError(TarshardsError):
    """Samples that were neither delivered nor accounted for."""
