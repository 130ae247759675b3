"""Errors name the place, survive pickling, and can be made from a message alone, as torch makes them."""

from __future__ import annotations

import pickle

import pytest

from tarshards import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TarshardsError)]


@pytest.mark.parametrize("kind", KINDS)
def test_message_and_attributes(kind):
    error = kind("bad", url="a.tar", offset=512, key="k", field="jpg")
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert str(copy) == "a.tar: offset 512: k.jpg: bad"
        assert (copy.reason, copy.url, copy.offset, copy.key, copy.field) == ("bad", "a.tar", 512, "k", "jpg")
        assert type(copy) is kind
    assert str(kind("only this")) == "only this"


def test_the_tree_is_drawn_at_the_top():
    for kind in KINDS:
        assert f" {kind.__name__} " in errors.__doc__ or kind is errors.TarshardsError


def test_parts():
    assert str(errors.DecodeError("bad", field="jpg")) == "jpg: bad"
    assert str(errors.SampleError("bad", key="k")) == "k: bad"
    assert str(errors.TarError("bad", offset=0)) == "offset 0: bad"
