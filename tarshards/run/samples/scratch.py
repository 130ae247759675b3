"""The directory that holds a run's scratch directories, and the fields that are written there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress

from tarshards.errors import OpenError, SampleError
from tarshards.run.samples import guard
from tarshards.run.samples.folder import remove
from tarshards.samples.codecs import encode_field
from tarshards.samples.keys import Sample, is_reserved

MIN_FREE = 1 << 30  # bytes that must be free in /dev/shm for it to be used


class Scratch:
    """The directory in which each sample gets its own; a guard process removes it if this process is killed."""

    def __init__(self, tmpdir: str | None = None):
        folder = os.path.abspath(tmpdir or default_folder())
        try:
            self.path = tempfile.mkdtemp(prefix=f"tarproc-{os.getpid()}-", dir=folder)
        except OSError as error:
            reason = f"no scratch directory can be made here: {error.strerror}"
            raise OpenError(reason, url=folder, errno=error.errno) from error
        # No environment, so that no guard takes this one for a child of its tarproc.
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            remove(self.path)
            raise OpenError(f"no guard process can be started: {error.strerror}", url=self.path) from error

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Remove the directory and end the guard; after an error, kill the processes that have left their group."""
        if kind is not None:
            guard.end_all(self.path)
        remove(self.path)
        with suppress(BrokenPipeError):
            self._guard.communicate(b".")


def default_folder() -> str:
    """Return where scratch directories go: /dev/shm if enough of it is free, else TMPDIR."""
    with suppress(OSError):
        space = os.statvfs("/dev/shm")
        if space.f_bavail * space.f_frsize >= MIN_FREE and os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return tempfile.gettempdir()


def encoded_fields(sample: Sample) -> dict[str, bytes]:
    """Return the fields of *sample* as bytes; raise SampleError for a field that cannot be part of a file name.

    >>> encoded_fields({"__key__": "a", "cls": 7})
    {'cls': b'7'}
    """
    for field in sample:
        if "/" in field or "\0" in field:
            raise SampleError(
                "this field name cannot be part of a file name", url=sample.get("__url__"), key=sample["__key__"]
            )
    return {field: encode_field(field, value) for field, value in sample.items() if not is_reserved(field)}
