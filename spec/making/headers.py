"""Cases of sound and unsound headers: numbers, checksums, and types of members."""

from __future__ import annotations

from making.case import PLAIN, SA, SB, B, bad, case, good, s
from making.pieces import (
    BLOCK,
    END,
    GNU,
    base256,
    filled,
    header,
    member,
    octal,
    pax,
    seal,
    total,
)


def numbers() -> None:
    def add(name, why, archive, *outcomes):
        case("number", name, why, archive, *outcomes)

    def sized(size, **fields):
        return header("a.txt", size, **fields) + filled(b"one") + B + END

    one = s("a", txt="one")
    for name, why, size in (
        ("size-nul", "Eleven octal digits and a NUL are the usual form of a size.", b"00000000003\0"),
        ("size-space", "A space may end a size.", b"00000000003 "),
        ("size-space-nul", "Ten digits, a space and a NUL are an old form of a size.", b"0000000003 \0"),
        ("size-12-digits", "Twelve digits fill the field.", b"000000000003"),
        ("size-leading-spaces", "Spaces may lead a size, as in Version 7.", b"          3 "),
        ("size-short", "A size may have few digits.", b"3\0"),
        ("size-base256", "GNU tar writes sizes from 8 GiB on in binary; the form is right for any size.", base256(3)),
        ("size-junk-after-nul", "What follows the NUL of a number is not part of it.", b"3\0junk junk"),
    ):
        add(name, why, sized(size), good(one, SB), *([bad("archive", SB)] if name == "size-junk-after-nul" else []))
    for name, why, size in (
        ("size-digit-8", "An 8 is no octal digit.", b"00000000038\0"),
        ("size-letters", "Letters are no size.", b"three\0"),
        ("size-minus", "A minus is no digit.", b"-0000000003\0"),
        ("size-hex", "A hexadecimal size is none.", b"0x3\0"),
        ("size-negative-base256", "A negative size in binary would lead back.", b"\xff" * 11 + b"\xfd"),
        ("size-huge-base256", "A size of 95 bits is larger than any archive.", b"\x80" + b"\xff" * 11),
    ):
        add(name, why, sized(size), bad("archive", SB, at=0))
    add(
        "size-nothing",
        "A field of NULs is no number; some readers take it for 0.",
        header("a.txt", bytes(12)) + B + END,
        bad("archive", SB, at=0),
        good(s("a", txt=""), SB),
    )
    add(
        "size-spaces",
        "A field of spaces is no number; some readers take it for 0.",
        header("a.txt", b" " * 12) + B + END,
        bad("archive", SB, at=0),
        good(s("a", txt=""), SB),
    )
    block = header("a.txt", 3)
    for name, why, form in (
        ("checksum-usual", "Six digits, a NUL and a space are the usual form of a checksum.", b"%06o\0 "),
        ("checksum-7-digits", "Seven digits and a NUL, as for other numbers.", b"%07o\0"),
        ("checksum-spaces", "Spaces may lead a checksum.", b"%6o\0 "),
        ("checksum-space-end", "A space may end a checksum.", b"%06o  "),
        ("checksum-8-digits", "Eight digits fill the field.", b"%08o"),
        ("checksum-short", "A checksum may have no leading zeros.", b"%o\0 "),
    ):
        add(name, why, seal(block, form) + filled(b"one") + END, one)
    high = header("é日本.txt", 3, uname="ü")
    add(
        "checksum-unsigned", "Bytes above 127 count unsigned.", seal(high) + filled(b"one") + END, s("é日本", txt="one")
    )
    add(
        "checksum-signed",
        "Old programs counted bytes above 127 as negative; readers accept both sums.",
        seal(high, signed=True) + filled(b"one") + END,
        s("é日本", txt="one"),
    )
    for name, why, sum_ in (
        ("checksum-nothing", "A header without a checksum is no header.", bytes(8)),
        (
            "checksum-off-by-one",
            "A checksum that is off by one shows a changed header.",
            b"%06o\0 " % (total(block) + 1),
        ),
        ("checksum-letters", "Letters are no checksum.", b"abcdef\0 "),
    ):
        add(name, why, header("a.txt", 3, checksum=sum_) + filled(b"one") + B + END, bad("archive", SB, at=0))
    for name, why, fields in (
        (
            "owner-base256",
            "Owners above 2,097,151 are in binary.",
            {"uid": base256(3_000_000, 8), "gid": base256(3_000_000, 8)},
        ),
        ("owner-nothing", "An empty owner does not matter.", {"uid": bytes(8), "gid": bytes(8)}),
        ("owner-junk", "An owner that is no number does not matter to samples.", {"uid": b"nobody\0\0"}),
        ("mtime-negative", "Times before 1970 are in binary.", {"mtime": base256(-1)}),
        ("mtime-nothing", "An empty time does not matter.", {"mtime": bytes(12)}),
        ("mode-nothing", "An empty mode does not matter.", {"mode": bytes(8)}),
        ("mode-long", "Some writers give the whole st_mode.", {"mode": b"100644\0"}),
        ("devices-junk", "Device numbers of a file do not matter.", {"major": b"junk", "minor": b" "}),
    ):
        outcomes = [good(one, SB)] if name not in ("owner-junk", "devices-junk") else [good(one, SB), bad("archive")]
        add(name, why, sized(3, **fields), *outcomes)
    add("size-0", "A member may be empty.", member("a.txt", "") + member("a.cls", "1") + END, s("a", txt="", cls="1"))
    for size in 511, 512, 513, 1024:
        add(
            f"size-{size}",
            f"Data of {size} bytes, about as long as blocks, with or without padding.",
            member("a.txt", "x" * size) + B + END,
            s("a", txt="x" * size),
            SB,
        )
    data = b"0123456789abcdef" * 4800
    add(
        "size-76800",
        "A member that is larger than a buffer of 64 KiB.",
        member("a.bin", data) + B + END,
        s("a", bin=data),
        SB,
    )
    add(
        "data-zeros",
        "Data of zeros is no end of the archive.",
        member("a.bin", bytes(2048)) + B + END,
        s("a", bin=bytes(2048)),
        SB,
    )
    add(
        "data-is-archive",
        "A member may be an archive: its headers are data.",
        member("a.tar", PLAIN) + B + END,
        s("a", tar=PLAIN),
        SB,
    )
    add(
        "padding-junk",
        "What fills the last block of data does not matter; writers leave old memory there.",
        header("a.txt", 3) + b"one" + b"?" * 509 + B + END,
        one,
        SB,
    )


