import os
from typing import Any

class Mapping:
    """A file mapped for reading, also a buffer; or read, if mapping it failed with the errno *unmapped*, else 0."""

    modified: int
    unmapped: int
    def __init__(self, path: str | os.PathLike[str], copied: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def read(self, offset: int, size: int, /) -> bytes: ...
    def check(self, end: int, /) -> None:
        """Raise OSError unless the file still has its first *end* bytes: call it after copying them."""

    def drop(self, offset: int, size: int, /) -> None: ...
    def scatter(self, flag: bool, /) -> None: ...
    def is_current(self) -> bool:
        """Return whether the path is still that of the same file, unmodified."""

    def was_written(self) -> bool:
        """Return whether the path is still that of the same file, but the file was written to."""

    def hold_open(self) -> None:
        """Hold the file open, if possible: ``is_current`` is then faster."""

def begin_flush(descriptor: int, offset: int, size: int, /) -> None:
    """Start writing bytes of a file to the disk, without waiting; flushing the file reports errors."""

def replace_word(memory: Any, number: int, before: int, after: int, /) -> bool:
    """Write word *number*, of 64 bits, of shared memory if it is still *before*; return whether it was."""
