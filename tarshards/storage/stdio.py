"""`-`: the process's own stdin and stdout, which stay open."""

from __future__ import annotations

import io
from typing import Any

from tarshards.storage.streams import Writer, failure


def open_stream(url: str, mode: str, **_: Any) -> io.RawIOBase:
    try:
        if mode == "rb":
            return io.FileIO(0, closefd=False)
        file = io.BufferedWriter(io.FileIO(1, "wb", closefd=False))
    except OSError as exc:
        raise failure(exc, url) from exc
    return Writer(url, file.write, commit=file.close, discard=file.raw.close)
