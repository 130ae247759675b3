"""A field of all samples as one array: numpy's own indexing as oracle, copies to keep, errors that name."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
from range_server import serving

from tarshards import ShardWriter
from tarshards.errors import DecodeError, OpenError, SampleError
from tarshards.index.access import IndexedShards

ROWS, PER_SHARD = 50, 20


def npy(values) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def write(folder, arrays, length=0) -> str:
    """Write samples of which each third one's text is by *length* longer than that of the one before."""
    with ShardWriter(str(folder / "set-%d.tar"), max_samples=PER_SHARD) as writer:
        for number, values in enumerate(arrays):
            fields = {} if values is None else {"x.npy": npy(values)}
            writer.write({"__key__": f"{number:03d}", "txt": "t" + "t" * (number % 3 * length)} | fields)
    return str(folder / "set-{0..2}.tar")


TABLE = np.random.default_rng(0).normal(size=(ROWS, 3, 4)).astype(np.float32)


@pytest.fixture(params=["local", "uneven", "served"])
def column(request, tmp_path):
    length = 700 if request.param == "uneven" else 0
    urls = write(tmp_path, TABLE, length)
    if request.param != "served":
        yield IndexedShards(urls).column("x.npy")
        return
    with serving(tmp_path) as site:
        yield IndexedShards(f"{site.url}/set-{{0..2}}.tar").column("x.npy")


def test_it_looks_like_an_array(column):
    assert (column.shape, column.dtype, column.ndim, len(column)) == (TABLE.shape, TABLE.dtype, 3, ROWS)
    assert repr(column) == "<Column x.npy of shape (50, 3, 4), float32>"
    np.testing.assert_array_equal(np.asarray(column), TABLE)
    np.testing.assert_array_equal(np.asarray(column, np.float64), TABLE.astype(np.float64))


@pytest.mark.parametrize(
    "index",
    [
        *(0, -1, 49, slice(None), slice(3, 9), slice(19, 21), slice(40, 20, -3), slice(18, 2, -5), slice(5, 5)),
        *([4, 4, -1, 30], np.array([49, 0]), np.arange(ROWS) % 7 == 3, np.array([], int)),
    ],
    ids=str,
)
def test_it_is_indexed_as_numpy_is(column, index):
    np.testing.assert_array_equal(column[index], TABLE[index])


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, [0, ROWS]])
def test_what_is_not_there_is_an_index_error(column, index):
    with pytest.raises(IndexError):
        column[index]


def test_a_column_is_indexed_by_samples_only(column):
    with pytest.raises(TypeError, match="indexed by samples"):
        column[1, 2]
    with pytest.raises(IndexError, match="one-dimensional"):
        column[np.zeros((2, 2), int)]


def test_what_it_gives_is_the_callers_own(column):
    for index in 5, slice(3), slice(15, 25), slice(40, 2, -7), [1, 2]:
        rows = column[index]
        rows[...] = 0
        np.testing.assert_array_equal(column[index], TABLE[index])
    assert np.asarray(column).flags.writeable


def test_a_part_of_the_samples_has_a_column_of_its_own(tmp_path):
    column = IndexedShards(write(tmp_path, TABLE))[45:5:-2].column("x.npy")
    np.testing.assert_array_equal(np.asarray(column), TABLE[45:5:-2])
    np.testing.assert_array_equal(column[3:7], TABLE[45:5:-2][3:7])


@pytest.mark.parametrize(
    ("odd", "error", "words"),
    [
        (None, SampleError, r"set-1\.tar: 027: no field x\.npy"),
        (
            TABLE[0].astype(np.float64),
            DecodeError,
            r"set-1\.tar: 027\.x\.npy: differs from the first sample's, float32",
        ),
        (TABLE[0].reshape(4, 3), DecodeError, r"set-1\.tar: 027\.x\.npy: differs from the first sample's"),
    ],
    ids=["missing", "dtype", "shape"],
)
def test_a_member_of_another_kind_is_named(tmp_path, odd, error, words):
    arrays = [*TABLE]
    arrays[27] = odd
    column = IndexedShards(write(tmp_path, arrays)).column("x.npy")
    np.testing.assert_array_equal(column[0:20], TABLE[:20])
    with pytest.raises(error, match=words):
        column[25:31]


def test_what_is_no_array_is_named(tmp_path):
    shards = IndexedShards(write(tmp_path, TABLE))
    with pytest.raises(DecodeError, match=r"set-0\.tar: 000\.txt: not a \.npy file"):
        shards.column("txt")
    with pytest.raises(SampleError, match="no samples"):
        shards[:0].column("x.npy")


def test_a_shard_that_was_written_to_is_not_read(tmp_path):
    column = IndexedShards(write(tmp_path, TABLE)).column("x.npy")
    assert column[0].shape == (3, 4)
    os.utime(tmp_path / "set-0.tar", ns=(0, 0))
    for index in 0, slice(0, 30), [0, 30]:
        with pytest.raises(OpenError, match="was written to"):
            column[index]
