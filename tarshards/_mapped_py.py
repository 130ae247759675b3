"""Files mapped into memory, in pure Python: the twin of _mapped.c for where there is no compiler."""

from __future__ import annotations

import mmap
import os
from typing import Any


class Mapping:
    """A file mapped for reading. It keeps its file open, to ask for its length before every copy."""

    def __init__(self, path: str | os.PathLike[str]):
        with open(path, "rb", buffering=0) as file:
            self._file = os.dup(file.fileno())
        self._size = os.fstat(self._file).st_size
        self._map: Any = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) if self._size else b""

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes at *offset*."""
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at offset {offset} of {self._size}")
        if os.fstat(self._file).st_size < self._size:
            raise OSError("the file has shrunk since it was opened")
        data: bytes = self._map[offset : offset + size]
        return data

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
