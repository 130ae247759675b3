"""Cases of archives that end, break off, follow each other, or are damaged."""

from __future__ import annotations

from making.case import AB, SA, SB, A, B, bad, case, good, s
from making.pieces import (
    BLOCK,
    END,
    GNU,
    changed,
    filled,
    flipped,
    gnu_long,
    header,
    link,
    member,
    octal,
    pax,
    record,
    seal,
    symlink,
)

LENGTH = len(AB)  # of two samples, without the end


def ends() -> None:
    def add(name, why, archive, *outcomes):
        case("end", name, why, archive, *outcomes)

    both = good(SA, SB)
    add("end-two-blocks", "Two blocks of zeros end an archive.", AB + END, both)
    add("end-one-block", "One block of zeros is an end too: some writers leave it at that.", AB + bytes(BLOCK), both)
    add(
        "end-record",
        "GNU tar fills the last record of 20 blocks with zeros.",
        (AB + END).ljust(20 * BLOCK, b"\0"),
        both,
    )
    add("end-large-record", "tar -b128 fills a record of 64 KiB.", (AB + END).ljust(128 * BLOCK, b"\0"), both)
    add(
        "end-none",
        "An archive without zeros at its end may be cut between two members: nobody can know what is lost.",
        AB,
        bad("archive", SA, SB, at=LENGTH),
    )
    add("end-part-of-block", "Zeros that are no whole block.", AB + bytes(100), bad("archive", SA, at=LENGTH), both)
    add("end-odd", "Zeros after the end need not be whole blocks.", AB + END + bytes(100), both)
    add(
        "end-many-zeros",
        "More zeros than any writer leaves: members were overwritten, or the file is padded.",
        AB + bytes(129 * BLOCK + 1 - BLOCK + BLOCK * 2),
        bad("archive", SA, SB, at=LENGTH),
        both,
    )
    add(
        "end-newline",
        "A transfer in text mode may add a newline.",
        AB + END + b"\n",
        bad("archive", SA, SB, at=5120),
        both,
    )
    add(
        "end-junk",
        "What follows the end is not part of the archive; it may be what is left of another.",
        AB + END + b"junk" * 300,
        bad("archive", SA, SB, at=5120),
        both,
    )
    add(
        "end-junk-one-block",
        "Junk right after one block of zeros.",
        AB + bytes(BLOCK) + b"junk" * 128,
        bad("archive", SA, SB, at=4608),
        both,
    )
    add("empty-archive", "An archive without members is two blocks of zeros.", END, good())
    add(
        "empty-archive-record",
        "tar writes an archive without members as a record of zeros; so is a file of zeros.",
        bytes(20 * BLOCK),
        good(),
        bad("archive", at=0),
    )
    add("empty-archive-block", "A single block of zeros.", bytes(BLOCK), good(), bad("archive"))
    add("empty-file", "A file of no bytes is no archive: a failed download leaves one.", b"", bad("archive"))
    add(
        "zeros-file",
        "A file of zeros is what a disk leaves of an archive that was never flushed.",
        bytes(300 * BLOCK),
        bad("archive", at=0),
    )


