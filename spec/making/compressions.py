"""Cases of compressed archives: frames, members, checks, what may be skipped, and damage."""

from __future__ import annotations

import base64
import bz2

from making.case import AB, PLAIN, SA, SB, A, B, bad, case, good, s
from making.pieces import (
    END,
    changed,
    flipped,
    gzip,
    link,
    lz4,
    member,
    skippable,
    symlink,
    xz,
    zstd,
    zstd_block,
)

#: PLAIN by `xz --format=lzma`: the only format here that cannot store data without compressing them.
LZMA_ALONE = (
    "XQAAgAD//////////wAwi4qHxA7yl6T4dT3FqwGN23TikqhQcE/tLk9CCVhXu6WHxi+ELJ8503Q5Eb6Xu+DcrGNV9E8PDlg5/YEqAMbyP33ZeCDw"
    "LjtfPAEXYw1NhwG1X+p3npqeO3fia1b/WFTAY9tmEKbnxQ7Q6ow9jGvpQESStCV2kdmS//8WGz4A"
)


def compressions() -> None:
    def add(name, why, archive, *outcomes, read="a.tar"):
        case("compression", name, why, archive, *outcomes, read=read)

    both = good(SA, SB)
    broken = bad("compression", SA)
    late = bad("compression", SA, SB)
    add("gzip", "A gzip member of stored blocks.", gzip(PLAIN), SA, SB, read="a.tar.gz")
    add(
        "gzip-by-content",
        "The first bytes tell the compression, not the suffix.",
        gzip(PLAIN),
        both,
        bad("archive"),
    )
    add(
        "gzip-suffix-of-plain",
        "A plain archive with the suffix of gzip is still one.",
        PLAIN,
        both,
        bad("compression"),
        read="a.tar.gz",
    )
    add("gzip-tgz", "The suffix .tgz.", gzip(PLAIN), SA, SB, read="a.tgz")
    add(
        "gzip-name",
        "The header of gzip may have the name of the file.",
        gzip(PLAIN, flags=8, extra=b"a.tar\0"),
        SA,
        SB,
        read="a.tar.gz",
    )
    add(
        "gzip-comment",
        "The header of gzip may have name and comment.",
        gzip(PLAIN, flags=24, extra=b"a.tar\0words\0"),
        SA,
        SB,
        read="a.tar.gz",
    )
    add(
        "gzip-extra",
        "The header of gzip may have an extra field, as bgzip and dictzip write.",
        gzip(PLAIN, flags=4, extra=b"\6\0BC\2\0\0\0"),
        SA,
        SB,
        read="a.tar.gz",
    )
    add(
        "gzip-members",
        "gzip -c a b and pigz -i write several members: all are the data.",
        gzip(PLAIN[:1000]) + gzip(PLAIN[1000:]),
        SA,
        SB,
        read="a.tar.gz",
    )
    add(
        "gzip-member-a-sample",
        "A member for each sample, with the end in the last.",
        gzip(A) + gzip(B) + gzip(END),
        SA,
        SB,
        read="a.tar.gz",
    )
    add(
        "gzip-empty-member",
        "A member of no bytes, as bgzip writes at the end.",
        gzip(PLAIN) + gzip(b""),
        SA,
        SB,
        read="a.tar.gz",
    )
    add("gzip-empty-first", "A member of no bytes may be the first.", gzip(b"") + gzip(PLAIN), SA, SB, read="a.tar.gz")
    add(
        "gzip-zeros-after",
        "Tapes fill with zeros; gzip allows them after the data.",
        gzip(PLAIN) + bytes(512),
        both,
        bad("compression", SA, SB),
        read="a.tar.gz",
    )
    add(
        "gzip-junk-after",
        "Junk after the data: gzip warns, some readers refuse.",
        gzip(PLAIN) + b"junk" * 10,
        late,
        both,
        read="a.tar.gz",
    )
    add(
        "gzip-checksum",
        "A wrong CRC-32: the data are not what was written.",
        gzip(PLAIN, checksum=7),
        late,
        read="a.tar.gz",
    )
    add("gzip-length", "A wrong length at the end of a member.", gzip(PLAIN, size=7), late, read="a.tar.gz")
    body = gzip(PLAIN)
    add(
        "gzip-bit",
        "A flipped bit in the data: only the CRC-32 shows it.",
        flipped(body, body.index(b"one")),
        late,
        read="a.tar.gz",
    )
    add("gzip-cut", "A gzip member that is cut in its middle.", body[: len(body) // 2], broken, read="a.tar.gz")
    add(
        "gzip-cut-checksum",
        "A gzip member that lacks its CRC-32: the archive is there, but unproved.",
        body[:-8],
        late,
        read="a.tar.gz",
    )
    add("gzip-cut-end", "A gzip member that lacks its last byte.", body[:-1], late, read="a.tar.gz")
    add(
        "gzip-cut-between",
        "The second member is missing: the archive has no end.",
        gzip(AB),
        bad("archive", SA, SB, at=4096),
        read="a.tar.gz",
    )
    add("gzip-cut-header", "A file that ends in the header of gzip.", body[:6], broken, read="a.tar.gz")
    add("gzip-method", "A method of gzip that does not exist.", changed(body, 2, b"\7"), broken, read="a.tar.gz")
    add("gzip-block", "A block of a type that does not exist.", changed(body, 10, b"\7"), broken, read="a.tar.gz")
    add("gzip-empty-file", "A compressed file of no bytes is no archive.", gzip(b""), bad("archive"), read="a.tar.gz")
    add(
        "gzip-twice",
        "An archive that was compressed twice.",
        gzip(gzip(PLAIN)),
        bad("archive", at=0),
        both,
        read="a.tar.gz",
    )
    add(
        "gzip-of-text",
        "A compressed file that is no archive.",
        gzip(b"Nothing is lost silently.\n" * 50),
        bad("archive", at=0),
        read="a.tar.gz",
    )
    add(
        "gzip-hard-link",
        "A link in a compressed archive: whoever cannot go back says so.",
        gzip(A + link("b.txt", "a.txt") + END),
        bad("sample", SA, at=2048),
        good(SA, s("b", txt="one")),
        read="a.tar.gz",
    )
    add(
        "gzip-symlink-before",
        "A link whose target comes later in a compressed archive.",
        gzip(symlink("b.txt", "a.txt") + A + END),
        bad("sample", at=0),
        good(s("b", txt="one"), SA),
        read="a.tar.gz",
    )
    add(
        "gzip-of-damaged",
        "Damage inside a sound gzip member.",
        gzip(flipped(PLAIN, len(A))),
        bad("archive", SA, at=2048),
        read="a.tar.gz",
    )

    packed = bz2.compress(PLAIN)
    add("bzip2", "An archive compressed by bzip2.", packed, SA, SB, read="a.tar.bz2")
    add(
        "bzip2-streams",
        "pbzip2 writes a stream for each part.",
        bz2.compress(PLAIN[:1000]) + bz2.compress(PLAIN[1000:]),
        SA,
        SB,
        read="a.tar.bz2",
    )
    add("bzip2-bit", "A flipped bit in a block of bzip2.", flipped(packed, 40), broken, read="a.tar.bz2")
    add("bzip2-cut", "A stream of bzip2 that is cut.", packed[: len(packed) // 2], broken, read="a.tar.bz2")
    add(
        "bzip2-cut-end",
        "A stream of bzip2 that lacks its last byte, of the checksum.",
        packed[:-1],
        late,
        read="a.tar.bz2",
    )
    add(
        "bzip2-name",
        "A plain archive may begin with the magic of bzip2: its first member is BZh9.jpg.",
        member("BZh9.jpg", "one") + END,
        s("BZh9", jpg="one"),
    )

    packed = xz(PLAIN)
    add("xz", "An archive in an xz stream of uncompressed chunks.", packed, SA, SB, read="a.tar.xz")
    add("xz-no-check", "An xz stream without a check.", xz(PLAIN, check=0), SA, SB, read="a.tar.xz")
    add(
        "xz-streams",
        "pixz and cat write several streams.",
        xz(PLAIN[:1000]) + xz(PLAIN[1000:]),
        SA,
        SB,
        read="a.tar.xz",
    )
    add(
        "xz-padding",
        "Zeros after a stream, by fours, are padding.",
        packed + bytes(8),
        both,
        bad("compression", SA, SB),
        read="a.tar.xz",
    )
    add(
        "xz-bit",
        "A flipped bit in the data: the check shows it.",
        flipped(packed, packed.index(b"one")),
        late,
        read="a.tar.xz",
    )
    add("xz-cut", "An xz stream that is cut.", packed[: len(packed) // 2], broken, read="a.tar.xz")
    add("xz-cut-index", "An xz stream that lacks its index.", packed[:-20], late, read="a.tar.xz")
    add("xz-cut-foot", "An xz stream that lacks its last byte.", packed[:-1], late, read="a.tar.xz")
    add("xz-header", "A flipped bit in the header of an xz stream.", flipped(packed, 7), broken, read="a.tar.xz")
    add(
        "lzma-alone",
        "The format of xz before xz, without a magic of its own.",
        base64.b64decode(LZMA_ALONE),
        both,
        bad("archive"),
        read="a.tar.lzma",
    )

    refuses = bad("compression")  # few readers know Zstandard and LZ4: they say so
    packed = zstd(PLAIN)
    add("zstd", "A Zstandard frame of raw blocks.", packed, both, refuses, read="a.tar.zst")
    add(
        "zstd-unsized",
        "A frame without the size of its content, as zstd writes from a pipe.",
        zstd(PLAIN, sized=False),
        both,
        refuses,
        read="a.tar.zst",
    )
    add("zstd-checksum", "A frame with its checksum.", zstd(PLAIN, checksum=True), both, refuses, read="a.tar.zst")
    add(
        "zstd-frames",
        "pzstd and cat write several frames: all are the data.",
        zstd(PLAIN[:1000]) + zstd(PLAIN[1000:]),
        both,
        refuses,
        read="a.tar.zst",
    )
    add(
        "zstd-frame-a-sample",
        "A frame for each sample, as in formats that seek.",
        zstd(A) + zstd(B) + zstd(END),
        both,
        refuses,
        read="a.tar.zst",
    )
    add(
        "zstd-skippable-first",
        "A frame that is to be skipped, before the data.",
        skippable(b"words") + packed,
        both,
        refuses,
        read="a.tar.zst",
    )
    add(
        "zstd-skippable-between",
        "A frame that is to be skipped, between two others.",
        zstd(A) + skippable(b"", 15) + zstd(B + END),
        both,
        refuses,
        read="a.tar.zst",
    )
    add(
        "zstd-skippable-last",
        "The seek table of zstd's seekable format is a frame that is to be skipped.",
        packed + skippable(b"\0" * 9 + b"\xb1\xea\x92\x8f", 14),
        both,
        refuses,
        read="a.tar.zst",
    )
    add("zstd-empty-frame", "A frame of no bytes.", zstd(b"") + packed, both, refuses, read="a.tar.zst")
    add(
        "zstd-bit-checksum",
        "A flipped bit in the data: the checksum shows it.",
        flipped(zstd(PLAIN, checksum=True), 20),
        late,
        read="a.tar.zst",
    )
    add(
        "zstd-checksum-wrong",
        "A wrong checksum.",
        flipped(zstd(PLAIN, checksum=True), -1 % len(zstd(PLAIN, checksum=True))),
        late,
        read="a.tar.zst",
    )
    add("zstd-cut", "A frame that is cut.", packed[: len(packed) // 2], broken, read="a.tar.zst")
    add(
        "zstd-cut-checksum", "A frame that lacks its checksum.", zstd(PLAIN, checksum=True)[:-4], late, read="a.tar.zst"
    )
    add(
        "zstd-cut-between",
        "The last frame is missing: the archive has no end.",
        zstd(A) + zstd(B),
        bad("archive", SA, SB, at=4096),
        read="a.tar.zst",
    )
    add(
        "zstd-block-type",
        "A block of the reserved type.",
        changed(packed, 9, bytes([packed[9] | 6])),
        broken,
        read="a.tar.zst",
    )
    add("zstd-junk-after", "Junk after a frame.", packed + b"junk" * 10, late, both, read="a.tar.zst")
    add(
        "zstd-window",
        "A frame that asks for a window of 2 GiB: refused, or read with much memory.",
        zstd(PLAIN, sized=False, window=21 << 3),
        refuses,
        both,
        read="a.tar.zst",
    )
    add(
        "zstd-repeated",
        "A block that repeats one byte: zeros at the end of an archive.",
        zstd_of([zstd_block(AB, last=False), zstd_block(b"\0", last=True, repeated=1024)]),
        both,
        refuses,
        read="a.tar.zst",
    )
    blocks = [zstd_block(b"\0", last=i == 99, repeated=1 << 17) for i in range(100)]
    add(
        "zstd-bomb",
        "13 MB of zeros from 400 bytes, where members should be: refused as such, or as more zeros than an end has.",
        zstd_of([zstd_block(AB, last=False), *blocks]),
        bad("archive", SA),
        bad("compression", SA, SB),
        both,
        read="a.tar.zst",
    )
    packed = lz4(PLAIN)
    add("lz4", "An LZ4 frame of uncompressed blocks.", packed, both, refuses, read="a.tar.lz4")
    add("lz4-frames", "Several LZ4 frames.", lz4(A) + lz4(B + END), both, refuses, read="a.tar.lz4")
    add(
        "lz4-bit",
        "A flipped bit in the data: the checksum shows it.",
        flipped(packed, packed.index(b"one")),
        late,
        read="a.tar.lz4",
    )
    add("lz4-cut", "An LZ4 frame that is cut.", packed[: len(packed) // 2], broken, read="a.tar.lz4")


def zstd_of(blocks: list[bytes]) -> bytes:
    """Return a Zstandard frame of these blocks, without a size, with a window of 2 MiB."""
    return b"\x28\xb5\x2f\xfd\0\x58" + b"".join(blocks)
