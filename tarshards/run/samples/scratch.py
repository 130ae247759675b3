"""The directory of a run's scratch directories, and what goes into them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress

from tarshards.errors import OpenError, SampleError
from tarshards.run.samples import guard
from tarshards.run.samples.folder import Sample, remove
from tarshards.samples.codecs import encode_field
from tarshards.samples.keys import is_reserved

ROOM = 1 << 30  # bytes that /dev/shm must have free to be used


class Scratch:
    """The directory in which each sample has its own; removed at the end, or by a guard if we are killed."""

    def __init__(self, tmpdir: str | None = None):
        folder = os.path.abspath(tmpdir or default_folder())
        try:
            self.path = tempfile.mkdtemp(prefix=f"tarproc-{os.getpid()}-", dir=folder)
        except OSError as error:
            raise OpenError(f"no scratch directory can be made here: {error.strerror}", url=folder) from error
        # No environment: the guard must not look like a child of ours, or of a tarproc around us.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Remove the directory and dismiss the guard; after an error, kill what has left its process group and runs."""
        if kind is not None:
            guard.end_all(self.path)
        remove(self.path)
        with suppress(BrokenPipeError):
            self._guard.communicate(b".")


def default_folder() -> str:
    """Return where scratch directories go: memory if there is room, else TMPDIR."""
    with suppress(OSError):
        space = os.statvfs("/dev/shm")
        if space.f_bavail * space.f_frsize >= ROOM and os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return tempfile.gettempdir()


def encoded_fields(sample: Sample) -> dict[str, bytes]:
    """Return the fields of *sample* as bytes; raise SampleError for one that could not be a file's name.

    >>> encoded_fields({"__key__": "a", "cls": 7})
    {'cls': b'7'}
    """
    for field in sample:
        if "/" in field or "\0" in field:
            raise SampleError("a field with this name is no file", url=sample.get("__url__"), key=sample["__key__"])
    return {field: encode_field(field, value) for field, value in sample.items() if not is_reserved(field)}
