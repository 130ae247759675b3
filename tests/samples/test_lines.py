"""Lines come with their locations, also from compressed files, and errors name these."""

from __future__ import annotations

import gzip

import pytest

from tarshards.errors import DecodeError, OpenError, SampleError
from tarshards.samples.lines import checked, located, numbered_lines, open_text


def test_every_line_has_its_place(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("one\n\nthrée\u2028still three\r\nlast".encode()))
    assert list(numbered_lines(str(path))) == [
        (f"{path}: line 1", "one"),
        (f"{path}: line 2", ""),
        (f"{path}: line 3", "thrée\u2028still three\r"),
        (f"{path}: line 4", "last"),
    ]


def test_what_is_no_text_is_told_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    lines = numbered_lines(str(tmp_path / "a.txt"))
    assert next(lines)[1] == "one"
    with pytest.raises(DecodeError, match=r"a\.txt: line 2: not UTF-8"):
        next(lines)
    with pytest.raises(OpenError):
        next(numbered_lines(str(tmp_path / "none")))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_part_of_a_text_has_the_bytes_between_its_ends(tmp_path, encoding, pack):
    text = "".join(f"line {n}: \u010a\n" for n in range(500))
    (tmp_path / "a.txt").write_bytes(pack(text.encode(encoding)))
    for begin, end in [(0, 4), (3, 4000), (2000, 2000), (4000, None), (5000, 10**6)]:
        with open_text(str(tmp_path / "a.txt"), begin, end) as part:
            assert part.read() == text.encode()[begin:end]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_says_the_encoding_of_lines(tmp_path, encoding, pack):
    text = "".join(f"line {n}: \u010a\U0001f600\n" for n in range(5000)) + "last"
    (tmp_path / "a.txt").write_bytes(pack(text.encode(encoding)))
    assert [line for _, line in numbered_lines(str(tmp_path / "a.txt"))] == text.split("\n")


@pytest.mark.parametrize("data", [b"\xef", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"a", b""])
def test_texts_shorter_than_a_mark(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    lines = numbered_lines(str(tmp_path / "a.txt"))
    if data in (b"\xef", b"\xff"):
        with pytest.raises(DecodeError, match=r"a\.txt: line 1: not UTF-8"):
            next(lines)
    else:
        assert [line for _, line in lines] == (["a"] if data == b"a" else [])


def test_text_that_is_not_what_its_mark_says_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfea\0b")
    with pytest.raises(DecodeError, match=r"a\.txt: not in the encoding of its byte order mark"):
        list(numbered_lines(str(tmp_path / "a.txt")))


def test_errors_name_the_place_first():
    with pytest.raises(SampleError, match=r"^a: line 7: not 1$"), located("a: line 7"):
        raise ValueError("not 1")
    with pytest.raises(OpenError, match=r"^a: line 7: b\.jpg: gone$"), located("a: line 7"):
        raise OpenError("gone", url="b.jpg")


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"__key__": "a"}, "line 2: a: a sample without fields cannot be written"),
        ({"__key__": "a.b", "txt": b""}, r"line 2: a\.b\.txt: the name 'a\.b\.txt' would read back as"),
        ({"__key__": "first", "txt": b""}, "line 2: first: duplicate key"),
    ],
)
def test_what_is_no_sample_is_told_with_its_line(sample, reason):
    samples = checked([{"__key__": "first", "__url__": "line 1", "txt": b""}, {**sample, "__url__": "line 2"}])
    assert next(samples)["__key__"] == "first"
    with pytest.raises(SampleError, match=reason):
        next(samples)
