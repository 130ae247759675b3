import os

class Mapping:
    """A file mapped for reading; also a buffer."""

    def __init__(self, path: str | os.PathLike[str]) -> None: ...
    def __len__(self) -> int: ...
    def read(self, offset: int, size: int, /) -> bytes: ...
    def is_current(self) -> bool:
        """Return whether its path is that of the same file, not written to since."""
