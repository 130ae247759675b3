"""`-`: the process's own stdin and stdout, which stay open."""

from __future__ import annotations

import io

from tarshards.storage.location import Location, Transport
from tarshards.storage.streams import InheritedFile, LastingFile, OutputStream, check_written, failure


class Stdio(Transport):
    def open(self, location: Location, mode: str) -> InheritedFile | OutputStream:
        try:
            if mode == "rb":
                return InheritedFile(0, closefd=False)
            file = LastingFile(io.FileIO(1, "wb", closefd=False))
        except OSError as exc:
            raise failure(exc, location.name) from exc

        def commit() -> None:
            file.close()
            check_written(1)

        return OutputStream(location.name, file.write, commit=commit, discard=file.raw.close, file=file)

    def exists(self, location: Location) -> bool:
        return True


TRANSPORT = Stdio()
