"""A URL to a stream of bytes; every family of schemes is one small room."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, BinaryIO

from tarshards.errors import UrlError
from tarshards.storage.compression import MAX_RATIO, compressed, decompressed
from tarshards.storage.streams import SCHEME, Reader, Writer, public

__all__ = ["Reader", "Writer", "open_shard", "open_url", "public"]

#: The room that opens each scheme, imported at first use; all other schemes are fsspec's.
ROOMS = {"": "local", "file": "local", "-": "stdio", "http": "http", "https": "http", "pipe": "pipe"}


def open_url(
    url: str | os.PathLike[str],
    mode: str = "rb",
    *,
    allow_pipe: bool = False,
    timeout: float = 30.0,
    retries: int = 5,
) -> BinaryIO:
    """Open *url* for reading ("rb") or writing ("wb") bytes.

    `read(n)` may be short before the end, and is empty only at the end. What is written stands under its name
    only after `close()`; `abort()`, or leaving a with-block by an exception, discards it.

    URLs are paths, `file:`, `-` (stdin or stdout), `http:`, `https:`, every scheme of fsspec, and with
    *allow_pipe* `pipe:command`. *timeout* (seconds without a byte) and *retries* (failures in a row without
    progress) are for http. An unknown scheme is a UrlError, everything else that fails an OpenError.
    """
    if mode not in ("rb", "wb"):
        raise ValueError(f'mode is "rb" or "wb", not {mode!r}')
    url = os.fspath(url)
    room = import_module(f"tarshards.storage.{room_of(url)}")
    stream: BinaryIO = room.open_stream(url, mode, allow_pipe=allow_pipe, timeout=timeout, retries=retries)
    return stream


def open_shard(
    url: str | os.PathLike[str], mode: str = "rb", *, allow_pipe: bool = False, max_ratio: float = MAX_RATIO
) -> BinaryIO:
    """Open *url* as `open_url` does, through its compression.

    Reading finds gzip, bzip2, xz and zstd by their first bytes, never by the name; damage, and more than 1 MiB +
    *max_ratio* x the compressed size, is an OpenError. Writing compresses by the suffix (`.gz .tgz .bz2 .tbz2 .xz
    .txz .zst`), the same data to the same bytes.
    """
    stream: Any = open_url(url, mode, allow_pipe=allow_pipe)
    shard: Any = compressed(stream) if mode == "wb" else decompressed(stream, public(os.fspath(url)), max_ratio)
    return shard


def room_of(url: str) -> str:
    """Name the room that opens *url*; raise UrlError for an unknown scheme."""
    match = SCHEME.match(url)
    scheme = "-" if url == "-" else match[1].lower() if match else ""
    if scheme in ROOMS:
        return ROOMS[scheme]
    import fsspec

    known = {*ROOMS, *fsspec.available_protocols(), *fsspec.registry} - {""}
    if scheme in known:
        return "fsspec_"
    if os.path.lexists(url):
        return "local"
    from difflib import get_close_matches

    close = get_close_matches(scheme, known, n=1, cutoff=0.5)
    hint = f", did you mean {close[0]!r}?" if close else "."
    raise UrlError(f"unknown scheme {scheme!r}{hint} Known: {' '.join(sorted(known))}", url=public(url))
