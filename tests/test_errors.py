"""Errors name their origin, are also Python errors, survive pickling, and can be made from only a message."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest
from range_server import serving

from tarshards import errors
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard, open_url
from tarshards.storage.streams import failure, is_missing

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TarshardsError)]
LEAVES = [kind for kind in KINDS if kind is not errors.TarshardsError]
COPIES = [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy]


def through_pickle(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("kind", KINDS)
def test_message_and_attributes(kind):
    error = kind("bad", url="a.tar", offset=512, key="k", field="jpg")
    for each in (error, *(copied(error) for copied in COPIES)):
        assert str(each) == "a.tar: offset 512: k.jpg: bad"
        assert (each.reason, each.url, each.offset, each.key, each.field) == ("bad", "a.tar", 512, "k", "jpg")
        assert type(each) is kind
    assert str(kind("only this")) == "only this"


def test_the_tree_is_drawn_at_the_top():
    for kind in LEAVES:
        (builtin,) = set(kind.__mro__) & {OSError, ValueError}
        assert f" {kind.__name__} " in errors.__doc__
        line = next(line for line in errors.__doc__.splitlines() if f" {kind.__name__} " in line)
        assert f"({builtin.__name__})" in line


@pytest.mark.parametrize("kind", LEAVES)
def test_each_is_the_error_of_python_that_callers_catch(kind):
    builtin = OSError if kind is errors.OpenError else ValueError
    with pytest.raises(builtin, match=r"a\.tar: bad") as caught:
        raise kind("bad", url="a.tar")
    assert isinstance(through_pickle(caught.value), builtin)


@pytest.mark.parametrize("copied", COPIES)
def test_what_was_added_survives_copying(copied):
    error = errors.OpenError("bad", url="a.tar", errno=errno.ENOSPC)
    error.cost = "all of it"
    error.add_note("while the disk was full")
    found = copied(error)
    assert (found.cost, found.__notes__, found.errno) == ("all of it", ["while the disk was full"], errno.ENOSPC)
    assert (str(found), found.filename, found.strerror) == ("a.tar: bad", "a.tar", "bad")


class OfUser(errors.SampleError):
    """An error of a user whose constructor takes something else."""

    def __init__(self, number: int):
        super().__init__(f"sample {number}", key=str(number))


def test_a_users_error_of_the_tree_pickles_whatever_its_constructor_takes():
    found = through_pickle(OfUser(7))
    assert (type(found), str(found), found.key) == (OfUser, "7: sample 7", "7")


@pytest.mark.parametrize("opening", [open_url, open_shard, lambda url: Location(url).ranges()])
@pytest.mark.parametrize("where", ["local", "http", "memory"])
def test_a_missing_shard_has_the_errno_of_a_missing_file(tmp_path, opening, where):
    with serving(tmp_path) as site:
        url = {"local": str(tmp_path), "http": site.url, "memory": "memory://nowhere"}[where] + "/a.tar"
        with pytest.raises(OSError, match=r"a\.tar") as caught:
            opening(url)
    assert caught.value.errno == errno.ENOENT
    assert is_missing(through_pickle(caught.value))
    assert str(caught.value).count("a.tar") == 1


def test_errno_is_that_of_the_operating_system(tmp_path):
    with pytest.raises(OSError, match="Is a directory") as caught:
        open_url(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path))
    assert failure(ValueError("embedded null byte"), "a\0b").errno is None


def test_parts():
    assert str(errors.DecodeError("bad", field="jpg")) == "jpg: bad"
    assert str(errors.SampleError("bad", key="k")) == "k: bad"
    assert str(errors.TarError("bad", offset=0)) == "offset 0: bad"