def truncations() -> None:
    def add(name, why, archive, *outcomes):
        case("truncation", name, why, archive, *outcomes)

    three = AB + member("c.txt", "x" * 1000) + member("c.cls", "3")
    add("cut-in-header", "An archive that ends in a header.", three[: LENGTH + 100], bad("archive", SA, SB, at=LENGTH))
    add(
        "cut-after-header",
        "An archive that ends after a header.",
        three[: LENGTH + BLOCK],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-in-data",
        "An archive that ends in the data of a member.",
        three[: LENGTH + BLOCK + 500],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-before-last-byte",
        "An archive that lacks the last byte of a member.",
        three[: LENGTH + BLOCK + 999],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-after-data",
        "An archive that ends after the data of a member, without its padding.",
        three[: LENGTH + BLOCK + 1000],
        bad("archive", SA, SB, at=5608),
    )
    add(
        "cut-in-padding",
        "An archive that ends in the padding of a member.",
        three[: LENGTH + BLOCK + 1010],
        bad("archive", SA, SB, at=5618),
    )
    add(
        "cut-in-sample",
        "An archive that ends between two members of a sample: half a sample is none.",
        three[: LENGTH + 3 * BLOCK],
        bad("archive", SA, SB, at=LENGTH + 3 * BLOCK),
    )
    add(
        "cut-after-sample",
        "An archive that ends between two samples.",
        three[:LENGTH],
        bad("archive", SA, SB, at=LENGTH),
    )
    add("cut-in-first-header", "An archive that ends in its first header.", AB[:300], bad("archive", at=0))
    add("cut-after-first-header", "An archive that is a header alone.", AB[:BLOCK], bad("archive", at=0))
    add("cut-in-first-data", "An archive that ends in its first member.", AB[: BLOCK + 2], bad("archive", at=0))
    long = AB + gnu_long("n" * 200 + ".txt") + member("x.y", "one")
    add(
        "cut-in-long-name",
        "An archive that ends in a long name.",
        long[: LENGTH + BLOCK + 100],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-after-long-name",
        "An archive that ends after a long name.",
        long[: LENGTH + 2 * BLOCK],
        bad("archive", SA, SB, at=LENGTH),
    )
    extended = AB + pax(("path", "n" * 200 + ".txt")) + member("x.y", "one")
    add(
        "cut-in-pax",
        "An archive that ends in an extended header.",
        extended[: LENGTH + BLOCK + 100],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-after-pax",
        "An archive that ends after an extended header.",
        extended[: LENGTH + 2 * BLOCK],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-after-pax-header",
        "An archive that ends after the header of an extended header.",
        extended[: LENGTH + BLOCK],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "pax-without-member",
        "Zeros after an extended header: its member is missing.",
        AB + pax(("path", "c.txt")) + END,
        bad("archive", SA, SB, at=LENGTH + 2 * BLOCK),
    )
    add(
        "long-name-without-member",
        "Zeros after a long name: its member is missing.",
        AB + gnu_long("c.txt") + END,
        bad("archive", SA, SB, at=LENGTH + 2 * BLOCK),
    )
    large = AB + member("c.bin", bytes(range(256)) * 300) + END
    add(
        "cut-in-large",
        "An archive that ends in a member larger than a buffer.",
        large[: LENGTH + 40000],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-large-size",
        "A member whose size leads far beyond the end.",
        AB + header("c.txt", 1 << 32) + filled(b"one"),
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "cut-in-skipped",
        "An archive that ends in a member that belongs to no sample.",
        AB + member("README", "x" * 1000)[:900],
        bad("archive", SA, SB, at=LENGTH),
    )
    add(
        "size-over-end",
        "A size that reaches over the end of the archive.",
        AB + header("c.txt", 2000) + filled(b"one") + END,
        bad("archive", SA, SB, at=LENGTH),
    )


