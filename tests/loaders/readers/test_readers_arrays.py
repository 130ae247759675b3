"""Arrays of constant size, gathered as they lie, and of any length, one after the other."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from readers_data import npy, read, whole

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream
from tarshards.errors import DecodeError
from tarshards.loaders.arrays.readers.arrays import array, ragged
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import integer
from tarshards.samples.payloads import Payloads

ANY = st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.complex_number_dtypes(), hnp.datetime64_dtypes())


@given(
    arrays=hnp.arrays(ANY, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0).filter(lambda shape: shape[0] > 0)),
    parts=st.integers(1, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_npy_rows_are_what_numpy_saved(arrays, parts):
    batch = whole(array(), [npy(arrays[i, ...]) for i in range(len(arrays))], field="x.npy", parts=parts)
    assert batch.dtype == arrays.dtype
    assert batch.shape == arrays.shape
    assert batch.tobytes() == arrays.tobytes()


def test_raw_bytes():
    rows = np.random.default_rng(0).integers(0, 256, (5, 24), dtype=np.uint8)
    datas = [row.tobytes() for row in rows]
    np.testing.assert_array_equal(whole(array("u1", (2, 3, 4)), datas), rows.reshape(5, 2, 3, 4))
    np.testing.assert_array_equal(whole(array("<i4"), datas), rows.view("<i4"))
    np.testing.assert_array_equal(
        whole(array(">u8", ()), [data[:8] for data in datas]), rows[:, :8].copy().view(">u8")[:, 0]
    )


def test_a_member_of_another_size_fails_alone():
    batch, failed = read(array("u1", (3,)), [b"abc", b"ab", b"def", b"abcd"])
    assert {row: str(error) for row, error in failed.items()} == {
        1: "2 bytes instead of 3 for uint8 of shape (3,)",
        3: "4 bytes instead of 3 for uint8 of shape (3,)",
    }
    assert batch[[0, 2]].tobytes() == b"abcdef"


def test_a_header_that_differs_fails_alone():
    rows = [np.full(4, i, np.float32) for i in range(5)]
    datas = [npy(row) for row in rows]
    datas[2] = npy(rows[2].astype(np.int32))  # as many bytes
    datas[3] = datas[3][:-1]
    batch, failed = read(array(), datas, field="npy")
    assert sorted(failed) == [2, 3]
    assert str(failed[2]) == "its .npy header differs from that of the first sample, float32 of shape (4,)"
    np.testing.assert_array_equal(batch[[0, 1, 4]], [rows[0], rows[1], rows[4]])


def opened(reader, data, field):
    return reader.open(field, Payloads.of([data])[0])


@pytest.mark.parametrize(
    ("reader", "data", "field", "reason"),
    [
        (array("f8"), npy(np.ones(3, np.float32)), "npy", "the array has the dtype float32, and float64 was requested"),
        (array(shape=(4,)), npy(np.ones(3)), "npy", r"the array has the shape \(3,\), and \(4,\) was requested"),
        (array(), b"nonsense", "npy", "not a .npy file"),
        (array(), npy(np.ones(3))[:20], "npy", "not a .npy file"),
        (array(), npy(np.ones((3, 2), order="F")), "npy", "Fortran"),
        (
            image(shape=(2, 3, 3)),
            npy(np.ones((3, 2, 3), "u1")),
            "npy",
            r"shape \(3, 2, 3\), and \(2, 3, 3\) was requested",
        ),
        (array("f4"), b"abcde", "raw", "5 bytes are no whole number of float32"),
    ],
)
def test_a_first_member_that_does_not_fit_is_refused(reader, data, field, reason):
    with pytest.raises(DecodeError, match=reason):
        opened(reader, data, field)


def test_objects_are_refused():
    objects = npy(np.ones(1)).replace(b"'<f8'", b"'|O' ")
    with pytest.raises(DecodeError, match="Python objects"):
        opened(array(), objects, "npy")
    with pytest.raises(TypeError, match="no safe form"):
        array(object)
    with pytest.raises(TypeError, match="the dtype must be given"):
        opened(array(), b"1234", "raw")


@given(
    rows=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=30), min_size=1, max_size=20), parts=st.integers(1, 3)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ragged_rows_are_one_after_the_other(rows, parts):
    values, offsets = whole(ragged("<u2"), [np.array(row, "<u2").tobytes() for row in rows], parts=parts)
    assert (values.dtype, offsets.dtype) == (np.dtype("<u2"), np.dtype(np.int64))
    assert [values[begin:end].tolist() for begin, end in pairwise(offsets)] == rows


@given(
    dtype=ANY,
    shape=hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=3),
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    parts=st.integers(1, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ragged_npy_is_the_rows_that_numpy_saved(dtype, shape, rows, parts):
    """Of every dtype and order of bytes, whether the dtype is given or found in the headers."""
    total = np.arange(sum(rows) * int(np.prod(shape))).astype("i1").astype(dtype).reshape(-1, *shape)
    arrays = np.split(total, np.cumsum(rows)[:-1])
    for reader in ragged(), ragged(dtype):
        values, offsets = whole(reader, [*map(npy, arrays)], field="ids.npy", parts=parts)
        assert (values.dtype, values.shape, values.tobytes()) == (total.dtype, total.shape, total.tobytes())
        assert offsets.tolist() == [0, *np.cumsum(rows)]


def test_ragged_npy_of_one_number_or_with_long_headers():
    values, offsets = whole(ragged("<i8"), [npy(np.int64(7)), npy(np.arange(2))], field="x.npy")
    assert (values.tolist(), offsets.tolist()) == ([7, 0, 1], [0, 1, 3])
    dtype = np.dtype([(f"a column with a long name, number {i}", ">f4") for i in range(9)])
    rows = [np.ones(3, dtype), np.zeros(0, dtype), np.zeros(2, dtype)]
    values, offsets = whole(ragged(), [*map(npy, rows)], field="x.npy")
    assert (values.dtype, values.tobytes(), offsets.tolist()) == (
        dtype,
        b"".join(r.tobytes() for r in rows),
        [0, 3, 3, 5],
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            npy(np.arange(3, dtype="<i8")),
            r"its rows are int64 of shape \(\), and those of the first uint16 of shape \(\)",
        ),
        (npy(np.arange(3, dtype=">u2")), r"its rows are >u2 of shape \(\), and"),
        (npy(np.zeros((3, 2), "<u2")), r"its rows are uint16 of shape \(2,\), and"),
        (npy(np.zeros((3, 2), "<u2", "F")), "in Fortran order"),
        (npy(np.arange(3, dtype="<u2"))[:-1], r"5 bytes are not uint16 of shape \(3,\), as its header says"),
        (npy(np.arange(3, dtype="<u2"))[:40], "not a .npy file: EOF"),
        (b"ab", "not a .npy file: EOF"),
        (b"", "not a .npy file: EOF"),
    ],
)
def test_ragged_npy_of_another_form_fails_alone(data, reason):
    good = npy(np.arange(3, dtype="<u2"))
    opened = ragged("<u2").open("ids.npy", good)
    batch = opened.make(3)
    failed = opened.read(batch, Payloads.of([good, data, good]), np.zeros(3, np.uint64))
    assert list(failed) == [1]
    assert re.search(reason, str(failed[1]))
    assert opened.join(batch[[0, 2]])[0].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_first_npy_of_another_form_is_no_ragged_array():
    with pytest.raises(DecodeError, match=r"the array has the dtype int64, and uint16 was requested"):
        ragged("<u2").open("ids.npy", npy(np.arange(3)))
    with pytest.raises(DecodeError, match=r"an array of shape \(3, 0\) has rows without elements"):
        ragged().open("ids.npy", npy(np.zeros((3, 0))))


def test_npy_is_no_raw_array():
    """Elements of its header would come before its own."""
    file = npy(np.arange(3, dtype="<u2"))
    unnamed = "a .npy file, in a field of raw arrays: its name has to end in .npy"
    with pytest.raises(DecodeError, match=unnamed):
        array("<u2").open("ids", file)
    for reader in array("<u2", (3,)), ragged("<u2"):
        _, failed = read(reader, [file[-6:], file, file[-6:]], field="ids")
        assert {row: str(error) for row, error in failed.items()} == {1: unnamed}
    values, _ = whole(ragged(), [file, file], field="ids")
    assert values.tobytes() == 2 * file, "all are bytes"


@pytest.mark.parametrize("field", ["x.npz", "x.pt", "pth", "wav", "left.png", "x.ten", "npy.gz", "msgpack", "mp4"])
def test_a_file_with_a_header_is_no_raw_array(field):
    extension = field.rpartition(".")[2]
    for reader in array("<i4"), array("<f4", (3,)), ragged("<u2"):
        with pytest.raises(TypeError, match=rf"{field} is no raw array of \w+: .{extension} is a format; decoded\(\)"):
            reader.open(field, b"")
    assert whole(ragged("u1"), [b"PK", b"RIFF"], field=field)[0].tobytes() == b"PKRIFF"
    assert whole(array("u1"), [b"PK", b"RI"], field=field).tobytes() == b"PKRI"


def test_a_ragged_row_of_half_an_element_fails_alone():
    reader, payloads = ragged("<u2"), Payloads.of([b"ab", b"abc", b"", b"abcd"])
    batch = reader.make(4)
    failed = reader.read(batch, payloads, np.zeros(4, np.uint64))
    assert {row: str(error) for row, error in failed.items()} == {1: "3 bytes are no whole number of uint16"}
    values, offsets = reader.join(batch[[0, 2, 3]])
    assert (values.tobytes(), offsets.tolist()) == (b"ababcd", [0, 1, 1, 3])


@pytest.mark.parametrize("dtype", ["O", "S0", "V0"])
def test_what_is_no_element_cannot_be_ragged(dtype):
    with pytest.raises(TypeError, match="no form in bytes"):
        ragged(dtype)


def test_ragged_batches_leave_out_what_failed(tmp_path):
    texts = [b"", b"one", b"twotwo!", b"x" * 100_000, b"four"]
    with ShardWriter(f"{tmp_path}/a-{{shard}}.tar") as writer:
        for i, text in enumerate(texts * 20):
            writer.write({"__key__": f"{i:03d}", "ids": text + text, "cls": b"no" if i == 7 else i})
    dataset = Stream.from_shards(f"{tmp_path}/a.shards.json", shuffle=True, on_error=Ledger(max_errors=1))
    found = {}
    for batch in ArrayLoader(dataset, 8, fields={"ids": ragged("<u2"), "cls": integer()}):
        values, offsets = batch["ids"]
        assert len(offsets) == len(batch["cls"]) + 1
        found |= {i: values[b:e].tobytes() for i, b, e in zip(batch["cls"].tolist(), offsets, offsets[1:])}
    assert found == {i: text + text for i, text in enumerate(texts * 20) if i != 7}


@pytest.mark.parametrize("reader", [array(), image(), image(8)])
def test_a_header_that_claims_more_than_there_is_makes_no_batch(reader):
    claim = npy(np.zeros((4, 4, 3), np.uint8)).replace(b"(4, 4, 3), }        ", b"(9999999, 9999, 3) }")
    with pytest.raises(DecodeError, match=r"48 bytes are not uint8 of shape \(9999999, 9999, 3\), as its header says"):
        reader.open("x.npy", claim)
