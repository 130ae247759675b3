"""What has been done: the journal that a later run resumes from, and the log for people."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
import zlib
from threading import Lock
from typing import IO, Any, NamedTuple

from tarshards.errors import OpenError
from tarshards.shell.scratch import Sample

COLUMNS = ["Seq", "Host", "Starttime", "JobRuntime", "Send", "Receive", "Exitval", "Signal", "Command", "Shard", "Key"]
ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def identity(work: str, sample: Sample, fields: dict[str, bytes]) -> str:
    """Return a digest of a sample, its shard, its bytes, and of what is done with it."""
    parts = [work.encode(), sample.get("__url__", "").encode(errors="surrogateescape")]
    parts.append(sample["__key__"].encode(errors="surrogateescape"))
    for field, data in sorted(fields.items()):
        parts += [field.encode(errors="surrogateescape"), data]
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


def _open(path: str, mode: str, **options: Any) -> IO[Any]:
    try:
        return open(path, mode, **options)
    except OSError as error:
        raise OpenError(error.strerror or str(error), url=path) from error


class Outcome(NamedTuple):
    """What became of a sample: its outputs, or why it failed."""

    outputs: list[Sample]
    failure: str | None


class Journal:
    """A file of finished samples, to which each is appended at once.

    A record is a line of JSON, which says its size and checksum, and the bytes of the outputs. Opening it finds the
    records that are whole and cuts off one that a crash has left half written.
    """

    def __init__(self, path: str, *, retry_failed: bool = False):
        self.path = path
        self._file: Any = _open(path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise OpenError("another run is using this state", url=path) from error
        self._lock = Lock()
        self._places: dict[str, tuple[int, int]] = {}  # where the line of a sample begins, and its length
        self._scan(retry_failed)

    def find(self, name: str) -> Outcome | None:
        """Return the outcome recorded for *name*, if there is one and it is sound."""
        if name not in self._places:
            return None
        offset, length = self._places[name]
        head = json.loads(os.pread(self._file.fileno(), length, offset))
        data = os.pread(self._file.fileno(), head["size"], offset + length)
        if zlib.crc32(data) != head["crc32"]:
            return None
        outputs, position = [], 0
        for place, fields in head["outputs"]:
            output = dict(place)
            for field, size in fields:
                output[field] = data[position : position + size]
                position += size
            outputs.append(output)
        return Outcome(outputs, head["failure"])

    def add(self, name: str, outcome: Outcome) -> None:
        """Append the outcome of a finished sample."""
        outputs: list[Any] = []
        parts: list[bytes] = []
        for output in outcome.outputs:
            fields = {field: data for field, data in output.items() if isinstance(data, bytes)}
            place = {field: value for field, value in output.items() if field not in fields}
            outputs.append((place, [(field, len(data)) for field, data in fields.items()]))
            parts += fields.values()
        data = b"".join(parts)
        head = {"name": name, "failure": outcome.failure, "outputs": outputs, "size": len(data)}
        line = json.dumps({**head, "crc32": zlib.crc32(data)}).encode() + b"\n"
        with self._lock:
            self._file.write(line + data)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _scan(self, retry_failed: bool) -> None:
        self._file.seek(0)
        length = os.fstat(self._file.fileno()).st_size
        end = 0
        while line := self._file.readline():
            try:
                head = json.loads(line)
                start, stop = end, end + len(line) + head["size"]
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n") or stop > length:
                break
            end = stop
            self._file.seek(end)
            if head["failure"] is None or not retry_failed:
                self._places[head["name"]] = start, len(line)
            else:
                self._places.pop(head["name"], None)
        self._file.truncate(end)


class Joblog:
    """A table of what ran, in GNU parallel's columns with the shard and the key behind them; a line as each ends."""

    def __init__(self, path: str, *, append: bool = False):
        fresh = not append or not os.path.exists(path) or not os.path.getsize(path)
        self._file: Any = _open(path, "a" if append else "w", buffering=1, errors="surrogateescape")
        self._lock, self._host = Lock(), socket.gethostname()
        if fresh:
            self._file.write("\t".join(COLUMNS) + "\n")

    def add(self, index: int, begun: float, sent: int, got: int, exitval: int, signal: int, *names: str) -> None:
        """Add the line of one sample; *names* are its command, shard and key."""
        runtime = f"{time.time() - begun:.3f}"
        row = [index + 1, self._host, f"{begun:.3f}", runtime, sent, got, exitval, signal, *names]
        with self._lock:
            self._file.write("\t".join(str(cell).translate(ESCAPES) for cell in row) + "\n")

    def close(self) -> None:
        self._file.close()
