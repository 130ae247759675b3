"""The public functions that open a URL: its bytes as they are, or decompressed."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, BinaryIO

from tarshards.storage.beside import forget
from tarshards.storage.compression import ENCODINGS, MAX_RATIO, compressed, decompressed
from tarshards.storage.location import Location
from tarshards.storage.remote import Remote


def open_url(
    url: str | os.PathLike[str] | Location,
    mode: str = "rb",
    *,
    allow_pipe: bool = False,
    remote: Remote | None = None,
    sync: bool = True,
) -> BinaryIO:
    """Open *url* for reading ("rb") or writing ("wb") bytes.

    `read(n)` may be short before the end, and is empty only at the end. What is written stands under its name
    only after `close()`; `abort()`, or leaving a with-block by an exception, discards it. `close()` waits until a local
    file and its name are on the disk, so that they survive a power loss; with *sync* False it does not.

    URLs are paths, `file:`, `-` (stdin or stdout), `http:`, `https:`, every scheme of fsspec, and with
    *allow_pipe* `pipe:command`. *remote* says how servers and stores are read; see `Remote`. An unknown scheme is a
    UrlError, everything else that fails an OpenError.
    """
    return Location.of(url, remote, allow_pipe=allow_pipe).open(mode, sync=sync)


def open_shard(
    url: str | os.PathLike[str] | Location,
    mode: str = "rb",
    *,
    allow_pipe: bool = False,
    max_ratio: float = MAX_RATIO,
    sync: bool = True,
) -> BinaryIO:
    """Open *url* as `open_url` does, through its compression.

    Reading finds gzip, bzip2, xz, lzma, zstd and lz4 by their first bytes, never by the name, and also where a server
    sends them with a Content-Encoding, which `open_url` refuses; damage, and more than
    1 MiB + *max_ratio* x the compressed size, is an OpenError. Writing compresses by the suffix (`.gz .tgz .bz2 .tbz2
    .xz .txz .lzma .zst .tzst .lz4` and their further forms), the same data to the same bytes; that of another format,
    such as `.br` or `.zip`, is a UrlError. When it ends, the index of an earlier shard of this name is removed, and all
    else that is derived from a local one and lies beside it. lz4 needs ``pip install 'tarshards[lz4]'``.
    """
    location = Location.of(url, allow_pipe=allow_pipe)
    stream: Any = location.open(mode, sync=sync, encodings=ENCODINGS)
    if mode == "wb":
        stream.before_commit = partial(forget, location, sync=sync)
        shard: Any = compressed(stream, location)
    else:
        shard = decompressed(stream, location.name, max_ratio)
    return shard
