"""The key rule: WebDataset's, with errors instead of silence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from tarshards.errors import SampleError
from tarshards.samples.keys import have_dots_in_key, is_reserved, join_name, key_rule, split_last, split_name

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


@given(names)
def test_the_last_dot_splits_the_names_that_the_first_does(name):
    first, last = split_name(name), split_last(name)
    assert (first is None) is (last is None)
    if last is not None:
        key, field = last
        assert (name.startswith(f"{key}."), name[len(key) + 1 :].lower(), "." in field) == (True, field, False)
        assert name.count(".", name.rfind("/") + 1) > 1 or last == first


@pytest.mark.parametrize(
    ("split", "error"), [("middle", ValueError), ("", ValueError), (3, TypeError), (None, TypeError)]
)
def test_rules_are_words_or_functions(split, error):
    assert (key_rule("first"), key_rule("last"), key_rule(split_last)) == (split_name, split_last, split_last)
    with pytest.raises(error, match='"first", "last" or a function'):
        key_rule(split)


def test_many_fields_like_numbers_tell_of_dots_in_the_key():
    numbers = [f"{number:06d}.jpg" for number in range(70)]
    assert have_dots_in_key(numbers)
    assert have_dots_in_key([*numbers, *(f"{number}.jpg" for number in range(70)), "txt"])
    assert not have_dots_in_key(numbers[:64])
    assert not have_dots_in_key([f"view{number}.jpg" for number in range(70)])
    assert not have_dots_in_key([*numbers, *(f"view{number}.jpg" for number in range(80))])
