"""Cases of members whose content is not the bytes after their headers: links, and sparse ones."""

from __future__ import annotations

from making.case import SA, SB, A, B, bad, case, good, s
from making.pieces import (
    BLOCK,
    END,
    GNU,
    filled,
    header,
    link,
    member,
    octal,
    pax,
    symlink,
)


def links() -> None:
    def add(name, why, archive, *outcomes):
        case("link", name, why, archive + END, *outcomes)

    one, two = member("a.txt", "one"), s("a", txt="one")
    b, c = s("b", txt="one"), s("c", txt="one")
    add(
        "hard-link", "Programs that find two names of a file store its data once.", one + link("b.txt", "a.txt"), two, b
    )
    add(
        "hard-link-other-field",
        "Data that are the same in two fields of a sample are stored once.",
        one + link("a.text", "a.txt"),
        s("a", txt="one", text="one"),
    )
    add(
        "hard-link-all",
        "A set without duplicates by hard links: the second sample has links only.",
        A + link("b.txt", "a.txt") + link("b.cls", "a.cls"),
        SA,
        s("b", txt="one", cls="1"),
    )
    add(
        "hard-link-chain",
        "A hard link may lead to a hard link.",
        one + link("b.txt", "a.txt") + link("c.txt", "b.txt"),
        two,
        b,
        c,
    )
    add(
        "hard-link-folder",
        "A hard link names its target from the top of the archive.",
        member("d/a.txt", "one") + link("d/b.txt", "d/a.txt"),
        s("d/a", txt="one"),
        s("d/b", txt="one"),
    )
    add(
        "hard-link-dot",
        "Archives of . have names that begin with ./, and targets that do.",
        member("./a.txt", "one") + link("./b.txt", "./a.txt"),
        s("./a", txt="one"),
        s("./b", txt="one"),
    )
    add(
        "hard-link-size",
        "Old programs give a hard link the size of its target, without data.",
        one + link("b.txt", "a.txt", size=3) + member("c.txt", "two"),
        two,
        b,
        s("c", txt="two"),
    )
    add(
        "hard-link-last",
        "A hard link leads to the last member of that name before it, as when files are extracted.",
        member("x", "old") + member("x", "one") + link("a.txt", "x"),
        two,
    )
    add(
        "hard-link-to-nothing",
        "A hard link without its target has no content: its sample is incomplete.",
        B + link("a.txt", "x.txt"),
        bad("sample", SB, at=4 * BLOCK),
    )
    add(
        "hard-link-later",
        "The target of a hard link stands before it; one after it was not meant.",
        link("b.txt", "a.txt") + one,
        bad("sample", at=0),
        good(b, two),
    )
    add(
        "hard-link-self",
        "A hard link to itself has no content.",
        B + link("a.txt", "a.txt"),
        bad("sample", SB, at=4 * BLOCK),
    )
    add(
        "hard-link-skipped",
        "The target of a link need not belong to a sample.",
        member("README", "one") + link("a.txt", "README"),
        two,
    )
    add(
        "hard-link-hidden",
        "The target of a link may be a hidden file.",
        member(".cache/x", "one") + link("a.txt", ".cache/x"),
        two,
    )
    add(
        "hard-link-sparse",
        "The target of a link may be sparse.",
        sparse_old("a.bin", [(512, b"one".ljust(512, b"."))], 1024) + link("b.bin", "a.bin"),
        s("a", bin=bytes(512) + b"one".ljust(512, b".")),
        s("b", bin=bytes(512) + b"one".ljust(512, b".")),
    )
    add("symlink", "A symbolic link to another member has its content.", one + symlink("b.txt", "a.txt"), two, b)
    add(
        "symlink-before",
        "A symbolic link may stand before its target: folders are stored by name.",
        symlink("a.txt", "b.txt") + member("b.txt", "one"),
        two,
        b,
    )
    add(
        "symlink-folder",
        "A symbolic link names its target from its own folder.",
        member("d/a.txt", "one") + symlink("d/b.txt", "a.txt"),
        s("d/a", txt="one"),
        s("d/b", txt="one"),
    )
    add(
        "symlink-up",
        "A symbolic link may lead to another folder.",
        member("d/a.txt", "one") + symlink("e/b.txt", "../d/a.txt"),
        s("d/a", txt="one"),
        s("e/b", txt="one"),
    )
    add(
        "symlink-chain",
        "A symbolic link may lead to another.",
        one + symlink("b.txt", "a.txt") + symlink("c.txt", "b.txt"),
        two,
        b,
        c,
    )
    add(
        "symlink-to-hard-link",
        "A symbolic link may lead to a hard link.",
        one + link("b.txt", "a.txt") + symlink("c.txt", "b.txt"),
        two,
        b,
        c,
    )
    add(
        "symlink-to-nothing",
        "A symbolic link out of the archive has no content.",
        B + symlink("a.txt", "/etc/hostname"),
        bad("sample", SB, at=4 * BLOCK),
    )
    add(
        "symlink-outside",
        "A link must never lead to a file of the machine that reads.",
        B + symlink("a.txt", "../../../../etc/hostname"),
        bad("sample", SB, at=4 * BLOCK),
    )
    add(
        "symlink-loop",
        "Two symbolic links to each other have no content.",
        B + symlink("a.txt", "c.txt") + symlink("c.txt", "a.txt"),
        bad("sample", SB, at=4 * BLOCK),
    )
    add(
        "symlink-self",
        "A symbolic link to itself has no content.",
        B + symlink("a.txt", "a.txt"),
        bad("sample", SB, at=4 * BLOCK),
    )
    add(
        "symlink-to-directory",
        "A symbolic link to a folder is no member of a sample.",
        header("d/", 0, kind=b"5") + member("d/a.txt", "one") + symlink("v1.0", "d"),
        s("d/a", txt="one"),
    )
    add(
        "symlink-to-fifo",
        "A link to a fifo has no content.",
        B + header("p", 0, kind=b"6") + symlink("a.txt", "p"),
        bad("sample", SB, at=5 * BLOCK),
    )
    add(
        "symlink-dot",
        "The target of a link is a path: it may begin with ./.",
        one + symlink("b.txt", "./a.txt"),
        two,
        b,
    )
    add(
        "symlink-dots",
        "A target by way of a folder that is not there: no file on a disk, but a path of a member.",
        one + symlink("b.txt", "./x/../a.txt"),
        good(two, b),
        bad("sample", two),
    )
    add(
        "symlink-incomplete-first",
        "A sample with a link to nothing is not delivered without that field.",
        symlink("a.jpg", "x.jpg") + member("a.cls", "1") + B,
        bad("sample", SB, at=0),
    )