def faults() -> None:
    def add(name, why, archive, *outcomes):
        case("damage", name, why, archive, *outcomes)

    at = len(A)
    data = AB + END
    after = bad("archive", SA, at=at)
    between = bad("archive", SA, SB, at=at)
    add("header-bit", "One flipped bit in a header: its checksum is wrong.", flipped(data, at), after)
    add(
        "header-bit-size",
        "With a flipped bit in a size, the next header is sought at a wrong offset.",
        flipped(data, at + 134),
        after,
    )
    add("header-bit-kind", "A flipped bit in a type would make a link of a file.", flipped(data, at + 156), after)
    add(
        "header-bit-last-byte", "A flipped bit in the last byte of a header counts too.", flipped(data, at + 511), after
    )
    add(
        "header-bit-first",
        "A flipped bit in the first header of an archive.",
        flipped(data, 0),
        bad("archive", SB, at=0),
    )
    add(
        "header-bit-second-member",
        "A flipped bit in the second header of a sample: half a sample is none.",
        flipped(data, at + 2 * BLOCK),
        bad("archive", SA, at=at + 2 * BLOCK),
    )
    add(
        "header-bit-in-only-sample",
        "A flipped bit where all samples of the archive would be lost.",
        flipped(A + END, 2 * BLOCK),
        bad("archive", at=2 * BLOCK),
    )
    add("header-overwritten", "A header that was overwritten by other data.", changed(data, at, b"\xff" * BLOCK), after)
    add(
        "header-zeros",
        "A header that was overwritten by zeros looks like the end; what follows shows that it is none.",
        changed(data, at, bytes(BLOCK)),
        bad("archive", SA, at=2560),
    )
    add(
        "member-zeros",
        "A member that was overwritten by zeros.",
        changed(data, at, bytes(2 * BLOCK)),
        bad("archive", SA, at=at + 2 * BLOCK),
    )
    add(
        "sample-zeros",
        "A sample that was overwritten by zeros, between others.",
        A + bytes(len(A)) + B + END,
        bad("archive", SA, at=4096),
    )
    add(
        "first-zeros",
        "Zeros before the first member.",
        bytes(4 * BLOCK) + AB + END,
        bad("archive", at=2048),
        good(SA, SB),
    )
    add(
        "header-magic",
        "A magic that is none, under a right checksum: read as Version 7, or refused.",
        member("a.txt", "one", magic=b"USTAR\x0000") + END,
        good(s("a", txt="one")),
        bad("archive"),
    )
    add("junk-between", "A block of junk between two members.", A + b"junk".ljust(BLOCK) + B + END, between)
    add(
        "junk-first",
        "A block of junk before the first member.",
        b"junk".ljust(BLOCK) + AB + END,
        bad("archive", SA, SB, at=0),
    )
    add("shifted", "A byte that was inserted shifts all that follows.", data[: at + 10] + b"x" + data[at + 10 :], after)
    add(
        "byte-lost",
        "A byte that was lost shifts all that follows.",
        data[: BLOCK + 2] + data[BLOCK + 3 :],
        bad("archive", at=2 * BLOCK),
    )
    add(
        "crlf",
        "A transfer in text mode makes two bytes of a newline.",
        (member("a.txt", "one\ntwo") + member("a.cls", "1") + END).replace(b"\n", b"\r\n"),
        bad("archive", at=2 * BLOCK),
    )
    add(
        "block-lost",
        "A block that was lost, of a member's data.",
        data[: at + BLOCK] + data[at + 2 * BLOCK :],
        bad("archive", SA, at=3072),
    )
    add(
        "block-twice",
        "A block that was written twice, a header.",
        data[: at + BLOCK] + data[at:],
        bad("archive", SA, at=3072),
    )
    add(
        "blocks-swapped",
        "The header and the data of a member were swapped.",
        data[:at] + data[at + BLOCK : at + 2 * BLOCK] + data[at : at + BLOCK] + data[at + 2 * BLOCK :],
        after,
    )
    for name, why, body in (
        ("pax-length-large", "A record that is longer than its header.", b"99 path=a.txt\n"),
        ("pax-length-small", "A record that ends before its newline.", b"9 path=a.txt\n"),
        ("pax-length-0", "A record of no bytes would be read for ever.", b"0 path=a.txt\n"),
        ("pax-length-letters", "A record whose length is no number.", b"xx path=a.txt\n"),
        ("pax-length-huge", "A length of many digits.", b"9" * 40 + b" path=a.txt\n"),
        ("pax-no-newline", "A record without its newline.", record("path", "a.txt")[:-1] + b"x"),
        ("pax-no-equals", "A record without an equals sign.", b"14 path:a.txt\n"),
        ("pax-no-space", "A record without the space after its length.", b"14path=a.txt\n"),
        ("pax-zeros", "Zeros where records should be.", bytes(40)),
        ("pax-path-nul", "A NUL in a path: what follows it would be lost.", record("path", "a.txt\0b")),
        ("pax-size-letters", "A size that is no number.", record("size", "three")),
        ("pax-size-negative", "A negative size.", record("size", "-3")),
        ("pax-size-huge", "A size larger than any archive.", record("size", "9" * 30)),
        ("pax-size-empty", "An empty size deletes the record by POSIX; some readers refuse it.", record("size", "")),
    ):
        outcomes = [bad("archive", SA, at=len(A)), *([good(SA, s("c", txt="two"))] if name == "pax-size-empty" else [])]
        add(name, why, A + member("PaxHeader/c", body, kind=b"x") + member("c.txt", "two") + END, *outcomes)
    add(
        "pax-header-bit",
        "A flipped bit in the header of an extended header.",
        flipped(A + pax(("path", "c.txt")) + member("x.y", "two") + END, at),
        after,
    )
    add(
        "pax-header-huge",
        "An extended header of 4 GiB would fill the memory.",
        A + header("PaxHeader", 1 << 32, kind=b"x") + B + END,
        between,
    )
    add(
        "long-name-huge",
        "A long name of 4 GiB would fill the memory.",
        A + header("././@LongLink", 1 << 32, kind=b"L", magic=GNU) + B + END,
        between,
    )
    add(
        "long-name-size-letters",
        "A long name whose size is no number.",
        A + header("././@LongLink", b"letters", kind=b"L", magic=GNU) + B + END,
        between,
    )
    add("name-empty", "A member without a name.", A + member("", "one") + B + END, between)
    add(
        "size-huge",
        "A member of 8 EiB.",
        A + header("c.txt", b"\x80\0\0\0" + ((1 << 63) - 1).to_bytes(8, "big")) + B + END,
        bad("archive", SA, SB, at=at),
    )
    add(
        "size-64-bits",
        "A size that is negative as a signed number of 64 bits.",
        A + header("c.txt", b"\x80\0\0\0" + b"\xff" * 8) + B + END,
        bad("archive", SA, SB, at=at),
    )
    add(
        "size-wraps",
        "A size that, rounded up to blocks, is 0 in 64 bits.",
        A + header("c.txt", b"\x80\0\0\0" + b"\xff" * 7 + b"\x01") + B + END,
        bad("archive", SA, SB, at=at),
    )
    for name, why, content in (
        (
            "not-html",
            "A page of HTML, as servers send for what they do not find.",
            b"<!DOCTYPE html><html><body>404</body></html>",
        ),
        ("not-json", "An error of an object store.", b'{"error": "AccessDenied"}'),
        (
            "not-lfs",
            "A pointer of Git LFS.",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 10240\n" % 7,
        ),
        ("not-zip", "A zip file.", b"PK\3\4\x14\0\0\0\0\0" + bytes(600)),
        ("not-text", "A text of more than a block.", b"Nothing is lost silently.\n" * 50),
        ("not-png", "An image.", b"\x89PNG\r\n\x1a\n" + bytes(600)),
        ("not-short", "A file that is shorter than a header.", b"x"),
        ("not-compress", "A file of compress, which is none of the compressions in use.", b"\x1f\x9d\x90" + bytes(600)),
    ):
        add(name, why, content, bad("archive", at=0))
    add(
        "sparse-map-cut",
        "A map of a sparse member that does not end.",
        A + sparse_endless() + B + END,
        bad("sample", SA, at=len(A)),
    )


