"""Tables that preserve every byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarshards.errors import SampleError
from tarshards.samples.lines import escape, unescape
from tarshards.verbs.table import tabulate

SAMPLES = [
    {"__key__": "a", "__url__": "x.tar", "cls": b"1", "txt": b"one"},
    {"__key__": "b", "__url__": "x.tar", "cls": b"2", "txt": b"two\n"},
]
CELLS = st.binary() | st.text().map(str.encode) | st.text(r"\xnrt0af ü").map(str.encode)


@given(CELLS)
def test_unescape_inverts_escape(data):
    text = escape(data)
    assert unescape(text) == data
    assert not any(ord(c) < 32 for c in text)


@given(st.lists(st.tuples(CELLS, CELLS)))
def test_a_table_parses_back(rows):
    samples = [{"__key__": f"k{i}", "a": a, "b.c": b} for i, (a, b) in enumerate(rows)]
    text = "".join(line + "\n" for line in tabulate(samples, "a b.c"))
    header, *lines = [line.split("\t") for line in text.split("\n")[:-1]]
    assert header == ["__key__", "a", "b.c"]
    for (key, *cells), sample in zip(lines, samples, strict=True):
        assert key == sample["__key__"]
        for cell, data in zip(cells, (sample["a"], sample["b.c"]), strict=True):
            found = unescape(cell)
            assert data in (found, found + b"\n", found + b"\r\n")


def test_ordinary_text_stays_as_it_is():
    assert escape('{"ü": [1, "数"]}'.encode()) == '{"ü": [1, "数"]}'


@pytest.mark.parametrize("text", ["a\\", r"\N", r"\x0", r"\xFF", r"\u0041", "\\\n"])
def test_what_escape_never_writes(text):
    with pytest.raises(ValueError, match="not an escape"):
        unescape(text)


def test_all_fields():
    assert list(tabulate(SAMPLES)) == ["__key__\tcls\ttxt", "a\t1\tone", "b\t2\ttwo"]


@pytest.mark.parametrize(
    ("field", "data", "cell"),
    [
        ("cls", b"3\n", "3"),
        ("id", b"3\r\n", "3"),
        ("seg.count", b"12\n", "12"),
        ("txt", b"two\n", "two"),
        ("caption.text", b"two\nlines\n\n", r"two\nlines\n"),
        ("cls", b"\n", ""),
        ("cls", b" 3", " 3"),
        ("size", b"670\n", "670"),
        ("size", "ü\r\n".encode(), "ü"),
        ("raw", b"two\nlines\n", r"two\nlines\n"),
        ("raw", b"\x01\n", r"\x01\n"),
        ("raw", b"\xff\n", r"\xff\n"),
        ("bin", b"3\n", r"3\n"),
        ("flac", b"3\n", r"3\n"),
        ("json", b"3\n", r"3\n"),
        ("jpg", b"\xff\n", r"\xff\n"),
    ],
)
def test_the_newline_that_ends_a_text_or_a_number_is_left_out(field, data, cell):
    assert list(tabulate([{"__key__": "a", field: data}], header=False, key=False)) == [cell]


def test_columns_renames_and_alternatives():
    samples = [{"__key__": "a", "jpg": b"J", "cls": b"1"}, {"__key__": "b", "png": b"P", "jpg": b"Q", "cls": b"2"}]
    assert list(tabulate(samples, "png;jpg label:cls")) == ["__key__\tpng;jpg\tlabel", "a\tJ\t1", "b\tP\t2"]
    assert list(tabulate(samples[:1], "image:jpg *")) == ["__key__\timage\tcls", "a\tJ\t1"]


def test_no_header_no_key():
    assert list(tabulate(SAMPLES, "cls", header=False, key=False)) == ["1", "2"]


def test_no_samples():
    assert list(tabulate([], "cls")) == ["__key__\tcls"]
    assert list(tabulate([])) == []


def test_a_missing_field():
    samples = [*SAMPLES, {"__key__": "c", "__url__": "y.tar", "cls": b"3"}]
    with pytest.raises(SampleError, match=r"y\.tar: c: no field txt; the sample has cls"):
        list(tabulate(samples))
    assert list(tabulate(samples, missing=r"\N"))[-1] == "c\t3\t\\N"


def test_a_field_without_a_column_is_not_lost():
    samples = [*SAMPLES, {**SAMPLES[0], "__key__": "c", "json": b"{}"}]
    for missing in (None, ""):
        with pytest.raises(SampleError, match=r"c\.json: this field has no column"):
            list(tabulate(samples, missing=missing))
    assert len(list(tabulate(samples, "cls"))) == 4
    with pytest.raises(SampleError, match=r"d\.jpg"):
        list(tabulate([{"__key__": "d", "png": b"", "jpg": b""}], "png;jpg *"))


def test_rejected_samples_leave_the_rest():
    rejected = []
    samples = [SAMPLES[0], {"__key__": "c", "cls": b"3"}, SAMPLES[1]]
    lines = tabulate(samples, reject=lambda sample, error: rejected.append((sample["__key__"], error.reason)))
    assert list(lines)[1:] == ["a\t1\tone", "b\t2\ttwo"]
    assert rejected == [("c", "no field txt; the sample has cls")]


@pytest.mark.parametrize("fields", ["cls cls", "a:cls a:txt", ""])
def test_bad_columns(fields):
    with pytest.raises(ValueError, match=r"twice|empty"):
        tabulate(SAMPLES, fields)


def test_a_rename_onto_another_column():
    with pytest.raises(SampleError, match=r"a\.cls: two columns"):
        list(tabulate(SAMPLES, "cls:txt *"))


def test_a_mark_of_missing_fields_that_would_break_the_line():
    with pytest.raises(ValueError, match="part of a line"):
        tabulate(SAMPLES, missing="\t")


def test_odd_keys_and_values():
    samples = [{"__key__": "a\tb\udcff", "json": {"a": 1}}]
    assert list(tabulate(samples, header=False)) == ['a\\tb\\xff\t{"a": 1}']
