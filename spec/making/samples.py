"""Cases of keys, fields, and the expressions that name shards."""

from __future__ import annotations

from making.case import AB, PLAIN, SA, SB, A, B, bad, case, good, s
from making.pieces import BLOCK, END, header, member, pax


def keys() -> None:
    def add(name, why, names, *outcomes):
        """Add an archive whose members have these *names*, and their numbers from 0 as data."""
        members = [
            pax(("path", each)) + member("x", str(i)) if not each.isascii() or len(each) > 100 else member(each, str(i))
            for i, each in enumerate(names)
        ]
        case("key", name, why, b"".join(members) + END, *outcomes)

    add(
        "key-first-dot",
        "The first dot of the file's name ends the key.",
        ["a.seg.png", "a.txt"],
        s("a", {"seg.png": "0"}, txt="1"),
    )
    add("key-dots-in-folder", "Dots of folders belong to the key.", ["v1.0/a.b/c.txt"], s("v1.0/a.b/c", txt="0"))
    add(
        "key-folders",
        "The same file name in two folders is two keys.",
        ["d/a.txt", "e/a.txt"],
        s("d/a", txt="0"),
        s("e/a", txt="1"),
    )
    add("key-case", "Keys keep their case, and differ by it.", ["A.txt", "a.txt"], s("A", txt="0"), s("a", txt="1"))
    add("key-no-extension", "A member without a dot belongs to no sample.", ["README", "a.txt"], s("a", txt="1"))
    add(
        "key-no-extension-between",
        "A member without a key does not split a sample.",
        ["a.txt", "README", "a.cls"],
        s("a", txt="0", cls="2"),
    )
    add(
        "key-dot-only-in-folder",
        "A dot in a folder makes no field of a file without one.",
        ["v1.0/README", "a.txt"],
        s("a", txt="1"),
    )
    add("key-hidden", "A hidden file has no key.", [".hidden", "a.txt"], s("a", txt="1"))
    add(
        "key-hidden-extension",
        "A hidden file with an extension has no key either.",
        [".hidden.txt", "d/.x.txt", "a.txt"],
        good(s("a", txt="2")),
        good(s("d/", {"x.txt": "1"}), s("a", txt="2")),
    )
    add("key-hidden-folder", "A hidden folder is part of a key like any other.", [".d/a.txt"], s(".d/a", txt="0"))
    add(
        "key-hidden-between",
        "A hidden file does not split a sample.",
        ["a.txt", "._a.cls", "a.cls"],
        s("a", txt="0", cls="2"),
    )
    add(
        "key-reserved-folder",
        "A component __x__ marks members that belong to no sample.",
        ["__meta__/a.txt", "d/__x__/b.txt", "a.txt"],
        good(s("a", txt="2")),
        good(s("d/__x__/b", txt="1"), s("a", txt="2")),
        good(s("__meta__/a", txt="0"), s("d/__x__/b", txt="1"), s("a", txt="2")),
    )
    add(
        "key-reserved-file",
        "A file __x__ without an extension belongs to no sample.",
        ["__info__", "a.txt"],
        s("a", txt="1"),
    )
    add(
        "key-reserved-half",
        "Two underscores at one end reserve nothing.",
        ["__a.txt", "b__.txt", "c/__d/e.txt"],
        s("__a", txt="0"),
        s("b__", txt="1"),
        s("c/__d/e", txt="2"),
    )
    add(
        "key-reserved-extension",
        "A component is the whole name between slashes: __a__.txt is none of that form.",
        ["__a__.txt"],
        s("__a__", txt="0"),
    )
    add("key-dot-slash", "Keys keep the ./ of their names.", ["./a.txt", "./a.cls"], s("./a", txt="0", cls="1"))
    add(
        "key-dot-slash-differs",
        "Names with and without ./ are two keys.",
        ["./a.txt", "a.cls"],
        s("./a", txt="0"),
        s("a", cls="1"),
    )
    add("key-absolute", "Keys keep the slash that begins them.", ["/d/a.txt"], s("/d/a", txt="0"))
    add(
        "key-double-slash",
        "Keys are not normalized: two slashes stay.",
        ["d//a.txt", "d/a.txt"],
        s("d//a", txt="0"),
        s("d/a", txt="1"),
    )
    add("key-parent", "Keys are names, no paths to be followed: .. stays.", ["d/../a.txt"], s("d/../a", txt="0"))
    add("key-backslash", "A backslash is a character like others.", ["d\\a.txt"], s("d\\a", txt="0"))
    add("key-space", "Keys may have spaces, also at their ends.", [" a b .txt"], s(" a b ", txt="0"))
    add("key-newline", "Keys may have control characters.", ["a\tb\nc.txt"], s("a\tb\nc", txt="0"))
    add(
        "key-quotes",
        "Keys may have quotes, and what shells and JSON treat specially.",
        ["a\"b'c$d*{1,2}.txt"],
        s("a\"b'c$d*{1,2}", txt="0"),
    )
    add(
        "key-unicode",
        "Keys may be in any script.",
        ["日本語.txt", "ключ.txt", "🙂.txt"],
        s("日本語", txt="0"),
        s("ключ", txt="1"),
        s("🙂", txt="2"),
    )
    add(
        "key-normalization",
        "Composed and decomposed letters are two keys: names are not normalized.",
        ["\u00e9.txt", "e\u0301.txt"],
        s("\u00e9", txt="0"),
        s("e\u0301", txt="1"),
    )
    add(
        "key-number",
        "A key that is a number stays text.",
        ["000123.txt", "123.txt"],
        s("000123", txt="0"),
        s("123", txt="1"),
    )
    add("key-long", "A key of a thousand bytes.", ["k" * 1000 + ".txt"], s("k" * 1000, txt="0"))
    add("key-deep", "A key of many folders.", ["d/" * 200 + "a.txt"], s("d/" * 200 + "a", txt="0"))
    add(
        "key-prefix-of-other",
        "A key may be the beginning of another.",
        ["a.txt", "a/b.txt", "ab.txt"],
        s("a", txt="0"),
        s("a/b", txt="1"),
        s("ab", txt="2"),
    )
    add(
        "key-order",
        "Samples come in the order of the archive, not of their keys.",
        ["c.txt", "a.txt", "b.txt"],
        s("c", txt="0"),
        s("a", txt="1"),
        s("b", txt="2"),
    )
    add(
        "key-other-fields",
        "Samples may have different fields.",
        ["a.txt", "b.cls", "c.txt", "c.cls"],
        s("a", txt="0"),
        s("b", cls="1"),
        s("c", txt="2", cls="3"),
    )
    add(
        "key-many-fields",
        "A sample may have many fields.",
        [f"a.f{i}" for i in range(70)],
        s("a", {f"f{i}": str(i) for i in range(70)}),
    )
    add(
        "key-dots-merge",
        "Dots in file names merge what was meant as many samples into one: by the rule it is one.",
        [f"img_0.{i:06d}.jpg" for i in range(4)],
        s("img_0", {f"{i:06d}.jpg": str(i) for i in range(4)}),
    )
    add(
        "key-interleaved",
        "Members of two samples in turn: half samples must not be delivered silently.",
        ["a.txt", "b.txt", "a.cls", "b.cls"],
        bad("sample", s("a", txt="0"), s("b", txt="1"), at=4 * BLOCK),
        good(s("a", txt="0", cls="2"), s("b", txt="1", cls="3")),
    )
    add(
        "key-by-field",
        "An archive sorted by field: every sample would come apart.",
        ["a.jpg", "b.jpg", "a.txt", "b.txt"],
        bad("sample", s("a", jpg="0"), s("b", jpg="1"), at=4 * BLOCK),
        good(s("a", jpg="0", txt="2"), s("b", jpg="1", txt="3")),
    )
    add(
        "key-again",
        "A key that occurs again later: a second sample, or a fault, but not nothing.",
        ["a.txt", "a.cls", "b.txt", "a.txt", "a.cls"],
        bad("sample", s("a", txt="0", cls="1"), s("b", txt="2"), at=6 * BLOCK),
        good(s("a", txt="0", cls="1"), s("b", txt="2"), s("a", txt="3", cls="4")),
    )
    add(
        "key-again-one-field",
        "A field of an earlier sample that comes late.",
        ["a.txt", "b.txt", "a.cls"],
        bad("sample", s("a", txt="0"), s("b", txt="1"), at=4 * BLOCK),
        good(s("a", txt="0", cls="2"), s("b", txt="1")),
    )


