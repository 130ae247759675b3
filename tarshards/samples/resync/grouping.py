"""Pieces of a shard -> its samples, as the headers show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tarshards.samples.keys import is_reserved, split_name
from tarshards.samples.resync.walking import GLOBAL, Gap, Piece, Zeros
from tarshards.tar.read import BLOCK, padding

KeyRule = Callable[[str], tuple[str, str] | None]
SHORTEST_CUT = 99  # bytes of a name that may be a longer one cut short


@dataclass(slots=True)
class FoundSample:
    """Members of one key that stand next to each other: (field, start, end) of the data of each.

    *offset* is that of the first header, *size* all bytes of the members with headers and padding. *problem* is why it
    cannot be taken for whole, None if it can. *beside*: a gap or the end of an archive stands before, in or after it.
    """

    key: str
    offset: int
    segment: int
    beside: bool
    members: list[tuple[str, int, int]] = field(default_factory=list)
    size: int = 0
    problem: str | None = None
    extended: bool = False  # a member has a pax or GNU long name header
    unsure: bool = False  # the name of the first member may be cut short, its extended header being lost
    before: Gap | Zeros | None = None  # what stands before it, other samples apart, and behind it
    behind: Gap | Zeros | None = None
    inside: bool = False
    breaks: list[tuple[int, Gap | Zeros]] = field(default_factory=list)  # those right behind a member, by its number

    @property
    def fields(self) -> frozenset[str]:
        """The names of the fields."""
        return frozenset(name for name, _, _ in self.members)


def group_found(
    pieces: Iterable[Piece], *, split: KeyRule = split_name, skip: Callable[[str], object] = lambda reason: None
) -> Iterator[FoundSample | Gap | Zeros]:
    """Yield the samples that *pieces* hold, gaps and zeros between them; *skip* is told of members that are in none.

    A sample goes on behind a gap where its key does. It comes when it is finished, and so after a gap inside of it.
    """
    sample: FoundSample | None = None
    segment = 0  # pieces between gaps and zeros
    after_gap = after_zeros = False  # nothing of a sample came since
    last: Gap | Zeros | None = None
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
            parts = None if kind else split(name)
            if parts is None:
                if kind != GLOBAL:
                    skip(kind or ("reserved name" if is_reserved(name) else "no extension"))
                continue
            beside = after_gap or after_zeros
            if sample is not None and sample.behind is not None and parts[0] == sample.key:
                sample.inside, sample.behind = True, None
            if sample is None or parts[0] != sample.key:
                before = last if beside else None
                if sample is not None:
                    if sample.unsure and len(sample.members) == 1:  # it may belong to what comes now
                        before = before or sample.before
                    yield sample
                sample = FoundSample(parts[0], header, segment, before is not None, before=before)
                sample.unsure = (after_gap or after_zeros) and start - header == BLOCK and _may_be_cut(name)
            elif any(parts[1] == known for known, _, _ in sample.members):
                sample.problem = "this field comes twice"
            if parts[1] in ("__key__", "__url__"):
                sample.problem = "this field comes twice"
            after_gap = after_zeros = False
            sample.members.append((parts[1], start, end))
            sample.size += end + padding(end - start) - header
            sample.extended = sample.extended or start - header > BLOCK
    if sample is not None:
        yield sample


def _may_be_cut(name: str) -> bool:
    """Say whether *name* may stand in for another one, which an extended header before it would tell."""
    return len(name) >= SHORTEST_CUT or not name.isascii() or "?" in name
