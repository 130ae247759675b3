"""All bytes of a damaged shard in pieces (members, zeros between them, gaps), and the samples that they form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tarshards.kernels._tar_py import ELSEWHERE, READS, bytes_ahead
from tarshards.samples.keys import NO_FIELDS, KeyRule, split_name, why_refused, why_skipped
from tarshards.storage.opening import PlainFile
from tarshards.storage.streams import PIECE
from tarshards.tar.elsewhere import SpecialMembers, Step, UnresolvedError, member_at
from tarshards.tar.read import (
    BLOCK,
    END,
    JUNK,
    MEMBER_LIMIT,
    NO_END,
    RECORD,
    most_end,
    not_an_archive,
    padding,
    scan,
    scan_through,
)

if TYPE_CHECKING:
    from tarshards.kernels._tar_py import ScannedMember

LONGEST_HEADER = 1 << 16  # bytes of an extended header with which reading resumes
LONGEST = 1 << 26  # bytes within which a chain of headers is followed to recognize a tar that is a member
RECORDS = [RECORD, *(1 << power for power in range(14, 21))]  # common values of ``tar -b``
SMALL_RECORDS = [1 << power for power in range(11, 14)]
GLOBAL = "global header"
NOT_READ = "the rest of the shard could not be read"
OVERWRITTEN = "zeros instead of members"


class Gap(NamedTuple):
    """Bytes from *start* to *end* that are not valid members, and why; empty at the end of a truncated shard."""

    start: int
    end: int
    reason: str


class Zeros(NamedTuple):
    """Blocks of zeros that end an archive, the last in the shard or one followed by others."""

    start: int
    end: int


#: Members are as ``scan`` returns them, at their offsets in the shard; global pax headers have the kind GLOBAL.
Piece: TypeAlias = "list[ScannedMember] | Zeros | Gap"


def after(member: ScannedMember) -> int:
    """Return the offset where the padding of *member* ends."""
    _, _, start, end, _ = member
    return end + padding(end - start)


def walk(file: PlainFile) -> Iterator[Piece]:
    """Yield the pieces of a shard, in order; each begins where the previous one ends.

    Only headers are read if members are large. After damage, reading resumes at the next header that is followed by
    another header or by the end. Zeros that cannot be an archive's end by their length are a gap; between two archives,
    more lengths are possible if the shard is ``concatenated``. No zeros at the end are also a gap, unless its ``end``
    is "optional".
    """
    begin = 0
    run: list[Zeros | Gap] = []
    for piece in _pieces(file):
        if isinstance(piece, Zeros) and run and isinstance(run[-1], Zeros):
            run[-1] = Zeros(run[-1].start, piece.end)
            continue
        if not isinstance(piece, list):
            run.append(piece)
            continue
        for resolved in _resolve(run, begin, file):
            begin = resolved.end if isinstance(resolved, Zeros) else begin
            yield resolved
        run = []
        yield piece
    yield from _resolve(run, begin, file)


def names_in(file: PlainFile) -> Iterator[tuple[str, int]]:
    """Yield the name of each member of a shard, valid or damaged, and the offset of its first header."""
    for piece in walk(file):
        if isinstance(piece, list):
            yield from ((name, header) for name, header, _, _, kind in piece if kind != GLOBAL)


def _resolve(run: list[Zeros | Gap], begin: int, file: PlainFile) -> Iterator[Zeros | Gap]:
    """Distinguish, in the *run* of pieces between two members, zeros that end an archive from damage."""
    if not run:
        return
    lead, tail = run[0], run[-1]
    gaps = [piece for piece in run if isinstance(piece, Gap)]
    if isinstance(lead, Zeros) and not gaps:
        yield lead if is_end(lead, begin, file) else Gap(*lead, OVERWRITTEN)
        return
    start, end = lead.start, tail.end
    if isinstance(lead, Zeros) and end == file.size and is_end(lead, begin, file):
        yield lead
        start = lead.end
    reason = OVERWRITTEN if isinstance(lead, Zeros) and start == lead.start else gaps[0].reason
    if isinstance(tail, Zeros) and end == file.size and is_end(tail, begin, file):
        yield Gap(start, tail.start, reason)
        yield tail
    else:
        yield Gap(start, end, reason)


def is_end(zeros: Zeros, begin: int, file: PlainFile) -> bool:
    """Return whether *zeros* may end an archive that begins at *begin*: two blocks, or enough to complete a record.

    If archives are ``concatenated``, records of more sizes are recognized.
    """
    length = zeros.end - zeros.start
    if length == file.size == RECORD:
        return True  # an archive without members
    if length // BLOCK == 2 or (length // BLOCK == 1 and zeros.end == file.size):
        return True
    if length == file.size or (length > most_end(file.size) and not file.shard.concatenated):
        return False
    records = RECORDS if file.shard.concatenated or zeros.end == file.size else [RECORD]
    if file.shard.concatenated:
        records = records + SMALL_RECORDS
    return any(len(END) <= length < len(END) + record and (zeros.end - begin) % record == 0 for record in records)


def _pieces(file: PlainFile) -> Iterator[Piece]:
    size = file.size
    position = zeros_before = 0
    ahead = READS[0]
    runs: list[tuple[int, int]] = []
    while position < size:
        buffer = file.read(position, ahead)
        found, length, need, zeros_before, problem = scan_through(buffer, zeros_before, MEMBER_LIMIT)
        at = 0
        members: list[ScannedMember] = []
        for name, header, start, end, kind in found:
            if header > at:
                if members:
                    yield members
                    members = []
                yield from _between(buffer[at:header], position + at)
            if position + end > size:
                if members:
                    yield members
                yield Gap(position + header, size, _cut(file, "truncated in this member"))
                return
            members.append((name, position + header, position + start, position + end, kind))
            at = end + padding(end - start)
        if members:
            yield members
        if problem:
            bad = position + length
            if zeros := _zeros_at_start(buffer[at:length]):
                yield Zeros(position + at, position + at + zeros)
                at += zeros
            resumed = _resume(file, bad, runs)
            nothing = position + at == 0 and resumed == size
            yield Gap(position + at, resumed, not_an_archive(buffer, file.name) if nothing else problem)
            if resumed == size:
                return
            position, zeros_before, ahead = resumed, 0, READS[0]
            continue
        if length > at:
            yield from _between(buffer[at:length], position + at)
        position += length
        if position + need > size:
            break
        ahead = bytes_ahead(READS, ahead, len(found), length, need)
    yield from _end(file, position, zeros_before > 0)


def _end(file: PlainFile, position: int, ended: bool) -> Iterator[Piece]:
    """Yield the last pieces of a shard, after the last whole one; an end that ``read_members`` refuses is a gap."""
    rest = file.read(position, BLOCK) if ended else b""
    if not file.size:
        yield Gap(0, 0, "empty input, not a tar archive")
    elif file.size < BLOCK:
        yield Gap(0, file.size, not_an_archive(file.read(0, BLOCK), file.name))
    elif ended and any(rest):
        yield Gap(position, file.size, JUNK)
    elif ended and rest:
        yield Zeros(position, file.size)
    elif not ended and position < file.size:
        yield Gap(position, file.size, _cut(file, "truncated in a header or its padding"))
    elif not ended and file.shard.end == "required":
        yield Gap(file.size, file.size, _cut(file, NO_END))


def _cut(file: PlainFile, reason: str) -> str:
    """Return why a file ends too early: *reason*, or that it is a copy which an error ended."""
    return reason if file.error is None else NOT_READ


def _between(data: bytes, offset: int) -> Iterator[Piece]:
    """Yield the pieces before a member: zeros, and global headers."""
    front = _zeros_at_start(data)
    back = max(front, -(-len(data.rstrip(b"\0")) // BLOCK) * BLOCK)
    if front:
        yield Zeros(offset, offset + front)
    if back > front:
        yield [("", offset + front, offset + back, offset + back, GLOBAL)]
    if len(data) > back:
        yield Zeros(offset + back, offset + len(data))


def _zeros_at_start(data: bytes) -> int:
    """Return the size, in bytes, of the blocks of zeros at the beginning of *data*."""
    return (len(data) - len(data.lstrip(b"\0"))) // BLOCK * BLOCK


def _resume(file: PlainFile, bad: int, runs: list[tuple[int, int]]) -> int:
    """Return the offset of the next valid member, or of the end, after the block at *bad*, which is not a header.

    *runs* are those of ``_after_zeros``.
    """
    block = file.read(bad, BLOCK)
    offsets = sorted({bad + BLOCK + size + padding(size) for size in sizes_in(block)})
    offsets = [offset for offset in offsets if offset == file.size or _is_sound(file, offset, runs)]
    for offset in offsets[1:]:
        if offset - offsets[0] <= LONGEST and _is_archive(file, offsets[0], offset):
            return offset  # the member's data is a tar, to which the earlier offsets belong
    if offsets:
        return offsets[0]
    for offset in _search(file, bad):
        if _is_sound(file, offset, runs):
            return offset
    last = file.size - len(END)
    return last if last > bad and file.read(last, len(END)) == END else file.size


def sizes_in(block: bytes) -> Iterator[int]:
    """Yield possible sizes from a damaged header: unchanged, and with one digit corrected by the checksum."""
    digits = block[124:135]
    wrong = checksum_error(block) or 0
    with suppress(ValueError):
        yield int(digits.strip(b" \0"), 8)
    for i, digit in enumerate(digits if wrong else b""):
        if 0x30 <= digit + wrong < 0x38:
            with suppress(ValueError):
                yield int((digits[:i] + bytes([digit + wrong]) + digits[i + 1 :]).strip(b" \0"), 8)


def checksum_error(block: bytes) -> int | None:
    """Return the checksum of a header minus the sum of its bytes; None if the checksum is not a number."""
    try:
        return int(block[148:156].strip(b" \0"), 8) - sum(block[:148]) - 8 * 0x20 - sum(block[156:])
    except ValueError:
        return None


def _is_archive(file: PlainFile, start: int, end: int) -> bool:
    """Return whether an archive begins at *start* and ends in zeros at *end*, where a member of another one begins."""
    if file.read(end - len(END), len(END)) != END or member_at(file.read, end) is None:
        return False
    data = file.read(start, end - start)
    found, *_ = scan(data, 0, 0, MEMBER_LIMIT)
    position = 0
    for member in found:
        if member[1] != position:
            break
        position = after(member)
    return position < len(data) and not any(data[position:])


def _search(file: PlainFile, bad: int) -> Iterator[int]:
    """Yield the offsets after *bad* of blocks that are headers by their checksum.

    These are multiples of 512 bytes from *bad*, or, if bytes are missing, any offsets indicated by the word ustar.
    """
    for base in range(bad, file.size, PIECE):
        data = file.read(base, PIECE + BLOCK)
        offsets = {at for at in range(0, min(PIECE, len(data) - BLOCK + 1), BLOCK) if data[at]}
        at = data.find(b"ustar")
        while at >= 0:
            if 257 <= at < PIECE + 257:
                offsets.add(at - 257)
            at = data.find(b"ustar", at + 1)
        for at in sorted(offsets):
            if (base > bad or at) and _is_header(data[at : at + BLOCK]):
                yield base + at


def _is_header(block: bytes) -> bool:
    found, _, need, _, problem = scan(block, 0, 0, MEMBER_LIMIT)
    return problem is None and len(block) == BLOCK and (bool(found) or BLOCK < need <= LONGEST_HEADER)


def _is_damaged_header(block: bytes) -> bool:
    return block[0] != 0 and sum(map(int.__eq__, block[257:262], b"ustar")) > 3


def _is_sound(file: PlainFile, offset: int, runs: list[tuple[int, int]]) -> bool:
    """Return whether a member at *offset* is followed by another, even a damaged one, or by the end of the shard.

    A single header is not enough: a block of data may look like one.
    """
    member = member_at(file.read, offset)
    if member is None:
        return _after_zeros(file, offset, runs) == file.size > offset
    following = offset + after(member)
    if following >= file.size:
        return offset + member[3] <= file.size
    if member_at(file.read, following) is not None or _is_damaged_header(file.read(following, BLOCK)):
        return True
    beyond = _after_zeros(file, following, runs)
    return beyond > following and (beyond == file.size or member_at(file.read, beyond) is not None)


def _after_zeros(file: PlainFile, offset: int, runs: list[tuple[int, int]]) -> int:
    """Return the offset where the blocks of zeros at *offset* end.

    *runs* are the beginnings and ends of zeros that were found, ascending: they are read once.
    """
    at, end, ahead = bisect_right(runs, (offset, file.size)), offset, READS[0]
    if at and offset < runs[at - 1][1]:
        end = runs[at - 1][1]
    else:
        while data := file.read(end, min(ahead, runs[at][0] - end) if at < len(runs) else ahead):
            zeros = len(data) - len(data.lstrip(b"\0"))
            end, ahead = end + zeros, min(2 * ahead, READS[1])
            if zeros < len(data):
                break
            if at < len(runs) and end == runs[at][0]:
                end = runs.pop(at)[1]
                break
        if end > offset:
            runs.insert(at, (offset, end))
    return end if end == file.size else offset + (end - offset) // BLOCK * BLOCK


SHORTEST_CUT = 99  # bytes of a name that may be a truncated longer one


@dataclass(slots=True)
class FoundSample:
    """Adjacent members of one key: (field, start, end) of the data of each.

    *offset* is that of the first header, *size* all bytes of the members with headers and padding. *problem* says why
    the sample does not count as whole, None if it does. *wrong* is the field of the first faulty member, a duplicate or
    one without content, and the offset of its header. *elsewhere* has the steps to the content of links and sparse
    members, by their numbers. *beside* says whether a gap or an end of archive is before, in or after it.
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
    unsure: bool = False  # the name of the first member may be truncated, if its extended header is missing
    before: Gap | Zeros | None = None  # the gap or zeros before it, and those after it
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
    """Yield the samples, gaps and zeros in *pieces* of *file*; call *skip* with a reason for members in no sample.

    A sample continues after a gap if its key does. It is yielded when complete, hence after a gap within it.
    """
    contents = SpecialMembers(file.read, names=lambda: names_in(file), bomb=file.bomb)
    sample: FoundSample | None = None
    segment = 0  # counts the gaps and zeros so far
    after_gap = after_zeros = False  # whether one came after the last member of a sample
    last: Gap | Zeros | None = None
    taken: set[str] = set()  # fields that no further member of the sample may have
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
            parts = split(name) if not kind or kind in ELSEWHERE else None
            steps: list[Step] | None = None
            unresolved: UnresolvedError | str | None = None
            if not kind:
                unresolved = file.bomb(end - start, end - start)
            elif parts is not None:
                try:
                    steps = contents.find(header, whole=True)
                except UnresolvedError as error:
                    unresolved = error
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
                    if sample.unsure and len(sample.members) == 1:  # its only member may belong to the new sample
                        before = before or sample.before
                    yield sample
                taken = set(NO_FIELDS)
                sample = FoundSample(parts[0], header, segment, before is not None, before=before)
                sample.unsure = (after_gap or after_zeros) and start - header == BLOCK and _may_be_cut(name)
            known = parts[1] in taken
            taken.add(parts[1])
            if (known or unresolved) and sample.problem is None:
                sample.problem, sample.wrong = why_refused(parts[1], unresolved), (parts[1], header)
            if steps:
                sample.elsewhere[len(sample.members)] = steps
            after_gap = after_zeros = False
            sample.members.append((parts[1], start, end))
            sample.size += end + padding(end - start) - header
            sample.extended = sample.extended or start - header > BLOCK
    if sample is not None:
        yield sample


def _may_be_cut(name: str) -> bool:
    """Return whether *name* may replace another name, given by an extended header before it."""
    return len(name) >= SHORTEST_CUT or not name.isascii() or "?" in name
