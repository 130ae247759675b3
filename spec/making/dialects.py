"""Cases of sound archives: the dialects of tar, and the extended headers of pax."""

from __future__ import annotations

from making.case import AB, LONG, PLAIN, SA, SB, A, B, bad, case, good, s
from making.pieces import (
    BLOCK,
    END,
    GNU,
    V7,
    base256,
    changed,
    filled,
    gnu_long,
    header,
    link,
    member,
    pax,
    record,
    seal,
    symlink,
)


def dialects() -> None:
    def add(name, why, archive, *outcomes):
        case("dialect", name, why, archive, *outcomes)

    def v7(name, data="", **fields):
        return member(name, data, magic=V7, **fields)

    add("plain", "Two samples of two members each, in ustar: what everybody reads.", PLAIN, SA, SB)
    add(
        "v7",
        "Archives of Version 7 have no magic; writers of it are still in use.",
        v7("a.txt", "one") + END,
        s("a", txt="one"),
    )
    add(
        "v7-kind-nul",
        "Version 7 marks a file by a NUL instead of the digit 0.",
        v7("a.txt", "one", kind=b"\0") + END,
        s("a", txt="one"),
    )
    add(
        "v7-no-prefix",
        "Without the magic, bytes where ustar has its prefix are not part of the name.",
        v7("a.txt", "one", prefix="junk") + END,
        s("a", txt="one"),
    )
    add(
        "v7-directory",
        "Version 7 marks a directory only by the slash at the end of its name.",
        v7("d/", kind=b"\0") + v7("d/a.txt", "one", kind=b"\0") + END,
        s("d/a", txt="one"),
    )
    add(
        "v7-link",
        "Version 7 has hard links.",
        v7("a.txt", "one") + link("b.txt", "a.txt", magic=V7) + END,
        s("a", txt="one"),
        s("b", txt="one"),
    )
    add(
        "ustar-kind-nul",
        "A file may be marked by a NUL in ustar too.",
        member("a.txt", "one", kind=b"\0") + END,
        s("a", txt="one"),
    )
    add(
        "ustar-contiguous",
        "The type 7, a contiguous file, is to be read as a file.",
        member("a.txt", "one", kind=b"7") + END,
        s("a", txt="one"),
    )
    add(
        "ustar-no-version",
        "The version after the magic is not checked: some writers leave NULs.",
        member("a.txt", "one", magic=b"ustar\0\0\0") + END,
        s("a", txt="one"),
    )
    name = "k" * 96 + ".txt"
    add(
        "ustar-name-100",
        "A name of 100 bytes fills its field, and no NUL ends it.",
        member(name, "one") + END,
        s(name[:-4], txt="one"),
    )
    add(
        "ustar-prefix",
        "A prefix stands before the name, with a slash between.",
        member("a.txt", "one", prefix="d/e") + END,
        s("d/e/a", txt="one"),
    )
    prefix = "p" * 77 + "/" + "q" * 77
    add(
        "ustar-prefix-155",
        "A full prefix and a full name make the longest name of ustar: 256 bytes.",
        member(name, "one", prefix=prefix) + END,
        s(f"{prefix}/{name[:-4]}", txt="one"),
    )
    add(
        "ustar-prefix-dots",
        "Dots in the prefix belong to folders.",
        member("a.txt", "one", prefix="v1.0/set.x") + END,
        s("v1.0/set.x/a", txt="one"),
    )
    add(
        "ustar-name-nul-junk",
        "What follows the NUL of a name is not part of it.",
        member(b"a.txt\0junk.png", "one") + END,
        s("a", txt="one"),
    )
    add(
        "ustar-other-prefix",
        "Two names that differ only in their prefix are two samples.",
        member("a.txt", "one", prefix="d") + member("a.txt", "two", prefix="e") + END,
        s("d/a", txt="one"),
        s("e/a", txt="two"),
    )
    add(
        "ustar-mixed",
        "Archives may change their dialect from member to member.",
        v7("a.txt", "one") + member("a.cls", "1", magic=GNU) + pax(("path", "b.txt")) + member("x", "two") + END,
        s("a", txt="one", cls="1"),
        s("b", txt="two"),
    )
    times = b"14371573345\0" + b"14371573345\0"
    add(
        "gnu",
        "GNU tar writes two spaces where ustar has its version.",
        member("a.txt", "one", magic=GNU) + END,
        s("a", txt="one"),
    )
    add(
        "gnu-times",
        "GNU's format has times where ustar has its prefix: they are not part of the name.",
        member("a.txt", "one", magic=GNU, prefix=times) + END,
        s("a", txt="one"),
    )
    add(
        "gnu-long-name",
        "GNU tar writes names of more than 100 bytes as a member of type L before theirs.",
        gnu_long(LONG + ".txt") + member((LONG + ".txt")[:100], "one", magic=GNU) + END,
        s(LONG, txt="one"),
    )
    add(
        "gnu-long-name-no-nul",
        "A long name ends with its member, also without a NUL.",
        gnu_long(LONG + ".txt", end=b"") + member("x.y", "one", magic=GNU) + END,
        s(LONG, txt="one"),
    )
    for length in 511, 512, 513:
        long = "d/" + "n" * (length - 6)
        add(
            f"gnu-long-name-{length}",
            f"A long name of {length} bytes, with its NUL, about as long as a block.",
            gnu_long(long + ".txt") + member("x.y", "one", magic=GNU) + END,
            s(long, txt="one"),
        )
    add(
        "gnu-long-name-nul",
        "A long name ends at its first NUL.",
        gnu_long("a.txt\0.png") + member("x.y", "one", magic=GNU) + END,
        s("a", txt="one"),
    )
    add(
        "gnu-long-name-twice",
        "Of two long names before a member, tarfile takes the first and GNU tar the last.",
        gnu_long("a.txt") + gnu_long("b.txt") + member("x.y", "one", magic=GNU) + END,
        good(s("a", txt="one")),
        good(s("b", txt="one")),
    )
    add(
        "gnu-long-name-short",
        "A long name may be short.",
        gnu_long("a.txt") + member("x.y", "one", magic=GNU) + END,
        s("a", txt="one"),
    )
    add(
        "gnu-long-name-one-sample",
        "Members with long names form samples as others do.",
        gnu_long(LONG + ".txt")
        + member("x.y", "one", magic=GNU)
        + gnu_long(LONG + ".cls")
        + member("x.z", "1", magic=GNU)
        + END,
        s(LONG, txt="one", cls="1"),
    )
    add(
        "gnu-long-link",
        "A long target of a link is a member of type K.",
        gnu_long(LONG + ".txt")
        + member("x.y", "one", magic=GNU)
        + gnu_long(LONG + ".txt", b"K")
        + link("b.txt", LONG[:100], magic=GNU)
        + END,
        s(LONG, txt="one"),
        s("b", txt="one"),
    )
    add(
        "gnu-long-link-and-name",
        "K and L may both stand before a link.",
        member("a.txt", "one", magic=GNU)
        + gnu_long("a.txt", b"K")
        + gnu_long(LONG + ".txt")
        + link("x.y", "z", magic=GNU)
        + END,
        s("a", txt="one"),
        s(LONG, txt="one"),
    )
    add(
        "gnu-long-name-and-link",
        "L and K may both stand before a link, in this order too.",
        member("a.txt", "one", magic=GNU)
        + gnu_long(LONG + ".txt")
        + gnu_long("a.txt", b"K")
        + link("x.y", "z", magic=GNU)
        + END,
        s("a", txt="one"),
        s(LONG, txt="one"),
    )
    star = changed(header("a.txt", 3, prefix="d"), 508, b"tar\0")
    add(
        "star",
        "star marks its headers at their end, and its prefix is shorter.",
        seal(star) + filled(b"one") + END,
        s("d/a", txt="one"),
    )
    add(
        "star-times",
        "star keeps times behind its prefix of 131 bytes.",
        seal(changed(star, 476, times)) + filled(b"one") + END,
        s("d/a", txt="one"),
    )