def fields() -> None:
    def add(name, why, names, *outcomes):
        members = [
            pax(("path", each)) + member("x", str(i)) if not each.isascii() else member(each, str(i))
            for i, each in enumerate(names)
        ]
        case("field", name, why, b"".join(members) + END, *outcomes)

    add(
        "field-upper-case",
        "Fields are in lower case.",
        ["a.JPG", "a.Seg.PNG"],
        good(s("a", {"seg.png": "1"}, jpg="0")),
        good(s("a", {"Seg.PNG": "1"}, JPG="0")),
    )
    add(
        "field-unicode-case",
        "Letters that are not ASCII have a lower case too.",
        ["a.ÄÖ"],
        good(s("a", {"äö": "0"})),
        good(s("a", {"ÄÖ": "0"})),
    )
    add(
        "field-case-twice",
        "Two fields that differ by their case are one field twice.",
        ["a.txt", "a.TXT"],
        bad("sample", at=2 * BLOCK),
        good(s("a", txt="0", TXT="1")),
    )
    add(
        "field-twice",
        "A field that occurs twice in a sample: neither of the two may be lost silently.",
        ["a.txt", "a.txt", "b.txt"],
        bad("sample", s("b", txt="2"), at=2 * BLOCK),
    )
    add(
        "field-twice-apart",
        "A field that occurs twice, with another between.",
        ["a.txt", "a.cls", "a.txt", "b.txt"],
        bad("sample", s("b", txt="3"), at=4 * BLOCK),
    )
    add(
        "field-empty",
        "A name may end in its dot: the field is empty.",
        ["a.", "a.txt"],
        good(s("a", {"": "0"}, txt="1")),
        good(s("a", txt="1")),
        bad("sample"),
    )
    add("field-two-dots", "A field may begin with a dot.", ["a..txt"], s("a", {".txt": "0"}))
    add("field-dots", "A field may have many dots.", ["a.b.c.d.e"], s("a", {"b.c.d.e": "0"}))
    add("field-space", "A field may have spaces.", ["a.my field.txt"], s("a", {"my field.txt": "0"}))
    add("field-number", "A field may be a number.", ["a.0", "a.1", "a.10"], s("a", {"0": "0", "1": "1", "10": "2"}))
    add(
        "field-gz",
        "A field .gz is delivered as it is stored: decoding is another step.",
        ["a.txt.gz"],
        s("a", {"txt.gz": "0"}),
    )
    add(
        "field-json-broken",
        "A field .json that is none is bytes until somebody decodes it.",
        ["a.json"],
        s("a", json="0"),
    )
    add(
        "field-key",
        "A field __key__ contends with the entry of every sample.",
        ["a.__key__", "a.txt"],
        bad("sample", at=0),
        good(s("a", txt="1")),
    )
    add(
        "field-url",
        "A field __url__ contends with the entry of every sample.",
        ["a.__url__", "a.txt"],
        bad("sample", at=0),
        good(s("a", txt="1")),
    )
    add("field-long", "A field may be as long as a name.", ["a." + "f" * 90], s("a", {"f" * 90: "0"}))
    add(
        "field-underscore",
        "Underscores and hyphens are parts of fields.",
        ["a.my_field-1.txt"],
        s("a", {"my_field-1.txt": "0"}),
    )
    add("field-only-cls", "A sample may have a single field of one byte.", ["a.cls"], s("a", cls="0"))
    add("field-sharp-s", "Lower case is not case folding: ß stays.", ["a.maß"], s("a", {"maß": "0"}))
    case(
        "field",
        "field-binary",
        "All bytes are data.",
        member("a.bin", bytes(range(256))) + END,
        s("a", bin=bytes(range(256))),
    )
    case(
        "field",
        "field-utf16",
        "Texts are bytes until they are decoded.",
        member("a.txt", "\ufeffé".encode("utf-16-le")) + END,
        s("a", txt="\ufeffé".encode("utf-16-le")),
    )
    case(
        "field",
        "field-empty-data",
        "A field without bytes is a field.",
        member("a.txt", "") + B + END,
        s("a", txt=""),
        SB,
    )
    case(
        "field",
        "field-directory",
        "A directory a.x/ is no field of the sample a.",
        member("a.txt", "one") + header("a.x/", 0, kind=b"5") + END,
        s("a", txt="one"),
    )


