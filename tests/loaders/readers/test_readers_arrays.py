"""Arrays of constant size, gathered as they lie, and of any length, one after the other."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from readers_data import npy, read, whole

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream
from tarshards.errors import DecodeError
from tarshards.index.memory import Payloads
from tarshards.loaders.arrays.readers.arrays import array, ragged
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import integer

pytestmark = pytest.mark.usefixtures("twin")
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


def test_a_ragged_row_of_half_an_element_fails_alone():
    reader, payloads = ragged("<u2"), Payloads.of([b"ab", b"abc", b"", b"abcd"])
    batch = reader.make(4)
    failed = reader.read(batch, 0, payloads, np.zeros(4, np.uint64))
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
