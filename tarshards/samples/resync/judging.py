"""Which samples of a damaged shard are whole.

A tar does not record which members a sample has, so next to damage the other samples decide: a sample next to a gap is
whole if another sample, away from all damage, has the same fields, and no sample has these and more fields.
"""

from __future__ import annotations

import re
from collections import defaultdict

from tarshards.samples.keys import why_refused
from tarshards.samples.resync.walking import FoundSample, Gap, Zeros, checksum_error, sizes_in
from tarshards.storage.opening import PlainFile
from tarshards.tar.read import BLOCK, padding

ENOUGH = 4  # bytes of padding that damage is unlikely to leave zero
SOME = 16  # samples examined for the end of their data
MOST_KINDS = 1 << 10  # different sets of fields, which are compared with each other
MAY_LACK = "next to damage: it may lack members"
UNLIKE = "unlike the samples elsewhere: it may belong to a tar that was a member"
RUNS_INTO = "next to damage that may reach into its data"

FieldSet = frozenset[str]


def judge(samples: list[FoundSample], gaps: list[Gap], file: PlainFile) -> None:
    """Set the ``problem`` of each sample that does not count as whole."""
    extended = any(sample.extended for sample in samples)
    fields_of: dict[str, set[FieldSet]] = defaultdict(set)
    for sample in samples:
        fields_of[sample.key].add(sample.fields)
    torn = {key for key, sets in fields_of.items() if len(sets) > 1}
    for sample in samples:
        if sample.problem is None and sample.beside:
            sample.problem = _damage_of(sample, file, extended)
    sound = [sample for sample in samples if not sample.problem and not (sample.beside or sample.key in torn)]
    names = frozenset(name for sample in samples for name, _, _ in sample.members)
    bounded = {
        id(sample)
        for sample in samples
        if not sample.problem and sample.beside and sample.key not in torn and _is_bounded(sample, file, names)
    }
    full = _full_ones(_judge_segments(samples, sound, bounded, gaps))
    ends = _ends_by_field(sound)
    seen: set[str] = set()
    for sample in samples:
        in_doubt = id(sample) not in bounded and (sample.beside or sample.key in torn)
        if sample.problem is None and in_doubt and sample.fields not in full:
            sample.problem = MAY_LACK
        if sample.problem is None and _ends_in_hole(sample, ends, file):
            sample.problem = RUNS_INTO
        if sample.key in seen or (sample.problem and sample.key in torn):
            sample.problem = why_refused(None)
        if sample.problem is None:
            seen.add(sample.key)


def _full_ones(known: set[FieldSet]) -> set[FieldSet]:
    """Return the sets of fields to which no *known* set adds others; none if there are too many sets to compare."""
    if len(known) > MOST_KINDS:
        return set()
    return {fields for fields in known if not any(fields < others for others in known)}


def _judge_segments(
    samples: list[FoundSample], sound: list[FoundSample], bounded: set[int], gaps: list[Gap]
) -> set[FieldSet]:
    """Return the sets of fields of whole samples; refuse samples that may belong to a member's data.

    A tar that is a member, and whose own header is missing, looks like other members after a gap. So the samples up to
    the next gap or zeros are accepted only if one of them has fields that occur elsewhere: before the first gap, or, if
    there is nothing before it, in the shard's last members.
    """
    first = min((gap.start for gap in gaps), default=float("inf"))
    last = max((sample.segment for sample in samples), default=0)
    sure = sound + [sample for sample in samples if id(sample) in bounded]
    known = {sample.fields for sample in sure if sample.offset < first}
    known = known or {sample.fields for sample in sound if sample.segment == last}
    known = known or {sample.fields for sample in sure}
    like = {sample.segment for sample in samples if sample.fields in known}
    for sample in samples:
        if sample.offset > first and sample.segment not in like and not sample.problem:
            sample.problem = MAY_LACK if sample.beside else UNLIKE
    return known | {sample.fields for sample in sure if sample.problem is None}


def _damage_of(sample: FoundSample, file: PlainFile, extended: bool) -> str | None:
    """Return the effect of damage before or after a sample, as far as its own and the damaged bytes show it."""
    if extended and sample.unsure and len(sample.members) == 1:
        return "next to damage: its name may be truncated"
    if any(_is_of(sample, piece, file, frozenset()) for piece in (sample.before, sample.behind) if piece is not None):
        return "next to damage: it lacks a member"
    for number, piece in sample.breaks:
        if isinstance(piece, Gap) and _runs_into(file, sample.members[number][2], piece):
            return RUNS_INTO
    return None