def expressions() -> None:
    def shards(*names):
        """Return shards of one sample each, whose key and data are a shard's number."""
        return {name: member(f"{i}.txt", f"shard {i}") + END for i, name in enumerate(names)}

    def numbered(*numbers):
        return [s(str(number), txt=f"shard {number}") for number in numbers]

    def add(name, why, read, names, *outcomes):
        case("expression", name, why, shards(*names), *outcomes, read=read)

    three = ["s-000.tar", "s-001.tar", "s-002.tar"]
    add("braces-range", "A range of numbers of one length.", "s-{000..002}.tar", three, *numbered(0, 1, 2))
    add("braces-part", "A range may name a part of the files.", "s-{001..002}.tar", three, *numbered(1, 2))
    add("braces-one", "A range of one number.", "s-{001..001}.tar", three, *numbered(1))
    add(
        "braces-plain-numbers",
        "Numbers without leading zeros have no fixed length.",
        "s-{8..10}.tar",
        ["s-8.tar", "s-9.tar", "s-10.tar"],
        *numbered(0, 1, 2),
    )
    add(
        "braces-zeros",
        "A leading zero gives all numbers one length.",
        "s-{08..10}.tar",
        ["s-08.tar", "s-09.tar", "s-10.tar"],
        *numbered(0, 1, 2),
    )
    add(
        "braces-zeros-right",
        "The longer of the two ends gives the length, as in bash.",
        "s-{0..010}.tar",
        [f"s-{i:03d}.tar" for i in range(11)],
        good(*numbered(*range(11))),
        bad("open"),
    )
    add(
        "braces-step",
        "A range may have a step.",
        "s-{0..4..2}.tar",
        ["s-0.tar", "s-2.tar", "s-4.tar"],
        good(*numbered(0, 1, 2)),
        bad("expression"),
    )
    add(
        "braces-down",
        "A range may run downwards.",
        "s-{002..000}.tar",
        three,
        good(*numbered(2, 1, 0)),
        bad("expression"),
    )
    add(
        "braces-letters",
        "A range of letters.",
        "s-{a..c}.tar",
        ["s-a.tar", "s-b.tar", "s-c.tar"],
        good(*numbered(0, 1, 2)),
        bad("expression"),
    )
    add("braces-list", "A list of alternatives.", "s-{train,val}.tar", ["s-train.tar", "s-val.tar"], *numbered(0, 1))
    add(
        "braces-list-order",
        "Alternatives come in their order.",
        "s-{val,train}.tar",
        ["s-train.tar", "s-val.tar"],
        *numbered(1, 0),
    )
    add("braces-list-twice", "A shard that is named twice is read twice.", "s-{a,a}.tar", ["s-a.tar"], *numbered(0, 0))
    add("braces-empty-alternative", "An alternative may be empty.", "s{,-b}.tar", ["s.tar", "s-b.tar"], *numbered(0, 1))
    add("braces-nested", "Braces in braces.", "s-{a,{0..1}}.tar", ["s-a.tar", "s-0.tar", "s-1.tar"], *numbered(0, 1, 2))
    add(
        "braces-product",
        "Two braces make a product; the last one runs fastest.",
        "s{0..1}-{0..1}.tar",
        ["s0-0.tar", "s0-1.tar", "s1-0.tar", "s1-1.tar"],
        *numbered(0, 1, 2, 3),
    )
    add("braces-folder", "Braces may be in a folder's name.", "{d,e}/s.tar", ["d/s.tar", "e/s.tar"], *numbered(0, 1))
    add(
        "braces-unbalanced",
        "A brace without its partner: no shell and no reader agrees; nothing must not be read in silence.",
        "s-{000..002.tar",
        three,
        bad("expression"),
    )
    add(
        "braces-missing-shard",
        "A shard that is missing is an error, not one shard less.",
        "s-{000..003}.tar",
        three,
        bad("open", *numbered(0, 1, 2)),
    )
    add(
        "braces-many",
        "A range of a hundred million: refused, or the first missing shard is an error, in bounded time and memory.",
        "s-{00000000..99999999}.tar",
        ["s-00000000.tar"],
        bad("expression", *numbered(0)),
    )
    add("missing", "A file that does not exist.", "nothing.tar", three, bad("open"))
    add("name-space", "A file may have spaces in its name.", "my set.tar", ["my set.tar"], *numbered(0))
    add("name-comma", "A comma outside braces is a character.", "a,b.tar", ["a,b.tar"], *numbered(0))
    add("name-unicode", "A file's name may be in any script.", "日本.tar", ["日本.tar"], *numbered(0))
    add("name-percent", "A percent sign in a path is no escape.", "a%20b.tar", ["a%20b.tar"], *numbered(0))
    add("name-no-suffix", "What is read is no question of the suffix.", "archive.bin", ["archive.bin"], *numbered(0))
    add("name-dots", "A name of many dots.", "set.v1.0.tar", ["set.v1.0.tar"], *numbered(0))
    case(
        "expression",
        "key-in-two-shards",
        "A key may occur in two shards: two samples.",
        {"s-0.tar": A + END, "s-1.tar": member("a.txt", "new") + END},
        SA,
        s("a", txt="new"),
        read="s-{0..1}.tar",
    )
    case(
        "expression",
        "key-over-two-shards",
        "A sample does not continue in the next shard, also with the same key.",
        {"s-0.tar": A[: 2 * BLOCK] + END, "s-1.tar": A[2 * BLOCK :] + END},
        s("a", txt="one"),
        s("a", cls="1"),
        read="s-{0..1}.tar",
    )
    case(
        "expression",
        "damage-in-first-shard",
        "The second shard does not hide that the first is cut.",
        {"s-0.tar": AB[: len(A) + BLOCK + 1], "s-1.tar": PLAIN},
        bad("archive", SA, SA, SB, at=len(A)),
        read="s-{0..1}.tar",
    )
    case(
        "expression",
        "empty-shard-between",
        "A shard without samples does not end an epoch.",
        {"s-0.tar": A + END, "s-1.tar": END, "s-2.tar": B + END},
        SA,
        SB,
        read="s-{0..2}.tar",
    )
