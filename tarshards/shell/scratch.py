"""A sample <-> a directory of files ``sample.EXT``, in which a command may do as it likes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from tarshards.codecs import encode_field
from tarshards.errors import SampleError, TarshardsError
from tarshards.keys import is_reserved, join_name, split_name
from tarshards.shell import guard

Sample = dict[str, Any]

ROOM = 1 << 30  # bytes that /dev/shm must have free to be used
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """The directory in which each sample has its own; removed by ``close``, or by a guard if we are killed."""

    def __init__(self, tmpdir: str | None = None):
        folder = os.path.abspath(tmpdir or default_folder())
        self.path = tempfile.mkdtemp(prefix=f"tarproc-{os.getpid()}-", dir=folder)
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

    def close(self, *, kill: bool) -> None:
        """Remove the directory and dismiss the guard; *kill* what has left its process group and still runs."""
        if kill:
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


def unpack(fields: dict[str, bytes], folder: str) -> None:
    """Make *folder*, and in it a file ``sample.EXT`` of each field."""
    os.mkdir(folder, 0o700)
    for field, data in fields.items():
        descriptor = os.open(f"{folder}/sample.{field}", WRITE, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)


def pack(folder: str, sample: Sample, *, subdirs: bool = False) -> list[Sample]:
    """Return the samples that a command has left in the *folder* of *sample*.

    ``sample.EXT`` are the fields of the sample itself, ``sample-SUFFIX.EXT`` those of another whose key ends in
    ``-SUFFIX``; other files are not looked at. With *subdirs*, the ``sample.EXT`` in each subdirectory are the fields
    of a sample whose key ends in ``-SUBDIRECTORY``. Raises SampleError for anything under these names that is not a
    regular file, and for names that would not read back.
    """
    if not subdirs:
        return _pack(folder, sample, "")
    packed = []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in names:
        packed += _pack(f"{folder}/{name}", sample, f"-{name}")
    return packed


def _pack(folder: str, sample: Sample, ending: str) -> list[Sample]:
    packed: dict[str, Sample] = {}
    place = {name: sample[name] for name in ("__url__",) if name in sample}
    for name in sorted(os.listdir(folder)):
        parts = split_name(name)
        if parts is None or not (parts[0] == "sample" or parts[0].startswith("sample-")):
            continue
        stem, field = parts
        key = sample["__key__"] + ending + stem.removeprefix("sample")
        fields = packed.setdefault(key, {"__key__": key, **place})
        if field in fields:
            raise SampleError("the command left this field twice", url=sample.get("__url__"), key=key, field=field)
        join_name(key, field)
        fields[field] = _read(folder, name, sample)
    return [packed[key] for key in sorted(packed)]


def _read(folder: str, name: str, sample: Sample) -> bytes:
    try:
        descriptor = os.open(f"{folder}/{name}", READ)
    except OSError as error:
        raise _refused(name, sample) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refused(name, sample)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(descriptor)


def _refused(name: str, sample: Sample) -> TarshardsError:
    reason = f"the command left {name!r}, which is not a regular file that can be read"
    return SampleError(reason, url=sample.get("__url__"), key=sample["__key__"])


def remove(folder: str) -> None:
    """Remove *folder* and all that is in it, also what its owner may not write to."""

    try:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
    except OSError:
        for path, names, _ in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    if not os.path.islink(f"{path}/{name}"):
                        os.chmod(f"{path}/{name}", 0o700)
        shutil.rmtree(folder, ignore_errors=True)
