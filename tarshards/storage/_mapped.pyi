import os

class Mapping:
    """A file mapped for reading; also a buffer."""

    modified: int
    def __init__(self, path: str | os.PathLike[str], copied: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def read(self, offset: int, size: int, /) -> bytes: ...
    def drop(self, offset: int, size: int, /) -> None: ...
    def scatter(self, flag: bool, /) -> None: ...
    def is_current(self) -> bool:
        """Return whether its path is that of the same file, not written to since."""

    def was_written(self) -> bool:
        """Return whether its path is that of the same file, but it was written to since."""

    def hold_open(self) -> None:
        """Hold the file open if it can be, so that ``is_current`` is quicker: was it removed, or written to?"""

def begin_flush(descriptor: int, offset: int, size: int, /) -> None:
    """Let the disk begin with bytes of a file that were written, without waiting; errors come when it is flushed."""
