import os

class Mapping:
    """A file mapped for reading; also a buffer."""

    def __init__(self, path: str | os.PathLike[str]) -> None: ...
    def __len__(self) -> int: ...
    def read(self, offset: int, size: int, /) -> bytes: ...
    def drop(self, offset: int, size: int, /) -> None: ...
    def scatter(self, flag: bool, /) -> None: ...
    def is_current(self) -> bool:
        """Return whether its path is that of the same file, not written to since."""

    def hold_open(self) -> None:
        """Hold the file open, so that ``is_current`` is quicker: it asks whether it has been removed or written to.

        Raises OSError, as where too many files are open.
        """
