"""Listings, previews, summaries and contact sheets, safe for terminals and browsers with any data."""

from __future__ import annotations

import io
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tarshards.errors import visible
from tarshards.samples.codecs import encode_field
from tarshards.verbs.show import Summary, draw_pictures, list_sample, preview

VALUES = {
    "txt": ("seven\n", '"seven\\n"'),
    "cls": (7, "7"),
    "json": ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'),
    "json.gz": ({"a": 1}, '{"a": 1}'),
    "mp": ({"a": b"123"}, '{"a": "3 bytes"}'),
    "npy": (np.zeros((3, 4), "f4"), "float32 3x4"),
    "x.npy": (np.float64(3), "float64 scalar"),
    "npz": ({"a": np.zeros(2, "u1")}, '{"a": "uint8 2"}'),
    "ten": ([np.zeros((2, 2), "f2")], '["float16 2x2"]'),
    "png": (np.zeros((5, 7), "u1"), "7x5 L"),
    "seg.jpg": (np.zeros((5, 7, 3), "u1"), "7x5 RGB"),
    "raw": (b"\0\1", ""),
    "size": (b"670\n", '"670\\n"'),
    "x.html": ("<p>ü\t</p>\r\n".encode(), '"<p>ü\\t</p>\\r\\n"'),
    "latin": (b"caf\xe9", ""),
    "long": ("ü".encode() * 100, '"' + "ü" * 60 + '"…'),
    "cut": (b"x" + "ü".encode() * 200, '"x' + "ü" * 59 + '"…'),
    "late": (b"x" * 247 + b"\xff", ""),
    "bin": (b"text", ""),
    "mp3": (b"ID3", ""),
    "mp4": (b"ftyp", ""),
    "txt.gz": (b"", "<not gzip data>"),
    "none": (b"", ""),
    "pkl": (b"\x80\x04K\x07.", ""),
}


def encode(field, value):
    return encode_field(field, value)


@pytest.mark.parametrize("field", VALUES)
def test_previews(field):
    value, seen = VALUES[field]
    assert preview(field, encode(field, value)) == seen


def test_a_preview_is_the_beginning_of_what_is_long():
    assert preview("txt", b"x" * 61) == '"' + "x" * 60 + '"…'
    assert preview("txt", b"x" * 60) == '"' + "x" * 60 + '"'
    assert preview("json", b"[" + b"1," * 100 + b"1]", limit=10) == "[1, 1, 1, …"


@pytest.mark.parametrize("field", ["txt", "cls", "json", "npy", "npz", "ten", "png", "jpg", "mp", "json.gz"])
def test_what_does_not_decode_says_why(field):
    seen = preview(field, b"\xff\xfe damage")
    assert seen.startswith("<")
    assert seen.endswith(">")


def test_the_size_of_a_huge_image_is_read_without_its_pixels(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    assert preview("png", encode("png", np.zeros((7, 7), "u1"))) == "7x7 L"
    assert preview("png", encode("png", np.zeros((99, 99), "u1"))).startswith("<")


@given(st.text(), st.sampled_from(sorted(VALUES)), st.binary() | st.text().map(lambda text: text.encode()))
def test_nothing_in_a_listing_moves_the_cursor(key, field, data):
    sample = {"__key__": key, "__url__": "x.tar", field: data, f"{key}\x1b.txt": data}
    columns = list_sample(sample).split("\t")
    assert len(columns) == 3
    assert all(column.isprintable() for column in columns)


@given(st.binary())
def test_visible_names_are_printable(name):
    assert visible(name.decode(errors="surrogateescape")).isprintable()


def test_a_line_lists_key_sizes_and_previews():
    sample = {"__key__": "a\tb", "__url__": "x.tar", "cls": b"7", "raw": b"123", "own": b"\0"}
    assert list_sample(sample) == 'a\\tb\tcls:1=7\traw:3="123"\town:1'


@given(
    st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=2), st.dictionaries(st.sampled_from("xyz"), st.binary(), min_size=1)
        )
    )
)
def test_a_summary_counts_what_there_is(samples):
    summary = Summary()
    for key, fields in samples:
        summary.add({"__key__": key, "__url__": "x.tar", **fields})
    lines = str(summary).splitlines()
    keys = Counter(key for key, _ in samples)
    assert lines[0].split() == ["samples", str(len(samples))]
    assert lines[1].split() == ["bytes", str(sum(len(data) for _, fields in samples for data in fields.values()))]
    assert lines[2].split()[1].rstrip(":") == str(sum(1 for count in keys.values() if count > 1))
    rows = [line.split() for line in lines[3:] if line[:1] in "xyz" and line]
    for field in "xyz":
        sizes = [len(fields[field]) for _, fields in samples if field in fields]
        mine = [row for row in rows if row[0] == field]
        if not sizes:
            assert mine == []
            continue
        mean = f"{sum(sizes) / len(sizes):.1f}"
        assert mine[0][1:] == [str(len(sizes)), str(len(samples) - len(sizes)), str(sum(sizes)), mean]
        for _, low, high, count, *_ in mine[1:]:
            assert int(count) == sum(int(low) <= size <= int(high) for size in sizes) > 0
        assert sum(int(row[3]) for row in mine[1:]) == len(sizes)


def test_a_summary_names_duplicates():
    summary = Summary()
    for key in ("a", "b", "a", "c", "c", "\x1b"):
        summary.add({"__key__": key, "txt": b""})
    assert "duplicates  2: a (2 times), c (2 times)" in str(summary)


def drawn(sample, columns=48):
    console = pytest.importorskip("rich.console")
    pytest.importorskip("rich_pixels")
    terminal = console.Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=columns, _environ={}
    )
    for picture in draw_pictures(sample, columns=columns):
        terminal.print(picture)
    return terminal.file.getvalue()


def test_pictures_in_a_terminal_are_half_blocks_of_their_colours():
    image = np.zeros((48, 24, 3), "u1")
    image[:24] = 255, 0, 0
    image[24:] = 0, 0, 255
    lines = drawn({"__key__": "a", "png": encode("png", image), "cls": b"7"}).splitlines()
    assert lines[0].count("\x1b[38;2;255;0;0;48;2;255;0;0m▄") == 24
    assert lines[23].count("\x1b[38;2;0;0;255;48;2;0;0;255m▄") == 24
    assert lines[24:] == [] or lines[24:] == [""]


@pytest.mark.parametrize(
    ("size", "columns", "cells"),
    [((8, 8), 48, (24, 12)), ((1000, 500), 48, (48, 12)), ((500, 1000), 48, (24, 24)), ((48, 48), 20, (20, 10))],
)
def test_pictures_fit_the_terminal(size, columns, cells):
    image = np.full((size[1], size[0]), 128, "u1")
    lines = [line for line in drawn({"__key__": "a", "png": encode("png", image)}, columns).splitlines() if line]
    assert (lines[0].count("▄"), len(lines)) == cells


def test_damaged_pictures_are_words():
    assert drawn({"__key__": "a", "jpg": b"\x1b[2Jdamaged"}).startswith("jpg: ")


def test_pictures_without_their_library_name_the_extra(monkeypatch, make_shards):
    from click.testing import CliRunner

    from tarshards.cli import tarshow

    monkeypatch.setitem(sys.modules, "rich_pixels", None)
    done = CliRunner().invoke(tarshow.main, ["--images", make_shards(1)])
    assert done.exit_code == 2
    assert "pip install 'tarshards[show]'" in done.output
