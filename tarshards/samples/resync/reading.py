"""A damaged shard's whole samples, a report on every byte, and an error for everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tarshards.errors import OpenError, SampleError, TarError, TarshardsError
from tarshards.samples.keys import DUPLICATE_FIELD, INCOMPLETE, KeyRule, split_name, with_remedy
from tarshards.samples.ledger import Ledger, tell_of_dots, wrong_number
from tarshards.samples.resync.judging import judge
from tarshards.samples.resync.walking import FoundSample, Gap, Piece, Zeros, after, group_found, walk
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import PlainFile, open_plain
from tarshards.tar.elsewhere import SpecialMembers, UnresolvedError
from tarshards.tar.read import padding

ENDED = "an archive ends here and another one begins, or members were overwritten with zeros"


@dataclass
class Survey:
    """The contents of a shard of *size* bytes: samples in the order of their first members, gaps, and ends of archives.

    *skipped* counts the members that belong to no sample, *other* the bytes of these and of global headers. *error* is
    the error that ended reading early, or None.
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
    def items(self) -> list[FoundSample | Gap | Zeros]:
        """Samples, gaps, and the ends of archives that are followed by others, in the order of their offsets."""
        ends = [zeros for zeros in self.zeros if zeros.end < self.size]
        return sorted(
            [*self.samples, *self.gaps, *ends],
            key=lambda item: item.offset if isinstance(item, FoundSample) else item.start,
        )

    @property
    def byte_counts(self) -> dict[str, int]:
        """The bytes of the shard by kind; they add up to its size."""
        return {
            "whole": sum(sample.size for sample in self.samples if sample.problem is None),
            "quarantined": sum(sample.size for sample in self.samples if sample.problem is not None),
            "other": self.other,
            "zeros": sum(zeros.end - zeros.start for zeros in self.zeros),
            "gaps": sum(gap.end - gap.start for gap in self.gaps),
        }


def group_file(file: PlainFile, *, split: KeyRule = split_name, pieces: Iterable[Piece] | None = None) -> Survey:
    """Return the survey of an open shard from its headers; its samples are not judged.

    *pieces* are those of ``walk(file)``, if it was called before. A sample takes about 500 bytes of memory.
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


def survey_file(file: PlainFile, *, split: KeyRule = split_name) -> Survey:
    """Survey an open shard: the offsets of its samples, which of them are whole, and its damage.

    Only headers are read.
    """
    found = group_file(file, split=split)
    judge(found.samples, found.gaps, file)
    return found


def read_resyncing(
    shard: Shard,
    location: Location,
    *,
    ledger: Ledger,
    split: KeyRule = split_name,
    expected: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the whole samples of *shard*, read at *location*; *ledger* gets an error for gaps and other samples.

    Members after the end of an archive are delivered; unless the shard is concatenated, that end is a gap. *expected*
    is the number of samples that a manifest gives.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_plain(shard, location))
        except TarshardsError as error:
            ledger(error)
            ledger.report()
            return
        delivered = fields = 0
        try:
            found = survey_file(file, split=split)
            for reason in found.skipped.elements():
                ledger.skip(reason)
            for item in found.items:
                if isinstance(item, Zeros) and shard.concatenated:
                    ledger.count(joined=1)
                    continue
                if not isinstance(item, FoundSample) or item.problem is not None:
                    ledger(explain(found.url, item))
                    continue
                sample = read_found(file, item)
                delivered += 1
                fields += len(sample) - 2
                tell_of_dots([sample], found.url, split, ledger)
                yield sample
            if file.error is not None:
                ledger(file.error)
            elif expected not in (None, len(found.samples)) and not found.gaps:
                ledger(wrong_number(len(found.samples), expected, found.url))
            ledger.count(shards=1)
        except GeneratorExit:
            ledger.count(broken_off=1)
            raise
        finally:
            ledger.count(samples=delivered, streamed=delivered, members=fields)
            ledger.report()


def explain(url: str, item: Gap | Zeros | FoundSample) -> TarError | SampleError:
    """Return the error for a gap, the end of an archive before another one, or a sample not known to be whole."""
    if isinstance(item, Zeros):
        remedy = "`--ignore-zeros` (concatenated=True) reads them as one"
        return TarError(f"{ENDED}; {remedy}", url=url, offset=item.start)
    if isinstance(item, Gap):
        skipped = f"; {item.end - item.start} bytes skipped" if item.end > item.start else ""
        return TarError(f"{item.reason}{skipped}", url=url, offset=item.start)
    is_of_member = item.wrong and str(item.problem).startswith((DUPLICATE_FIELD, INCOMPLETE))
    field, offset = item.wrong if item.wrong and is_of_member else (None, item.offset)
    return SampleError(with_remedy(str(item.problem)), url=url, offset=offset, key=item.key, field=field)


def read_found(file: PlainFile, found: FoundSample) -> dict[str, Any]:
    """Read a sample that was found in *file*; raise OpenError if the file has become shorter."""
    sample: dict[str, Any] = {"__key__": found.key, "__url__": file.name}
    for number, (name, _, _) in enumerate(found.members):
        sample[name] = read_member(file, found, number)
    return sample


def read_member(file: PlainFile, found: FoundSample, number: int) -> bytes:
    """Read a member of a sample that was found in *file*, by its number; raise OpenError if the file has changed."""
    field, start, end = found.members[number]
    reason = "changed while it was read"
    try:
        if number in found.elsewhere:
            return SpecialMembers(file.read, bomb=file.bomb).read(found.elsewhere[number])
        if len(data := file.read(start, end - start)) == end - start:
            return data
    except UnresolvedError as error:
        reason += f": {error}"
    raise OpenError(reason, url=file.name, offset=start, key=found.key, field=field)