def extended() -> None:
    def add(name, why, archive, *outcomes):
        case("pax", name, why, archive, *outcomes)

    one = member("x.y", "one")
    add(
        "pax-path",
        "The record path replaces the name.",
        pax(("path", LONG + ".txt")) + one + END,
        s(LONG, txt="one"),
    )
    add(
        "pax-path-over-prefix",
        "The record path replaces name and prefix together.",
        pax(("path", "a.txt")) + member("x.y", "one", prefix="p") + END,
        s("a", txt="one"),
    )
    add("pax-path-utf8", "Paths in records are UTF-8.", pax(("path", "日本/é.txt")) + one + END, s("日本/é", txt="one"))
    add(
        "pax-path-spaces",
        "Records are delimited by their length: values may have spaces and equals signs.",
        pax(("path", "a b=c.txt")) + one + END,
        s("a b=c", txt="one"),
    )
    add("pax-path-newline", "A value may have a newline.", pax(("path", "a\nb.txt")) + one + END, s("a\nb", txt="one"))
    add(
        "pax-path-empty",
        "An empty value deletes the record by POSIX; some readers take it for an empty name.",
        pax(("path", "")) + member("a.txt", "one") + END,
        bad("archive", at=2 * BLOCK),
        good(s("a", txt="one")),
    )
    add(
        "pax-size",
        "The record size replaces the size in the header.",
        pax(("size", "3")) + header("a.txt", 0) + filled(b"one") + B + END,
        s("a", txt="one"),
        SB,
    )
    add(
        "pax-size-smaller",
        "The record size counts, not that in the header, which would reach into the next member.",
        pax(("size", "3")) + header("a.txt", 1536) + filled(b"one") + B + END,
        s("a", txt="one"),
        SB,
    )
    add(
        "pax-size-and-base256",
        "Writers of large members give their size both ways.",
        pax(("size", "3")) + header("a.txt", base256(3)) + filled(b"one") + B + END,
        s("a", txt="one"),
        SB,
    )
    add(
        "pax-size-zeros",
        "A size may have leading zeros.",
        pax(("size", "0000000003")) + header("a.txt", 0) + filled(b"one") + B + END,
        s("a", txt="one"),
        SB,
    )
    add(
        "pax-times",
        "Records of times are not needed to read members.",
        pax(("mtime", "1700000000.123456789"), ("atime", "1700000000.5"), ("ctime", "1.0")) + A + END,
        SA,
    )
    add(
        "pax-owner",
        "Records of owners are not needed to read members.",
        pax(("uid", "3000000"), ("gid", "3000000"), ("uname", "ü" * 40), ("gname", "g")) + A + END,
        SA,
    )
    add(
        "pax-unknown",
        "Keywords that a reader does not know are passed over.",
        pax(("SCHILY.xattr.user.a", b"\0\1\2\xff"), ("MY.words", "x"), ("comment", "hello")) + A + END,
        SA,
    )
    add(
        "pax-twice",
        "Of two records of the same keyword the last counts.",
        pax(("path", "x.txt"), ("path", "a.txt")) + one + END,
        s("a", txt="one"),
    )
    add(
        "pax-two-headers",
        "Two extended headers before a member: most readers take both, bsdtar refuses them.",
        pax(("mtime", "1.5")) + pax(("path", "a.txt")) + one + END,
        good(s("a", txt="one")),
        bad("archive"),
    )
    add(
        "pax-two-headers-path",
        "If two extended headers give a path, the later counts, by POSIX; tarfile takes the earlier.",
        pax(("path", "x.txt")) + pax(("path", "a.txt")) + one + END,
        good(s("a", txt="one")),
        good(s("x", txt="one")),
    )
    add("pax-empty", "An extended header may be empty.", header("PaxHeader/x", 0, kind=b"x") + A + END, SA)
    add(
        "pax-only-first",
        "Records count only for the member that follows.",
        pax(("path", "b.txt")) + one + member("c.txt", "two") + END,
        s("b", txt="one"),
        s("c", txt="two"),
    )
    for length in 9, 10, 98, 99, 100, 101, 998, 1000:
        value = "d/" + "n" * (length - len("NNN path=d/.txt\n") + (0 if length > 99 else 1 if length > 9 else 2))
        if length > 90:
            add(
                f"pax-record-{length}",
                "The length of a record counts its own digits.",
                pax(("path", value + ".txt")) + one + END,
                s(value, txt="one"),
            )
    body = record("path", "a.txt") + record("x", "y" * 9000)
    add(
        "pax-large",
        "An extended header may have many blocks.",
        member("PaxHeader", body, kind=b"x") + one + END,
        s("a", txt="one"),
    )
    add(
        "pax-512",
        "An extended header may fill its blocks completely.",
        pax(("comment", "c" * (512 - 25)), ("path", "a.txt")) + one + END,
        s("a", txt="one"),
    )
    add(
        "pax-solaris",
        "Solaris marks its extended headers by X.",
        pax(("path", "a.txt"), kind=b"X") + one + END,
        s("a", txt="one"),
    )
    add(
        "pax-name-of-header",
        "The name of an extended header is no member's.",
        pax(("path", "a.txt"), name="b.png") + one + END,
        s("a", txt="one"),
    )
    add(
        "pax-and-gnu-long",
        "A pax path and GNU's long name before one member: readers disagree which counts.",
        pax(("path", "a.txt")) + gnu_long("b.txt") + one + END,
        good(s("a", txt="one")),
        good(s("b", txt="one")),
    )
    add(
        "gnu-long-and-pax",
        "GNU's long name and a pax path before one member: readers disagree which counts.",
        gnu_long("b.txt") + pax(("path", "a.txt")) + one + END,
        good(s("a", txt="one")),
        good(s("b", txt="one")),
    )
    add(
        "pax-global",
        "A global header, such as git archive writes, is no member.",
        pax(("comment", "0" * 40), kind=b"g", name="pax_global_header") + AB + END,
        SA,
        SB,
    )
    add(
        "pax-global-middle",
        "A global header may stand between members of a sample.",
        member("a.txt", "one") + pax(("mtime", "1"), kind=b"g") + member("a.cls", "1") + END,
        SA,
    )
    add(
        "pax-global-path",
        "A global path would give all members one name; refusing it is better than that.",
        pax(("path", "g.txt"), kind=b"g") + A + END,
        bad("archive", at=0),
        good(SA),
    )
    add(
        "pax-global-and-local",
        "A local header may follow a global one.",
        pax(("comment", "c"), kind=b"g") + pax(("path", "a.txt")) + one + END,
        s("a", txt="one"),
    )
    add(
        "pax-global-size",
        "A global size would count for all members; refusing it is better than wrong bytes.",
        pax(("size", "3"), kind=b"g") + member("a.txt", "one") + member("b.txt", "two") + END,
        bad("archive", at=0),
        good(s("a", txt="one"), s("b", txt="two")),
    )
    latin = b"caf\xe9.txt"
    add(
        "pax-binary",
        "With hdrcharset=BINARY a path need not be UTF-8.",
        pax(("hdrcharset", "BINARY"), ("path", latin)) + one + END,
        good(s("caf\udce9", txt="one")),
        good(s("caf\ufffd", txt="one")),
        good(s("café", txt="one")),
    )
    add(
        "pax-linkpath",
        "The record linkpath replaces a link's target.",
        member("a.txt", "one") + pax(("linkpath", "a.txt")) + link("b.txt", "x") + END,
        s("a", txt="one"),
        s("b", txt="one"),
    )
    add(
        "pax-linkpath-long",
        "Long targets of links are in records.",
        pax(("path", LONG + ".txt")) + one + pax(("linkpath", LONG + ".txt")) + symlink("b.txt", LONG[:100]) + END,
        s(LONG, txt="one"),
        s("b", txt="one"),
    )
    add(
        "pax-directory",
        "An extended header may belong to a directory.",
        pax(("path", "d" * 120 + "/")) + header("d/", 0, kind=b"5") + A + END,
        SA,
    )
    add(
        "pax-own-directory",
        "A path that ends in a slash makes a directory of a file without data.",
        pax(("path", "d/")) + header("x", 0, kind=b"0") + A + END,
        SA,
    )
    add(
        "pax-charset",
        "The usual hdrcharset is UTF-8.",
        pax(("hdrcharset", "ISO-IR 10646 2000 UTF-8"), ("path", "é.txt")) + one + END,
        s("é", txt="one"),
    )
