"""A sample <-> a directory of files ``sample.EXT``, in which a command runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from select import POLLOUT

from tarshards.errors import SampleError, TarshardsError
from tarshards.parallel.children import wait_for
from tarshards.samples.keys import Sample, join_name, split_name

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of *data*, even if the system accepts it in parts, or the descriptor is non-blocking."""
    sent = 0
    while sent < len(data):
        try:
            sent += os.write(descriptor, memoryview(data)[sent:])
        except BlockingIOError:  # stderr, which other programs share
            wait_for(descriptor, POLLOUT, None)


def unpack(fields: dict[str, bytes], folder: str) -> None:
    """Create *folder* with a file ``sample.EXT`` for each field."""
    os.mkdir(folder, 0o700)
    for field, data in fields.items():
        descriptor = os.open(f"{folder}/sample.{field}", WRITE, 0o666)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)


def pack(folder: str, sample: Sample, *, subdirs: bool = False) -> list[Sample]:
    """Return the samples that a command has left in the *folder* of *sample*.

    ``sample.EXT`` are the fields of the sample itself, ``sample-SUFFIX.EXT`` those of another whose key ends in
    ``-SUFFIX``; other files are ignored. With *subdirs*, the ``sample.EXT`` in each subdirectory are the fields
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
    reserved = {name: sample[name] for name in ("__url__",) if name in sample}
    for name in sorted(os.listdir(folder)):
        parts = split_name(name)
        if parts is None or not (parts[0] == "sample" or parts[0].startswith("sample-")):
            continue
        stem, field = parts
        key = sample["__key__"] + ending + stem.removeprefix("sample")
        fields = packed.setdefault(key, {"__key__": key, **reserved})
        if field in fields:
            raise SampleError(
                "the command wrote two files of this field", url=sample.get("__url__"), key=key, field=field
            )
        join_name(key, field)
        fields[field] = _read(folder, name, sample)
    return [packed[key] for key in sorted(packed)]


def _read(folder: str, name: str, sample: Sample) -> bytes:
    try:
        descriptor = os.open(f"{folder}/{name}", READ)
    except OSError as error:
        raise _refused(name, sample) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(name, sample)
        data = os.read(descriptor, status.st_size + 1)
        if len(data) == status.st_size:
            return data
        with open(descriptor, "rb", buffering=0, closefd=False) as file:  # larger than one read, or it grows
            return data + file.readall()
    finally:
        os.close(descriptor)


def _refused(name: str, sample: Sample) -> TarshardsError:
    reason = f"the command wrote {name!r}, which is not a regular file that can be read"
    return SampleError(reason, url=sample.get("__url__"), key=sample["__key__"])


def remove(folder: str, fields: Iterable[str] = ()) -> None:
    """Remove *folder* with all its contents, including read-only directories.

    It is not listed if it contains only the files of *fields*.
    """
    try:
        for field in fields:
            os.unlink(f"{folder}/sample.{field}")
        os.rmdir(folder)
    except OSError:
        import shutil

        for path, names, _ in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    if not os.path.islink(f"{path}/{name}"):
                        os.chmod(f"{path}/{name}", 0o700)
        shutil.rmtree(folder, ignore_errors=True)
