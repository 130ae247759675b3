"""Shards that are rewritten under their indexes: sound archives, written by Python's tarfile and by GNU tar."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

import msgpack
import numpy as np

from tarshards.errors import TarshardsError
from tarshards.index.build import build_index
from tarshards.index.sidecar import CHECKSUM, Index
from tarshards.samples.keys import split_name
from tarshards.storage.location import Location

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
NAMES = ("{:03d}", "./d/{:03d}", "Ä{:03d}", "d" * 70 + "/{:03d}", "{:03d}" + "k" * 96, "n" * 120 + "{:03d}")
NAMES += ("p" * 60 + "/" + "q" * 60 + "/{:03d}",)


@dataclass
class Entry:
    """A member; *pax* are the records of its extended header, *link* is the target of a link."""

    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    pax: dict[str, str] = field(default_factory=dict)
    link: str = "x"


def npy(value: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.full(8, value))
    return stream.getvalue()


def samples(count: int, name: str = "{:03d}", *, upper: bool = False) -> list[Entry]:
    """The members of samples of a number, an array and a text of various lengths."""
    entries = []
    for i in range(count):
        key = name.format(i)
        text = "TXT" if upper else "txt"
        entries += [Entry(f"{key}.cls", b"%d" % i), Entry(f"{key}.{text}", b"t%d" % i * (i * 331 % 1000))]
        entries.append(Entry(f"{key}.x.npy", npy(i)))
    return entries


def write(path: Path, entries: Iterable[Entry], format: str = "ustar", *, times: float = 0) -> str:
    """Write an archive by tarfile; return its format, which is another where ustar cannot hold a name."""
    try:
        with tarfile.open(path, "w", format=FORMATS[format], encoding="utf-8", errors="surrogateescape") as archive:
            for entry in entries:
                info = tarfile.TarInfo(entry.name)
                data = b"" if entry.type in LINKS else entry.data
                info.size, info.type, info.mtime, info.pax_headers = len(data), entry.type, times, entry.pax
                info.linkname = entry.link if entry.type in LINKS else ""
                archive.addfile(info, io.BytesIO(data))
    except ValueError:
        return write(path, entries, "gnu", times=times)
    return format


def write_by_gnu_tar(path: Path, entries: Iterable[Entry], format: str) -> bool:
    """Write an archive by GNU tar; return whether it can hold these members."""
    folder = path.with_suffix(".files")
    folder.mkdir(exist_ok=True)
    names = []
    for entry in entries:
        target = folder / entry.name
        if target.exists() or entry.type in LINKS:
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if entry.type == tarfile.DIRTYPE else target.write_bytes(entry.data)
        names.append(entry.name)
    command = ["tar", "-C", str(folder), f"--format={format}", "--no-recursion", "-cf", str(path), "--null", "-T", "-"]
    done = subprocess.run(command, input="\0".join(names).encode(), capture_output=True)
    return done.returncode == 0


def contents(path: Path) -> dict[tuple[str, str], bytes]:
    """What the archive holds, as tarfile reads it: the data by key and field."""
    found = {}
    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as archive:
        for info in archive:
            if (info.isreg() or info.type in LINKS) and (parts := split_name(info.name)) is not None:
                with suppress(KeyError, RecursionError):  # a link to what is not in the archive, or to itself
                    if (file := archive.extractfile(info)) is not None:
                        found[parts] = file.read()
    return found


def rewrite(entries: list[Entry], rng: random.Random) -> list[Entry]:
    """Return other entries; many lie where the old ones lay."""
    entries = list(entries)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(entries))
        entry = entries[at]
        kind = rng.choice(CHANGES)
        if kind == "grow":  # mostly within its last block
            entries[at] = replace(entry, data=entry.data + b"7" * rng.choice([1, 1, 2, 30]))
        elif kind == "shrink":
            entries[at] = replace(entry, data=entry.data[: rng.randint(0, len(entry.data))])
        elif kind == "content":
            entries[at] = replace(entry, data=bytes(rng.choices(b"123456789", k=len(entry.data))))
        elif kind == "rename":
            name = list(entry.name)
            name[rng.randrange(len(name))] = rng.choice("9zZ.")
            entries[at] = replace(entry, name="".join(name))
        elif kind == "swap":
            other = rng.randrange(len(entries))
            entries[at], entries[other] = entries[other], entries[at]
        elif kind == "move":
            entries.insert(rng.randrange(len(entries)), entries.pop(at))
        elif kind == "replace":
            entries[at] = Entry(f"new{rng.randrange(1000)}.cls", b"%d" % rng.randrange(1000))
        elif kind == "remove" and len(entries) > 1:
            del entries[at]
        elif kind == "add":
            entries.insert(
                at, Entry(f"new{rng.randrange(1000)}.txt", bytes(rng.choices(b"ab\0", k=rng.randrange(1500))))
            )
        elif kind == "directory":
            entries[at] = Entry(entry.name, type=tarfile.DIRTYPE)
        elif kind == "link":
            entries[at] = Entry(entry.name, type=rng.choice(LINKS), link=rng.choice(["x", rng.choice(entries).name]))
        elif kind == "relink":
            links = [at for at, entry in enumerate(entries) if entry.type in LINKS]
            for at in links:
                entries[at] = replace(entries[at], link=rng.choice(entries).name)
        elif kind == "path":  # its own header keeps the name, the one before it has another
            entries[at] = replace(entry, pax={"path": f"{rng.randrange(1000)}.cls"})
        elif kind == "path for data":  # instead of the last two blocks of data of the member before
            long = [at for at in range(1, len(entries)) if len(entries[at - 1].data) > 1024]
            if long:
                at = rng.choice(long)
                data = entries[at - 1].data
                entries[at - 1] = replace(entries[at - 1], data=data[: (-(-len(data) // 512) - 2) * 512])
                entries[at] = replace(entries[at], pax={"path": f"{rng.randrange(1000)}.cls"})
    named = {entry.name: entry for entry in entries}  # of two of a name, tarfile and we would read another
    return [entry for entry in entries if named.pop(entry.name, None) is not None]


CHANGES = (
    "grow",
    "shrink",
    "content",
    "rename",
    "swap",
    "move",
    "replace",
    "remove",
    "add",
    "directory",
    "link",
    "relink",
)
CHANGES += ("path", "path for data") * 2


def keep_index(path: Path, index: Index) -> bool:
    """Save *index* beside the shard, made to pass the test when a shard is opened; return whether that is possible."""
    size, headers = os.path.getsize(path), b""
    with Location.of(str(path)).ranges() as ranges:
        for offset in (index.offset[0], index.offset[-1]):
            if int(offset) > size:
                return False
            headers += ranges.read(int(offset) - 512, 512)
    end = None
    with suppress(TarshardsError):
        end = max(build_index(str(path)).end, int(index.offset[-1] + index.size[-1]) + 511 & -512)
    kept = Index(size, crc32(headers), index.keys, index.fields, index.arrays, index.archives, end)
    kept.faults, kept.elsewhere = index.faults, index.elsewhere
    kept.save(str(path))
    try:
        Index.load(str(path))
    except TarshardsError:  # a member beyond the shard's end
        return False
    return True


def without_digest(url: str) -> None:
    """Let the index of a shard be as an earlier version wrote it."""
    path = Path(f"{url}.index")
    index = msgpack.unpackb(path.read_bytes(), unicode_errors="surrogateescape")
    del index["shard"]["digest"], index["checksum"]
    packer = msgpack.Packer(unicode_errors="surrogateescape", autoreset=False)
    packer.pack_map_header(len(index) + 1)
    for entry in index.items():
        for part in entry:
            packer.pack(part)
    packed = packer.bytes() + CHECKSUM
    path.write_bytes(packed + crc32(packed).to_bytes(4, "big"))


def stale(folder: Path, seed: int) -> tuple[Path, dict[tuple[str, str], bytes]] | None:
    """Write a shard and its index, rewrite the shard; return where it is and what it holds.

    None where the index cannot pass for the new shard's.
    """
    rng = random.Random(seed)
    path = folder / f"{seed}.tar"
    name = rng.choice(NAMES)
    entries = samples(rng.choice([2, 5, 12]), name, upper=rng.random() < 0.2)
    if rng.random() < 0.3:
        entries.insert(rng.randrange(len(entries)), Entry("README", b"r" * rng.randrange(1200)))
    for _ in range(rng.choice([0, 0, 1, 3])):  # links, hard ones to what comes before them
        at = rng.randrange(1, len(entries))
        kind = rng.choice(LINKS)
        link = rng.choice(entries[:at] if kind == tarfile.LNKTYPE else entries).name
        entries[at] = Entry(
            entries[at].name, type=kind, link=link if kind == tarfile.LNKTYPE else os.path.basename(link)
        )
    format = rng.choice([*FORMATS])
    fraction = rng.choice([0, 0.5]) if format == "pax" else 0
    format = write(path, entries, format, times=fraction)
    index = build_index(str(path))
    entries = rewrite(entries, rng)
    other = rng.choice([format, format, *FORMATS])
    if any(entry.pax for entry in entries):
        write(path, entries, "pax", times=fraction)
    elif rng.random() < 0.7 or not write_by_gnu_tar(path, entries, other):
        write(path, entries, other, times=fraction)
    return (path, contents(path)) if keep_index(path, index) else None