def types() -> None:
    def add(name, why, archive, *outcomes):
        case("type", name, why, archive, *outcomes)

    def between(piece):
        return member("a.txt", "one") + piece + member("a.cls", "1") + END

    for name, why, piece in (
        ("directory", "A directory is no member of a sample, and does not split one.", header("d.x/", 0, kind=b"5")),
        ("directory-no-slash", "A directory is one by its type, also without a slash.", header("d.x", 0, kind=b"5")),
        (
            "directory-size",
            "The size of a directory is not that of data that follow, in ustar.",
            header("d/", 1024, kind=b"5"),
        ),
        ("directory-by-slash", "A file whose name ends in a slash is a directory.", header("d.x/", 0)),
        (
            "character-device",
            "A device is no member of a sample.",
            header("tty.x", 0, kind=b"3", major=octal(4, 8), minor=octal(1, 8)),
        ),
        (
            "block-device",
            "A device is no member of a sample.",
            header("sda.x", 0, kind=b"4", major=octal(8, 8), minor=octal(0, 8)),
        ),
        ("fifo", "A fifo is no member of a sample.", header("pipe.x", 0, kind=b"6")),
        ("fifo-size", "The size of a fifo does not count.", header("pipe.x", 512, kind=b"6")),
        ("volume-label", "GNU tar's label of a volume is no file.", header("label.x", 0, kind=b"V", magic=GNU)),
        (
            "dump-directory",
            "GNU tar's incremental archives list a directory's contents in its data.",
            member("d.x/", b"Ya.txt\0\0", kind=b"D", magic=GNU),
        ),
    ):
        add(name, why, between(piece), SA)
    add(
        "continued",
        "A member that continues from another volume is only a part of one.",
        header("a.txt", 3, kind=b"M", magic=GNU) + filled(b"one") + B + END,
        bad("archive", SB, at=0),
    )
    add(
        "continued-pax",
        "A member that continues from another volume, as pax has it.",
        pax(("GNU.volume.filename", "a.txt"), ("GNU.volume.offset", "512")) + member("a.txt", "one") + END,
        bad("archive", at=0),
    )
    for letter, what in (
        ("Z", "an unknown type"),
        ("A", "Solaris' access control lists"),
        ("9", "a type reserved by POSIX"),
        ("N", "GNU's oldest long names"),
    ):
        add(
            f"type-{letter}",
            f"The type {letter}, {what}: a file by POSIX, others refuse it; nobody may lose what follows.",
            between(member("z.txt", "x", kind=letter.encode())),
            bad("archive", at=2 * BLOCK),
            good(s("a", txt="one"), s("z", txt="x"), s("a", cls="1")),
            good(SA),
        )
    add(
        "only-directories",
        "An archive may have members but no samples.",
        header("d/", 0, kind=b"5") + header("d/e/", 0, kind=b"5") + END,
    )