def sparse_endless() -> bytes:
    """Return a header of GNU's old sparse format that announces more blocks of its map, and none of them."""
    entry = octal(0) + octal(3)
    block = changed(header("c.bin", 3, kind=b"S", magic=GNU), 386, entry * 4)
    return seal(changed(changed(block, 482, b"\1"), 483, octal(3))) + filled(b"one")


def concatenations() -> None:
    def add(name, why, archive, *outcomes):
        case("concatenation", name, why, archive, *outcomes)

    both = good(SA, SB)
    half = bad("archive", SA, at=len(A) + 2 * BLOCK)
    add(
        "cat",
        "cat joins archives with zeros between: all members, or an error, but never the first archive alone.",
        A + END + B + END,
        half,
        bad("archive"),
        both,
    )
    add(
        "cat-records",
        "cat joins archives whose records are filled.",
        (A + END).ljust(20 * BLOCK, b"\0") + (B + END).ljust(20 * BLOCK, b"\0"),
        bad("archive", SA, at=20 * BLOCK),
        both,
    )
    add(
        "cat-one-block",
        "One block of zeros between two archives.",
        A + bytes(BLOCK) + B + END,
        bad("archive", SA, at=2560),
        both,
    )
    c = member("c.txt", "three")
    add(
        "cat-three",
        "Three archives, one after the other.",
        A + END + B + END + c + END,
        half,
        bad("archive"),
        good(SA, SB, s("c", txt="three")),
    )
    add("cat-empty-first", "An archive after an empty one.", END + A + END, bad("archive", at=2 * BLOCK), good(SA))
    add("cat-empty-last", "An empty archive after another is nothing but zeros.", A + END + END, good(SA))
    add(
        "cat-in-sample",
        "A sample that continues in the next archive.",
        A[: 2 * BLOCK] + END + A[2 * BLOCK :] + END,
        bad("archive", s("a", txt="one"), at=2048),
        good(SA),
    )
    add(
        "cat-same-key",
        "A key that occurs in both archives.",
        A + END + member("a.txt", "new") + END,
        half,
        bad("archive", SA),
        good(SA, s("a", txt="new")),
    )
    add(
        "cat-dialects",
        "Archives of two dialects.",
        A + END + gnu_long("b.txt") + member("x", "two", magic=GNU) + pax(("path", "b.cls")) + member("y", "2") + END,
        half,
        bad("archive"),
        both,
    )
    add(
        "cat-link",
        "A link whose target is in the archive before.",
        A + END + link("b.txt", "a.txt") + END,
        half,
        bad("archive", SA),
        good(SA, s("b", txt="one")),
    )
    add("cat-no-zeros", "tar -A, and dd, join archives without zeros between.", A + B + END, both)
    add("cat-damaged", "The second archive is damaged.", A + END + flipped(B, 3) + END, bad("archive", SA, at=3072))
    add(
        "cat-symlink-later",
        "A symbolic link into the archive after.",
        symlink("b.txt", "a.txt") + END + member("a.txt", "one") + END,
        bad("archive", s("b", txt="one"), at=1536),
        good(s("b", txt="one"), s("a", txt="one")),
    )
