"""Cases of archives as the programs in use write them."""

from __future__ import annotations

from making.case import AB, LONG, SA, SB, A, B, bad, case, good, s
from making.pieces import (
    BLOCK,
    END,
    GNU,
    USTAR,
    base256,
    gnu_long,
    header,
    link,
    member,
    octal,
    pax,
)


def writers() -> None:
    def add(name, why, archive, *outcomes):
        case("writer", name, why, archive, *outcomes)

    apple = b"\0\5\26\7\0\2\0\0Mac OS X        \0\2\0\0\0\11\0\0\0002\0\0\0\16"
    add(
        "macos-appledouble",
        "macOS' bsdtar stores extended attributes as a hidden file before each file.",
        member("._a.jpg", apple) + member("a.jpg", "one") + member("._a.cls", apple) + member("a.cls", "1") + END,
        s("a", jpg="one", cls="1"),
    )
    add(
        "macos-appledouble-folder",
        "AppleDouble files stand beside the files of any folder.",
        header("./", 0, kind=b"5")
        + member("./._d", apple)
        + header("./d/", 0, kind=b"5")
        + member("./d/._a.jpg", apple)
        + member("./d/a.jpg", "one")
        + END,
        good(s("./d/a", jpg="one")),
        good(s("./d/", {"_a.jpg": apple}), s("./d/a", jpg="one")),
    )
    add(
        "macos-appledouble-between",
        "AppleDouble files in a folder stand between the members of a sample: it must not come apart.",
        member("d/._a.jpg", apple)
        + member("d/a.jpg", "one")
        + member("d/._a.cls", apple)
        + member("d/a.cls", "1")
        + END,
        s("d/a", jpg="one", cls="1"),
    )
    add(
        "macos-pax",
        "macOS' bsdtar writes records of libarchive and SCHILY, and the header of AppleDouble files too.",
        pax(("mtime", "1700000000.5"), name="PaxHeader/._a.jpg")
        + member("._a.jpg", apple, uname="me", gname="staff")
        + pax(
            ("mtime", "1700000000.5"),
            ("LIBARCHIVE.creationtime", "1700000000.25"),
            ("SCHILY.fflags", "nodump"),
            ("LIBARCHIVE.xattr.com.apple.quarantine", "MDA4MQ"),
            name="PaxHeader/a.jpg",
        )
        + member("a.jpg", "one", uname="me", gname="staff")
        + END,
        s("a", jpg="one"),
    )
    add(
        "macos-zip-folder",
        "The folder __MACOSX, of macOS' archiver, has AppleDouble files only.",
        member("a.jpg", "one") + member("__MACOSX/._a.jpg", apple) + END,
        good(s("a", jpg="one")),
        good(s("a", jpg="one"), s("__MACOSX/", {"_a.jpg": apple})),
    )
    add(
        "macos-ds-store",
        "The Finder's .DS_Store has no key.",
        member(".DS_Store", b"\0\0\0\1Bud1") + member("d/.DS_Store", b"x") + A + END,
        good(SA),
        good(s("d/", ds_store="x"), SA),
        good(s("d/", DS_Store="x"), SA),
    )
    add(
        "windows-thumbs",
        "Thumbs.db of Windows looks like a sample; only a list of fields can leave it out.",
        A + member("Thumbs.db", "x") + END,
        SA,
        s("Thumbs", db="x"),
    )
    go = {
        "mode": b"0000644\0",
        "uid": b"0000000\0",
        "gid": b"0000000\0",
        "mtime": b"00000000000\0",
        "major": b"0000000\0",
        "minor": b"0000000\0",
    }
    add(
        "go-ustar",
        "Go's archive/tar fills the numbers of devices too.",
        member("a.txt", "one", **go) + END,
        s("a", txt="one"),
    )
    add(
        "go-pax",
        "Go's archive/tar names its extended headers PaxHeaders.0.",
        pax(("path", "é.txt"), name="PaxHeaders.0/_.txt", mode=bytes(8), uid=bytes(8), gid=bytes(8), mtime=bytes(12))
        + member("_.txt", "one", **go)
        + END,
        s("é", txt="one"),
    )
    add(
        "go-gnu",
        "Go's archive/tar in GNU's format.",
        gnu_long(LONG + ".txt") + member((LONG + ".txt")[:100], "one", magic=GNU, **go) + END,
        s(LONG, txt="one"),
    )
    rust = {"mode": b"0000644\0", "uid": b"0001750\0", "gid": b"0001750\0", "mtime": b"14371573345\0", "magic": GNU}
    add(
        "rust-gnu",
        "Rust's tar writes GNU's format by default.",
        member("a.txt", "one", **rust) + END,
        s("a", txt="one"),
    )
    add(
        "rust-long-name",
        "Rust's tar writes long names as a member ././@LongLink.",
        gnu_long(LONG + ".txt") + member((LONG + ".txt")[:100], "one", **rust) + END,
        s(LONG, txt="one"),
    )
    add(
        "docker-layer",
        "Layers of container images have whiteouts, which are hidden files.",
        header("d/", 0, kind=b"5", **go)
        + member("d/.wh.b.txt", "", **go)
        + member("d/.wh..wh..opq", "", **go)
        + member("d/a.txt", "one", **go)
        + END,
        good(s("d/a", txt="one")),
        good(s("d/", {"wh.b.txt": "", "wh..wh..opq": ""}), s("d/a", txt="one")),
    )
    add(
        "docker-xattr",
        "Layers of container images have records of capabilities, in binary.",
        pax(
            ("SCHILY.xattr.security.capability", b"\1\0\0\2\0\4\0\0\0\0\0\n\0\0\0\0\0\0\0\0"), name="PaxHeaders.0/a.txt"
        )
        + member("a.txt", "one", **go)
        + END,
        s("a", txt="one"),
    )
    add(
        "python-gnu",
        "Python's tarfile in GNU's format writes the type, and the magic of GNU tar.",
        member("a.txt", "one", magic=GNU, major=octal(0, 8), minor=octal(0, 8)) + END + bytes(20 * BLOCK - 4 * BLOCK),
        s("a", txt="one"),
    )
    add(
        "python-pax",
        "Python's tarfile writes a record of the time where it has a fraction.",
        pax(
            ("mtime", "1700000000.1234567"),
            name="././@PaxHeader",
            mode=bytes(8),
            uid=bytes(8),
            gid=bytes(8),
            mtime=bytes(12),
        )
        + member("a.txt", "one")
        + END,
        s("a", txt="one"),
    )
    add(
        "python-latin1",
        "Python's tarfile of old wrote names in the encoding of the machine.",
        member(b"caf\xe9.txt", "one", magic=GNU) + END,
        good(s("caf\udce9", txt="one")),
        good(s("caf\ufffd", txt="one")),
        good(s("café", txt="one")),
    )
    bigdata = {"mode": b"0000444\0", "uname": "bigdata", "gname": "bigdata"}
    add(
        "webdataset-tarwriter",
        "webdataset's TarWriter sets owner and mode, and sorts fields.",
        member("a.cls", "1", **bigdata) + member("a.txt", "one", **bigdata) + END + bytes(14 * BLOCK),
        SA,
    )
    add(
        "webdataset-metadata",
        "Members whose name has a component __x__ are about the archive, not samples.",
        member("__meta__/set.json", "{}") + AB + member("__end__", "x") + END,
        good(SA, SB),
        good(s("__meta__/set", json="{}"), SA, SB),
    )
    add(
        "gnu-posix",
        "GNU tar names extended headers after the process.",
        pax(("mtime", "1.5"), ("atime", "1.5"), ("ctime", "1.5"), name="./PaxHeaders.4711/a.txt") + A + END,
        SA,
    )
    add(
        "gnu-acl",
        "GNU tar writes access control lists and SELinux' contexts as records.",
        pax(
            ("RHT.security.selinux", b"unconfined_u:object_r:x_t:s0\0"),
            ("SCHILY.acl.access", "user::rw-\ngroup::r--\nother::r--\n"),
        )
        + A
        + END,
        SA,
    )
    add("gnu-label", "GNU tar -V writes a label first.", header("my set", 0, kind=b"V", magic=GNU) + AB + END, SA, SB)
    add(
        "gnu-label-pax",
        "GNU tar -V in pax writes the label as a global record.",
        pax(("GNU.volume.label", "my set"), kind=b"g", name="GlobalHead.1.1") + AB + END,
        SA,
        SB,
    )
    add(
        "gnu-folder",
        "tar of a folder stores the folder first.",
        header("set/", 0, kind=b"5", magic=GNU) + member("set/a.txt", "one", magic=GNU) + END,
        s("set/a", txt="one"),
    )
    add(
        "gnu-dot",
        "tar -c . stores names that begin with ./, and the keys do too.",
        header("./", 0, kind=b"5") + member("./a.txt", "one") + member("./a.cls", "1") + END,
        s("./a", txt="one", cls="1"),
    )
    add(
        "gnu-absolute",
        "tar -P stores absolute names; they are keys like others.",
        member("/data/a.txt", "one") + END,
        s("/data/a", txt="one"),
    )
    add(
        "git-archive",
        "git archive writes a global header with the commit, and the folder.",
        pax(("comment", "a" * 40), kind=b"g", name="pax_global_header", mode=b"0000666\0")
        + header("set/", 0, kind=b"5", mode=b"0000775\0")
        + member("set/a.txt", "one", mode=b"0000664\0")
        + END
        + bytes(13 * BLOCK),
        s("set/a", txt="one"),
    )
    add(
        "busybox",
        "BusyBox' tar writes GNU's magic, and numbers that fill their fields.",
        member("a.txt", "one", magic=GNU, mode=b"0000644\0", size=b"00000000003\0") + END,
        s("a", txt="one"),
    )
    add(
        "java-posix",
        "Commons Compress writes records for names that are not ASCII, and ./PaxHeaders.X.",
        pax(("path", "é.txt"), name="./PaxHeaders.X/_.txt") + member("_.txt", "one") + END,
        s("é", txt="one"),
    )
    add(
        "java-star",
        "Commons Compress writes large numbers in binary, for owners too.",
        member("a.txt", "one", uid=base256(4_000_000, 8), size=base256(3)) + END,
        s("a", txt="one"),
    )
    add(
        "node-tar",
        "Node's tar gives records of device and inode.",
        pax(
            ("SCHILY.dev", "16777220"),
            ("SCHILY.ino", "8613"),
            ("SCHILY.nlink", "1"),
            ("mtime", "1700000000.25"),
            name="PaxHeader/a.txt",
            mode=b"000644 \0",
        )
        + member(
            "a.txt",
            "one",
            mode=b"000644 \0",
            uid=b"000765 \0",
            gid=b"000024 \0",
            size=b"00000000003 ",
            mtime=b"14371573345 ",
        )
        + END,
        s("a", txt="one"),
    )
    add(
        "7zip",
        "7-Zip leaves the numbers of owners empty.",
        member("a.txt", "one", uid=bytes(8), gid=bytes(8), mode=b"   644 \0") + END,
        s("a", txt="one"),
    )
    add(
        "perl",
        "Perl's Archive::Tar ends numbers with spaces.",
        member(
            "a.txt",
            "one",
            mode=b"000644 \0",
            uid=b"001750 \0",
            gid=b"001750 \0",
            size=b"00000000003 ",
            mtime=b"14371573345 ",
        )
        + END,
        s("a", txt="one"),
    )
    add(
        "solaris",
        "Solaris' tar writes access control lists as a type of their own: refused, or passed over.",
        member("a.txt", "user::rw-", kind=b"A", magic=USTAR) + A + END,
        bad("archive", at=0),
        good(SA),
        good(s("a", txt="one", cls="1")),
    )
    add("append", "tar -r adds members where the zeros were.", A + B + END + bytes(10 * BLOCK), SA, SB)
    add(
        "append-newer",
        "tar -r and -u add a file again when it has changed: two members of one name.",
        A + B + member("a.txt", "new") + END,
        bad("sample", SA, SB, at=len(A + B)),
        good(SA, SB, s("a", txt="new")),
        good(s("a", txt="new", cls="1"), SB),
    )
    add(
        "deduplicated",
        "Programs that replace equal files by hard links make sets smaller.",
        A + link("b.txt", "a.txt") + member("b.cls", "2") + END,
        SA,
        s("b", txt="one", cls="2"),
    )
    add(
        "owner-names",
        "Names of owners may fill their fields.",
        member("a.txt", "one", uname="u" * 32, gname="g" * 32) + END,
        s("a", txt="one"),
    )
