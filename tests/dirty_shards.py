"""Shards with bad keys, and their samples according to tarfile and the sample convention."""

from __future__ import annotations

import io
import random
import re
import tarfile
from typing import Any, NamedTuple

REGROUP = "`tarsort --regroup` groups them, or pack with `tar --sort=name`"
FAULTS = ["duplicate field", f"members of this key are not adjacent; {REGROUP}"]
KEY = re.compile(r"((?:.*/|)[^./][^./]*)[.]([^/]*)", re.DOTALL)


def write_tar(path, members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> str:
    """Write *members* with tarfile; a name that ends in a slash is a directory."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def thousand(fault: str) -> list[tuple[str, bytes]]:
    """The members of 1,000 samples; the 11th has a duplicate field, or the key of the 4th."""
    members = []
    for i in range(1000):
        key = f"{3 if i == 10 and fault == FAULTS[1] else i:04d}"
        members += [(f"{key}.cls", b"%d" % i), (f"{key}.txt", b"text %d" % i)]
        if i == 10 and fault == FAULTS[0]:
            members += [(f"{key}.CLS", b"again"), (f"{key}.txt", b"more"), (f"{key}.json", b"{}")]
    return members


class Read(NamedTuple):
    """The result of reading a shard: the samples, and key, field, offset and reason of each refused one."""

    samples: list[dict[str, Any]]
    refused: list[tuple[str, str | None, int, str]]
    members: int


def expected(path) -> Read:
    """Read a shard with tarfile: runs of adjacent members of one key are samples; the first error of each counts."""
    runs: list[tuple[str, list[tuple[str, bytes, int]]]] = []
    with tarfile.open(path) as archive:
        for info in archive:
            match = KEY.fullmatch(info.name)
            parts = info.name.split("/")
            if not info.isreg() or not match or any(p.startswith("__") and p.endswith("__") for p in parts):
                continue
            key, field = match[1], match[2].lower()
            if not runs or runs[-1][0] != key:
                runs.append((key, []))
            runs[-1][1].append((field, archive.extractfile(info).read(), info.offset))
    read, seen = Read([], [], 0), set()
    total = 0
    for key, members in runs:
        fields: dict[str, Any] = {"__key__": key, "__url__": str(path)}
        fault = (key, None, members[0][2], FAULTS[1]) if key in seen else None
        for field, data, offset in members:
            if field in fields and fault is None:
                fault = key, field, offset, FAULTS[0]
            fields[field] = data
        seen.add(key)
        if fault is None:
            read.samples.append(fields)
            total += len(members)
        else:
            read.refused.append(fault)
    return read._replace(members=total)


def any_members(rng: random.Random) -> list[tuple[str, bytes]]:
    """Members of a shard made dirty: some fields twice, some keys again, reserved fields, members of no sample."""
    members = []
    keys = rng.sample([f"{folder}{i}" for folder in ("", "d/", "d.e/") for i in range(30)], rng.randrange(1, 25))
    if rng.random() < 0.5:
        keys.sort()
    for key in keys:
        for field in rng.sample(["cls", "TXT", "seg.png", "json", ""], rng.randrange(1, 5)):
            members.append((f"{key}.{field}", rng.randbytes(rng.choice([0, 3, 511, 512, 513, 3000]))))
    for _ in range(rng.randrange(5)):
        change, at = rng.randrange(6), rng.randrange(len(members))
        name, key = members[at][0], members[at][0].rpartition("/")[2].partition(".")[0]
        if change == 0:  # a field twice, beside itself or in other letters
            members.insert(at, (name if rng.random() < 0.5 else name.swapcase(), b"again"))
        elif change == 1:  # a member elsewhere
            members.insert(rng.randrange(len(members)), members.pop(at))
        elif change == 2:  # a run that comes again
            members += members[at : at + rng.randrange(1, 4)]
        elif change == 3:
            folder = name[: name.rfind("/") + 1]
            members.insert(at, (f"{folder}{key}.{rng.choice(['__key__', '__url__'])}", b"x"))
        elif change == 4:
            members.insert(at, (rng.choice(["README", "d/", ".hidden", "__meta__/a.txt", "d/__x__/a.txt"]), b""))
        else:
            members.insert(at, (f"{'n' * 120}/{key}.{rng.choice(['a', 'b', 'A'])}", b"long"))
    return members
