"""Helpers for the tests of the tar package: archives, streams, and the programs that serve as oracles."""

import io
import os
import subprocess
import tarfile
from collections import Counter
from itertools import cycle
from typing import NamedTuple

from programs import need

from tarshards.errors import TarError
from tarshards.tar.read import BLOCK, Member, pack_header, padding, read_members


def program(name):
    """Return a function that runs *name* with the given arguments, and returns its stdout."""
    need("GNU tar" if name == "tar" else name)

    def run(*arguments, **options):
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC", **options.pop("env", {})}
        environment.pop("LD_PRELOAD", None)  # the sanitizer's, which is for the parser
        environment.pop("TAR_OPTIONS", None)
        command = [name, *map(os.fsdecode, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, **options)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout

    return run


class Skips(Counter):
    """The part of a ledger that read_members needs; `joined` counts the archives after the first."""

    joined = 0

    def skip(self, kind):
        self[kind] += 1

    def count(self, *, joined):
        self.joined += joined


class Drip:
    """A stream that cannot seek and returns a few bytes at a time, usually fewer than requested."""

    def __init__(self, data, sizes=(511, 1, 513, 7, 1023, 333)):
        self.stream, self.sizes = io.BytesIO(data), cycle(sizes)

    def seekable(self):
        return False

    def read(self, size):
        return self.stream.read(min(size, next(self.sizes)))


def pack(members):
    """Return the members of an archive as we write them, without its end."""
    return b"".join(pack_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members)


def header(name=b"a.txt", size=b"%011o\0" % 0, kind=b"0", magic=b"ustar\x0000", prefix=b""):
    """Return a header block made of its raw fields."""
    block = bytearray(BLOCK)
    for start, field in ((0, name), (100, b"0000644\0"), (124, size), (156, kind), (257, magic), (345, prefix)):
        block[start : start + len(field)] = field
    return seal(block)


def seal(block):
    """Return the header *block* with the right checksum."""
    total = sum(block[:148]) + 8 * 0x20 + sum(block[156:])
    return bytes(block[:148]) + b"%06o\0 " % total + bytes(block[156:])


def entry(data=b"", **fields):
    """Return a member made of raw fields: its header, *data* and the padding."""
    fields.setdefault("size", b"%011o\0" % len(data))
    return header(**fields) + data + bytes(padding(len(data)))


def pax(*records, kind=b"x"):
    """Return a pax header of the given records, each b"key=value"."""
    body = b""
    for record in records:
        length = len(record) + 3
        while len(b"%d %b\n" % (length, record)) != length:
            length += 1
        body += b"%d %b\n" % (length, record)
    return entry(body, name=b"PaxHeader", kind=kind)


class Reading(NamedTuple):
    """All that a reading gave: members, counts of those skipped, the error that ended it or None, archives joined."""

    members: list
    skipped: dict
    error: TarError | None
    joined: int = 0


def read(stream, **options):
    """Read *stream*, bytes or a stream, to its end or an error."""
    members, skips, error = [], Skips(), None
    if isinstance(stream, bytes):
        stream = io.BytesIO(stream)
    try:
        for member in read_members(stream, ledger=skips, **options):
            members.append(member)
    except TarError as caught:
        error = caught
    return Reading(members, dict(skips), error, skips.joined)


def read_whole(stream, **options):
    """Read *stream*, which must be sound, and return its members."""
    reading = read(stream, **options)
    assert reading.error is None, reading.error
    return reading.members


class Block(NamedTuple):
    """A block of an archive: its content, and the offset of its member's first header."""

    offset: int
    role: str  # "header", "data", "end", or "x data", "L data", ... of an extended header
    chain: int


def blocks(archive):
    """Walk the blocks of a simple, sound archive, independently of the parsers tested."""
    found = []
    at = chain = 0
    while at < len(archive):
        block = archive[at : at + BLOCK]
        if not any(block):
            found.append(Block(at, "end", at))
            at = chain = at + BLOCK
            continue
        kind, size = chr(block[156]), int(block[124:135], 8)
        role = f"{kind} data" if kind in "xgLK" else "data"
        stop = at + BLOCK + size + padding(size)
        found.append(Block(at, "header", chain))
        found += [Block(offset, role, chain) for offset in range(at + BLOCK, stop, BLOCK)]
        at = stop
        if kind not in "xLK":
            chain = at
    return found


def tarfile_members(path):
    """Read the regular files of an archive, and the links to them, with Python's tarfile."""
    with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape", ignore_zeros=True) as archive:
        found = [(info, archive.extractfile(info)) for info in archive if info.isreg() or info.issym() or info.islnk()]
        return [Member(info.name, file.read(), info.offset) for info, file in found if file is not None]


def tarfile_archive(members, *, format, mtime=0, **options):
    """Write an archive with Python's tarfile."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, errors="surrogateescape", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_files(folder, members):
    """Write *members*, pairs of name and bytes, as files below *folder*."""
    for name, data in members:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