def _ends_by_field(samples: list[FoundSample]) -> dict[str, list[int]]:
    """Return where the data of the first SOME members of each field ends."""
    ends: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        for name, start, end in sample.members:
            if start < end and len(ends[name]) < SOME:
                ends[name].append(end)
    return ends


def _ends_in_hole(sample: FoundSample, ends: dict[str, list[int]], file: PlainFile) -> bool:
    """Return whether zeros that look like an end of archive may begin in the data before them.

    Not if the field ends in a zero byte in other samples, too, whose *ends* are given by field.
    """
    for number, piece in sample.breaks:
        name, _, end = sample.members[number]
        if isinstance(piece, Zeros) and sample.beside and _last_byte(file, end) == 0:
            return not any(_last_byte(file, other) == 0 for other in ends.get(name, ()))
    return False


def _is_bounded(sample: FoundSample, file: PlainFile, names: FieldSet) -> bool:
    """Return whether the damaged headers before and after a sample belong to other samples: it lacks no member."""
    ends = [_is_of(sample, piece, file, names) for piece in (sample.before, sample.behind) if piece is not None]
    if not ends or None in ends or sample.inside or sample.unsure:
        return False
    return sample.before is None or _is_one_member(sample.before, file)


def _is_of(sample: FoundSample, piece: Gap | Zeros, file: PlainFile, names: FieldSet) -> bool | None:
    """Return whether the first, damaged member in *piece* belongs to *sample*; None if its header does not show it.

    It belongs to another if its name differs, its field is one of *names*, and the checksum shows that the key is
    unchanged.
    """
    header = file.read(piece.start, BLOCK)
    if isinstance(piece, Zeros) or piece.start == piece.end or not _is_plain(header):
        return None
    wanted = f"{sample.key}.".encode("utf-8", "surrogateescape")
    name = header[:100].partition(b"\0")[0]
    field = name.partition(b".")[2].decode(errors="replace").lower()
    wrong = [(right, there) for right, there in zip(wanted, name.ljust(len(wanted), b"\0")) if right != there]
    if not wrong:
        return None if field in sample.fields else True
    if len(header) == BLOCK:
        error = checksum_error(header)
        if error is None or error == sum(right - there for right, there in wrong):
            return None
        if any(there < 0x20 and not 0x20 < there + error < 0x7F for _, there in wrong):
            return None  # both the name and something else are damaged
    return False if field in names else None


def _is_one_member(piece: Gap | Zeros, file: PlainFile) -> bool:
    """Return whether *piece* is as long as the member of its first header."""
    sizes = sizes_in(file.read(piece.start, BLOCK))
    return any(piece.end - piece.start == BLOCK + size + padding(size) for size in sizes)


def _is_plain(header: bytes) -> bool:
    """Return whether *header*, damaged or unreadable, contains the whole name of a file."""
    kind, prefix = header[156:157], header[345:346]
    is_extended = b"@LongLink" in header or b"PaxHeader" in header or prefix not in (b"", b"\0")
    mode = re.match(rb"[0-7 ]+[\0 ]", header[100:108])
    name = header[:100]
    is_file = kind in (b"", b"\0", b"0", b"7") or checksum_error(header) == 0
    return is_file and not is_extended and mode is not None and b"." in name and _is_name(name)


def _last_byte(file: PlainFile, end: int) -> int:
    return file.read(end - 1, 1)[0]


def _runs_into(file: PlainFile, end: int, gap: Gap) -> bool:
    """Return whether the damage in *gap* may begin before it, in the data that ends at *end*.

    Damage to both the data and the next header also affects the padding between them, and the beginning of the name in
    the header; if that is now zero, the data also ends in zeros.
    """
    if gap.start == gap.end or gap.reason.startswith("truncated"):
        return False
    name = file.read(gap.start, 100)
    between = file.read(end, gap.start - end)
    if any(between):
        return True
    if name[:1] == b"\0" and _last_byte(file, end) == 0:
        return True
    return len(between) < ENOUGH and any(name) and not _is_name(name)


def _is_name(data: bytes) -> bool:
    """Return whether *data* is a name padded with zeros, with at most one wrong byte."""
    name, _, rest = data.partition(b"\0")
    odd = sum(not character.isprintable() or character == "\ufffd" for character in name.decode(errors="replace"))
    return len(name) < 100 and odd + len(rest) - rest.count(0) <= 1
