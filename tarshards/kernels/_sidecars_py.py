"""The beginnings of many sidecars, and which of them exist: the twin of _sidecars.c, used without a compiler."""

from __future__ import annotations

import os
import stat
from array import array
from contextlib import suppress
from typing import Any, NamedTuple

from tarshards.kernels._tar_py import BLOCK

INDEX = ".index"  # the suffix of an index, after the name of its shard
FORMAT = "tarshards-index"  # the first entry of an index, a map of fewer than 16 entries

BEGINNING = 256  # bytes to read; the entries in them end before 200


class SidecarHead(NamedTuple):
    """What the beginning of a sidecar says: the shard's size in bytes, and of the index what ``Index`` says."""

    size: int
    fingerprint: int
    samples: int
    digest: bytes | None
    split: str


def parse_head(data: bytes) -> SidecarHead:
    """Return what *data*, the beginning of a sidecar, says; raise ValueError, TypeError or KeyError for other bytes."""
    import msgpack

    unpacker = msgpack.Unpacker(max_buffer_size=0, unicode_errors="surrogateescape")
    unpacker.feed(data)
    try:
        unpacker.read_map_header()
        names = [unpacker.unpack() for _ in range(5)]
        if names[:3] != ["format", FORMAT, "version"] or names[3] not in (1, 2) or names[4] != "shard":
            raise ValueError("not the beginning of an index")
        shard: dict[str, Any] = unpacker.unpack()
        if unpacker.unpack() != "keys":
            raise ValueError("no keys")
        samples = unpacker.read_array_header()
    except msgpack.UnpackException as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    head = SidecarHead(shard["size"], shard["fingerprint"], samples, shard.get("digest"), shard.get("split", "first"))
    if not isinstance(head.digest, bytes | None):
        raise TypeError("an invalid digest")
    if type(head.size) is not int or head.split not in ("first", "last"):
        raise TypeError("a size that is not a number, or an unknown rule for names")
    if not 0 <= samples <= head.size // BLOCK:
        raise ValueError(f"{samples} samples in a shard of {head.size} bytes")
    return head


def read_heads(folder: bytes, indexes: bytes, shards: bytes) -> bytes:
    """Return three int64 for each of the *shards*: samples, bytes, and 1 if its names were split at the last dot.

    *shards* are paths in *folder*, with NULs between them; their sidecars are in the folder *indexes*. Both folders end
    in a slash, or are empty. The first number is -1 if a sidecar is missing; it is -2 if one is damaged or cannot be
    read, or its shard has another size. The others are then -1.
    """
    found = array("q")
    for shard in shards.split(b"\0"):
        found.extend(_read_head(shard, indexes + shard.removeprefix(folder) + INDEX.encode()))
    return found.tobytes()


def _read_head(shard: bytes, sidecar: bytes) -> tuple[int, int, int]:
    with suppress(OSError, ValueError, TypeError, KeyError):
        try:
            with open(sidecar, "rb", buffering=0) as file:
                data = file.read(BEGINNING)
        except FileNotFoundError:
            return -1, -1, -1
        head = parse_head(data)
        status = os.stat(shard)
        if stat.S_ISREG(status.st_mode) and status.st_size == head.size:
            return head.samples, head.size, int(head.split == "last")
    return -2, -1, -1


def are_listed(folder: bytes, names: bytes) -> bytes:
    """Return for each of the *names*, with NULs between them, 1 if a listing of *folder* has it, else 0."""
    listed = set(os.listdir(folder))
    return bytes(name in listed for name in names.split(b"\0"))
