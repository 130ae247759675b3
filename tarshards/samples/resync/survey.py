"""A shard's headers -> its whole samples, what is lost, and what every byte is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tarshards.errors import TarshardsError
from tarshards.samples.keys import KeyRule, split_name
from tarshards.samples.resync.grouping import FoundSample, group_found
from tarshards.samples.resync.judging import judge
from tarshards.samples.resync.walking import Gap, Piece, Zeros, after, walk
from tarshards.storage.plain import PlainFile
from tarshards.tar.read import ArchiveEnd, padding


@dataclass
class Survey:
    """What a shard of *size* bytes holds: samples in the order of their first members, gaps, and ends of archives.

    *skipped* counts the members that are in no sample, *other* the bytes of these and of global headers. *error* is the
    error that ended reading early, or None.
    """

    url: str
    size: int
    error: TarshardsError | None
    samples: list[FoundSample] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    zeros: list[Zeros] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    other: int = 0

    @property
    def ends(self) -> list[Zeros]:
        """The ends of archives that others follow."""
        return [zeros for zeros in self.zeros if zeros.end < self.size]

    @property
    def byte_counts(self) -> dict[str, int]:
        """The bytes of the shard by what they are; they add up to its size."""
        return {
            "whole": sum(sample.size for sample in self.samples if sample.problem is None),
            "quarantined": sum(sample.size for sample in self.samples if sample.problem is not None),
            "other": self.other,
            "zeros": sum(zeros.end - zeros.start for zeros in self.zeros),
            "gaps": sum(gap.end - gap.start for gap in self.gaps),
        }


def group_file(file: PlainFile, *, split: KeyRule = split_name, pieces: Iterable[Piece] | None = None) -> Survey:
    """Return what the headers of an open shard show; its samples are not judged.

    *pieces* are those of ``walk(file)``, where it was called before. A sample takes about 500 bytes of memory.
    """
    found = Survey(file.name, file.size, file.error)

    def counted(pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, list):
                found.other += min(after(piece[-1]), file.size) - piece[0][1]
            yield piece

    def skip(reason: str) -> None:
        found.skipped[reason] += 1

    for item in group_found(counted(walk(file) if pieces is None else pieces), file, split=split, skip=skip):
        if isinstance(item, Gap):
            found.gaps.append(item)
        elif isinstance(item, Zeros):
            found.zeros.append(item)
        else:
            found.samples.append(item)
    if found.samples:
        last = found.samples[-1]
        _, start, end = last.members[-1]
        last.size -= max(0, end + padding(end - start) - file.size)  # padding that was cut off
    found.other -= sum(sample.size for sample in found.samples)
    return found


def survey_file(file: PlainFile, *, split: KeyRule = split_name, end: ArchiveEnd = "required") -> Survey:
    """Survey an open shard: where its samples lie, which of them are whole, and where it is damaged.

    Only headers are read.
    """
    found = group_file(file, split=split, pieces=walk(file, end=end))
    judge(found.samples, found.gaps, file)
    return found
