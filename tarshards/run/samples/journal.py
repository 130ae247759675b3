"""Records of finished samples: the journal from which a later run resumes, and the job log for people."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from tarshards.errors import OpenError
from tarshards.run.samples.folder import write_all
from tarshards.samples.keys import Sample
from tarshards.storage.locks import try_lock
from tarshards.storage.streams import failure

COLUMNS = ["Seq", "Host", "Starttime", "JobRuntime", "Send", "Receive", "Exitval", "Signal", "Command", "Shard", "Key"]
ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def identity(work: str, sample: Sample, fields: dict[str, bytes]) -> str:
    """Return a digest of a sample, its shard, its bytes, and the work."""
    import hashlib

    parts = [work.encode(), sample.get("__url__", "").encode(errors="surrogateescape")]
    parts.append(sample["__key__"].encode(errors="surrogateescape"))
    for field, data in sorted(fields.items()):
        parts += [field.encode(errors="surrogateescape"), data]
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


class _RecordFile:
    """A file to which whole records are appended; its errors name it."""

    def __init__(self, path: str, flags: int):
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)
        except OSError as error:
            raise failure(error, path) from error

    def write(self, data: bytes) -> None:
        try:
            write_all(self.descriptor, data)
        except OSError as error:
            raise failure(error, self.path) from error

    def close(self) -> None:
        try:
            os.close(self.descriptor)
        except OSError as error:  # NFS and others report a full quota only now
            raise failure(error, self.path) from error


class SampleResult(NamedTuple):
    """The outputs of a sample, or why it failed."""

    outputs: list[Sample]
    failure: str | None


class Journal:
    """A file of finished samples, each appended as it finishes.

    A record is a line of JSON with size and checksum, and the bytes of the outputs. Opening the file finds the complete
    records and truncates an incomplete one after a crash.
    """

    def __init__(self, path: str, *, retry_failed: bool = False):
        self._file = _RecordFile(path, 0)
        self._lines: dict[str, tuple[int, int]] = {}  # offset and length of each sample's line
        try:
            if not try_lock(self._file.descriptor):
                self._file.close()
                raise OpenError("another run is using this state", url=path)
            self._scan(retry_failed)
        except OpenError:
            raise
        except OSError as error:
            self._file.close()
            raise failure(error, path) from error

    def find(self, name: str) -> SampleResult | None:
        """Return the result recorded for *name*, or None if there is none or its checksum differs."""
        if name not in self._lines:
            return None
        offset, length = self._lines[name]
        head = json.loads(os.pread(self._file.descriptor, length, offset))
        data = os.pread(self._file.descriptor, head["size"], offset + length)
        if zlib.crc32(data) != head["crc32"]:
            return None
        outputs, position = [], 0
        for reserved, fields in head["outputs"]:
            output = dict(reserved)
            for field, size in fields:
                output[field] = data[position : position + size]
                position += size
            outputs.append(output)
        return SampleResult(outputs, head["failure"])

    def add(self, name: str, result: SampleResult) -> None:
        """Append the result of a finished sample."""
        outputs: list[Any] = []
        parts: list[bytes] = []
        for output in result.outputs:
            fields = {field: data for field, data in output.items() if isinstance(data, bytes)}
            reserved = {field: value for field, value in output.items() if field not in fields}
            outputs.append((reserved, [(field, len(data)) for field, data in fields.items()]))
            parts += fields.values()
        data = b"".join(parts)
        head = {"name": name, "failure": result.failure, "outputs": outputs, "size": len(data)}
        line = json.dumps({**head, "crc32": zlib.crc32(data)}).encode() + b"\n"
        self._file.write(line + data)

    def close(self) -> None:
        self._file.close()

    def _scan(self, retry_failed: bool) -> None:
        end = 0
        with open(self._file.descriptor, "rb", closefd=False) as file:
            length = os.fstat(file.fileno()).st_size
            while line := file.readline():
                try:
                    head = json.loads(line)
                    start, stop = end, end + len(line) + head["size"]
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n") or stop > length:
                    break
                end = file.seek(stop)
                if head["failure"] is None or not retry_failed:
                    self._lines[head["name"]] = start, len(line)
                else:
                    self._lines.pop(head["name"], None)
        os.truncate(self._file.descriptor, end)


def add_end(path: str, run: str) -> None:
    """Record that the samples of *run*, a description of it, are finished, before the output gets its name."""
    _with_journal(path, lambda journal: journal.add(_end(run), SampleResult([], None)))


def has_ended(path: str, run: str) -> bool:
    """Whether the samples of *run* were finished; then an existing output was written by *run*."""
    return os.path.exists(path) and _with_journal(path, lambda journal: journal.find(_end(run)) is not None)


def _with_journal(path: str, use: Callable[[Journal], Any]) -> Any:
    journal = Journal(path)
    try:
        return use(journal)
    finally:
        journal.close()


def _end(run: str) -> str:
    return identity(run, {"__key__": ""}, {})


class Joblog:
    """A table in GNU parallel's columns, plus shard and key; each sample adds its line as it finishes."""

    def __init__(self, path: str, *, append: bool = False):
        self._file, self._host = _RecordFile(path, 0 if append else os.O_TRUNC), os.uname().nodename
        try:
            if not os.fstat(self._file.descriptor).st_size:
                self._write(COLUMNS)
        except OpenError:
            self._file.close()
            raise

    def add(self, index: int, times: tuple[float, float], *cells: int | str) -> None:
        """Add the line of one sample; *times* are its start and its duration in seconds."""
        self._write([str(index + 1), self._host, *(f"{time:.3f}" for time in times), *map(str, cells)])

    def _write(self, row: list[str]) -> None:
        line = "\t".join(cell.translate(ESCAPES) for cell in row) + "\n"
        self._file.write(line.encode(errors="surrogateescape"))

    def close(self) -> None:
        self._file.close()
