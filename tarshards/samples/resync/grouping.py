"""Pieces of a shard -> its samples, as the headers show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tarshards.samples.keys import DUPLICATE_FIELD, INCOMPLETE, KeyRule, split_name, why_skipped
from tarshards.samples.resync.walking import GLOBAL, Gap, Piece, Zeros, names_in
from tarshards.storage.plain import PlainFile
from tarshards.tar.elsewhere import SpecialMembers, Step, UnresolvedError
from tarshards.tar.read import BLOCK, has_content, padding

SHORTEST_CUT = 99  # bytes of a name that may be a truncated longer one


@dataclass(slots=True)
class FoundSample:
    """Adjacent members of one key: (field, start, end) of the data of each.

    *offset* is that of the first header, *size* all bytes of the members with headers and padding. *problem* says why
    the sample does not count as whole, None if it does. *wrong* is the field of the first member at fault, a duplicate
    or one without content, and the offset of its header. *elsewhere* has the steps to the content of links and sparse
    members, by their numbers. *beside*: a gap or an end of archive is before, in or after it.
    """

    key: str
    offset: int
    segment: int
    beside: bool
    members: list[tuple[str, int, int]] = field(default_factory=list)
    size: int = 0
    problem: str | None = None
    wrong: tuple[str, int] | None = None
    elsewhere: dict[int, list[Step]] = field(default_factory=dict)
    extended: bool = False  # a member has a pax or GNU long name header
    unsure: bool = False  # the name of the first member may be truncated, if its extended header is lost
    before: Gap | Zeros | None = None  # the piece before it, except samples, and the one after it
    behind: Gap | Zeros | None = None
    inside: bool = False
    breaks: list[tuple[int, Gap | Zeros]] = field(default_factory=list)  # pieces right after a member, by its number

    @property
    def fields(self) -> frozenset[str]:
        """The names of the fields."""
        return frozenset(name for name, _, _ in self.members)

    def content_size(self, number: int) -> int:
        """Return the bytes of the content of a member, by its number."""
        _, start, end = self.members[number]
        return self.elsewhere[number][-1].size if number in self.elsewhere else end - start


def group_found(
    pieces: Iterable[Piece],
    file: PlainFile,
    *,
    split: KeyRule = split_name,
    skip: Callable[[str], object] = lambda reason: None,
) -> Iterator[FoundSample | Gap | Zeros]:
    """Yield the samples in *pieces* of *file*, the gaps and zeros; call *skip* with a reason for members in no sample.

    A sample continues after a gap if its key does. It is yielded when complete, and so after a gap within it.
    """
    contents = SpecialMembers(file.read, names=lambda: names_in(file))
    sample: FoundSample | None = None
    segment = 0  # counts the gaps and zeros so far
    after_gap = after_zeros = False  # no member of a sample since
    last: Gap | Zeros | None = None
    taken: set[str] = set()  # names that no further member of the sample may have as its field
    for piece in pieces:
        if not isinstance(piece, list):
            segment += 1
            last = piece
            if sample is not None:
                sample.behind = sample.behind or (piece if isinstance(piece, Gap) else None)
                sample.beside = sample.beside or isinstance(piece, Gap)
                _, start, end = sample.members[-1]
                if start < end and end + padding(end - start) == piece.start:
                    sample.breaks.append((len(sample.members) - 1, piece))
            after_gap = after_gap or isinstance(piece, Gap)
            after_zeros = after_zeros or isinstance(piece, Zeros)
            yield piece
            continue
        if sample is not None and after_zeros:
            sample.beside = True
            sample.behind = sample.behind or last
        for name, header, start, end, kind in piece:
            parts = split(name) if not kind or has_content(kind) else None
            steps, unresolved = None, None
            if kind and parts is not None:
                try:
                    steps = contents.find(header, whole=True)
                except UnresolvedError as error:
                    unresolved = f"{INCOMPLETE}: {error}"
            if parts is None or steps == []:
                if kind != GLOBAL:
                    skip(why_skipped(name, kind))
                continue
            beside = after_gap or after_zeros
            if sample is not None and sample.behind is not None and parts[0] == sample.key:
                sample.inside, sample.behind = True, None
            if sample is None or parts[0] != sample.key:
                before = last if beside else None
                if sample is not None:
                    if sample.unsure and len(sample.members) == 1:  # its member may belong to the new sample
                        before = before or sample.before
                    yield sample
                taken = {"__key__", "__url__"}
                sample = FoundSample(parts[0], header, segment, before is not None, before=before)
                sample.unsure = (after_gap or after_zeros) and start - header == BLOCK and _may_be_cut(name)
            known = parts[1] in taken
            taken.add(parts[1])
            if (known or unresolved) and sample.problem is None:
                sample.problem, sample.wrong = unresolved or DUPLICATE_FIELD, (parts[1], header)
            if steps:
                sample.elsewhere[len(sample.members)] = steps
            after_gap = after_zeros = False
            sample.members.append((parts[1], start, end))
            sample.size += end + padding(end - start) - header
            sample.extended = sample.extended or start - header > BLOCK
    if sample is not None:
        yield sample


def _may_be_cut(name: str) -> bool:
    """Say whether *name* may replace another name, given by an extended header before it."""
    return len(name) >= SHORTEST_CUT or not name.isascii() or "?" in name
