"""The key rule: WebDataset's, made loud."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from tarshards.errors import SampleError
from tarshards.samples.keys import is_reserved, join_name, split_name

names = st.text("ab./_", max_size=12) | st.text(max_size=12)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a/b.c/d.seg.JPG", ("a/b.c/d", "seg.jpg")),
        ("./a.jpg", ("./a", "jpg")),
        ("a.", ("a", "")),
        ("noext", None),
        (".hidden", None),
        ("a/.hidden", None),
        ("a.b/noext", None),
        ("__meta__/a.json", None),
        ("a/__x__", None),
        ("__x__.json", ("__x__", "json")),
        ("", None),
        ("ü/ß.Ä", ("ü/ß", "ä")),
    ],
)
def test_split(name, parts):
    assert split_name(name) == parts


@given(names)
def test_split_agrees_with_webdataset(name):
    key, field = base_plus_ext(name)
    hidden = name.rpartition("/")[2].startswith(".")  # there a/.x is field x of a key "a/"; we skip it, as .x alone
    if key is None or hidden or is_reserved(name) or "\n" in name:
        key = None
    expected = None if key is None else (key, field.lower())
    assert split_name(name) == expected or "\n" in name


@given(names, names)
def test_joined_names_read_back_or_are_refused(key, field):
    try:
        name = join_name(key, field)
    except SampleError:
        assert split_name(f"{key}.{field}") != (key, field) or "\0" in key + field
    else:
        assert split_name(name) == (key, field)


@pytest.mark.parametrize(
    ("key", "field"), [("a.b", "txt"), ("a", "TXT"), ("", "txt"), ("a", "b/c"), ("a/", "txt"), ("a\0", "txt")]
)
def test_names_that_would_not_read_back(key, field):
    with pytest.raises(SampleError, match="would"):
        join_name(key, field)