def sparse_old(name, islands, size, kind=b"S"):
    """Return a sparse member in GNU's old format: its islands are (offset, data)."""
    entries = [octal(offset) + octal(len(data)) for offset, data in islands]
    stored = b"".join(data for _, data in islands)
    more = entries[4:]
    head = header(
        name,
        len(stored),
        kind=kind,
        magic=GNU,
        islands=b"".join(entries[:4]),
        extended=b"\1" if more else b"",
        real_size=octal(size),
    )
    while more:
        part, more = more[:21], more[21:]
        head += b"".join(part).ljust(504, b"\0") + (b"\1" if more else b"\0") + bytes(7)
    return head + filled(stored)


def sparse_text(islands):
    """Return the map of a sparse member as PAX 1.0 stores it, before the data."""
    lines = [len(islands), *(number for offset, data in islands for number in (offset, len(data)))]
    return filled(b"".join(b"%d\n" % line for line in lines))


def sparse() -> None:
    def add(name, why, archive, *outcomes):
        case("sparse", name, why, archive + B + END, *outcomes)

    part = b"island".ljust(512, b".")
    islands = [(512, part), (1536, part.upper()), (2560, b"")]  # the last, without data, says where a hole ends
    content = bytes(512) + part + bytes(512) + part.upper() + bytes(512)
    whole = s("a", bin=content)
    add(
        "sparse-old",
        "GNU's old format has a map of four entries in the header.",
        sparse_old("a.bin", islands, 2560),
        whole,
        SB,
    )
    many = [(1024 * i, bytes([65 + i]) * 512) for i in range(7)]
    long = b"".join(data + bytes(512) for _, data in many)
    many.append((len(long), b""))
    add(
        "sparse-old-extended",
        "More than four entries of the map are in blocks after the header.",
        sparse_old("a.bin", many, len(long)),
        s("a", bin=long),
        SB,
    )
    lots = [(1024 * i, bytes([65 + i]) * 512) for i in range(26)]
    longer = b"".join(data + bytes(512) for _, data in lots)
    lots.append((len(longer), b""))
    add(
        "sparse-old-two-blocks",
        "The map may need several blocks, of 21 entries each.",
        sparse_old("a.bin", lots, len(longer)),
        s("a", bin=longer),
        SB,
    )
    add(
        "sparse-old-hole",
        "A file may be one hole, without any data.",
        sparse_old("a.bin", [(2048, b"")], 2048),
        s("a", bin=bytes(2048)),
        SB,
    )
    add(
        "sparse-old-whole",
        "A file without holes may be stored as sparse.",
        sparse_old("a.bin", [(0, part)], 512),
        s("a", bin=part),
        SB,
    )
    add(
        "sparse-old-no-last",
        "A map without an entry for the hole at the end: the size says that there is one.",
        sparse_old("a.bin", islands[:2], 2560),
        good(whole, SB),
        bad("sample", SB),
    )
    head = [("GNU.sparse.size", "2560"), ("GNU.sparse.numblocks", "3")]
    pairs = [
        pair
        for offset, data in islands
        for pair in (("GNU.sparse.offset", str(offset)), ("GNU.sparse.numbytes", str(len(data))))
    ]
    stored = part + part.upper()
    add(
        "sparse-0.0",
        "PAX 0.0 repeats two keywords for each island, so records must be read in order.",
        pax(*head, *pairs) + member("a.bin", stored),
        whole,
        SB,
    )
    add(
        "sparse-0.1",
        "PAX 0.1 has the map in one record, and the name in another.",
        pax(*head, ("GNU.sparse.name", "a.bin"), ("GNU.sparse.map", "512,512,1536,512,2560,0"))
        + member("GNUSparseFile.7/a.bin", stored),
        whole,
        SB,
    )
    one = (
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "a.bin"),
        ("GNU.sparse.realsize", "2560"),
    )
    add(
        "sparse-1.0",
        "PAX 1.0 has the map before the data.",
        pax(*one) + member("GNUSparseFile.7/a.bin", sparse_text(islands) + stored),
        whole,
        SB,
    )
    add(
        "sparse-1.0-path",
        "The name of a sparse member counts, not the path of its extended header.",
        pax(*one, ("path", "GNUSparseFile.7/x.bin")) + member("GNUSparseFile.7/a.bin", sparse_text(islands) + stored),
        whole,
        SB,
    )
    add(
        "sparse-1.0-size",
        "A record of the size counts the map too.",
        pax(*one, ("size", "1536")) + header("GNUSparseFile.7/a.bin", 0) + sparse_text(islands) + stored,
        whole,
        SB,
    )
    add(
        "sparse-1.0-hole",
        "A hole alone, in PAX 1.0.",
        pax(*one[:3], ("GNU.sparse.realsize", "2048")) + member("x", sparse_text([(2048, b"")])),
        s("a", bin=bytes(2048)),
        SB,
    )
    add(
        "sparse-1.0-many",
        "A map of more than one block.",
        pax(*one[:3], ("GNU.sparse.realsize", str(len(longer))))
        + member("x", sparse_text(lots) + b"".join(data for _, data in lots)),
        s("a", bin=longer),
        SB,
    )
    add(
        "sparse-sample",
        "A sparse member is a field like any other.",
        sparse_old("a.bin", islands, 2560) + member("a.cls", "1"),
        s("a", bin=content, cls="1"),
        SB,
    )
    for name, why, piece in (
        (
            "sparse-overlap",
            "Islands that overlap contradict each other.",
            sparse_old("a.bin", [(512, part), (512, part)], 2560),
        ),
        ("sparse-beyond", "An island beyond the size contradicts it.", sparse_old("a.bin", [(2560, part)], 2560)),
        (
            "sparse-map-junk",
            "A map that is not made of numbers says nothing.",
            pax(*head, ("GNU.sparse.name", "a.bin"), ("GNU.sparse.map", "512,junk")) + member("x", stored),
        ),
        (
            "sparse-map-odd",
            "A map with an odd count of numbers is incomplete.",
            pax(*head, ("GNU.sparse.name", "a.bin"), ("GNU.sparse.map", "512,512,1536")) + member("x", stored),
        ),
        (
            "sparse-too-little",
            "A map that says more than is stored lacks data.",
            pax(*head, ("GNU.sparse.name", "a.bin"), ("GNU.sparse.map", "0,512,512,512,1024,512"))
            + member("x", stored),
        ),
        (
            "sparse-too-much",
            "More data than the map says cannot be placed.",
            pax(*head, ("GNU.sparse.name", "a.bin"), ("GNU.sparse.map", "0,512")) + member("x", stored),
        ),
        ("sparse-1.0-no-map", "A map of PAX 1.0 that is not there.", pax(*one) + member("x", stored)),
    ):
        add(name, why, piece, bad("sample", SB, at=0))
