"""Numbers, text, codecs and functions, read into batches."""

import json as json_room
import pickle

import numpy as np
import pytest
from readers_data import npy, read, whole

from tarshards.errors import DecodeError
from tarshards.loaders.arrays.readers import reader_of
from tarshards.loaders.arrays.readers.arrays import array
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import bytes_, decoded, floating, integer, json, text, using


@pytest.mark.parametrize("parts", [1, 3])
def test_numbers_become_arrays(parts):
    integers = whole(integer(), [b"3", b" -12\n", b"9223372036854775807"], parts=parts)
    assert integers.dtype == np.int64
    assert integers.tolist() == [3, -12, 2**63 - 1]
    floats = whole(floating(), [b"3", b"-1.5e3\n", b" inf"], parts=parts)
    assert floats.dtype == np.float64
    assert floats.tolist() == [3.0, -1500.0, np.inf]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_says_the_encoding_of_numbers_and_text(encoding):
    assert whole(integer(), [b"3", " -12\n".encode(encoding), b"4"]).tolist() == [3, -12, 4]
    assert whole(floating(), [b"3", "-1.5e3\n".encode(encoding), b"4"]).tolist() == [3, -1500, 4]
    assert whole(text(), ["ü".encode(encoding)]) == ["ü"]
    assert whole(json(), ['["ü"]'.encode(encoding)]) == [["ü"]]


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_no_number_is_told_by_its_place_and_the_others_are_read(parts):
    batch, failed = read(integer(), [b"1", b"x", b"", b"4", b"9" * 30, b"6"], parts=parts)
    assert sorted(failed) == [1, 2, 4]
    assert batch[[0, 3, 5]].tolist() == [1, 4, 6]
    assert str(failed[1]) == "b'x' is not a decimal integer of 64 bits"
    _, failed = read(floating(), [b"1", b"1_0"], parts=parts)
    assert {row: str(error) for row, error in failed.items()} == {1: "b'1_0' is not a number"}


def test_lists():
    assert whole(bytes_(), [b"\xff", b""]) == [b"\xff", b""]
    assert whole(text(), ["grün".encode(), b""]) == ["grün", ""]
    assert whole(json(), [json_room.dumps(value).encode() for value in ({"a": [1]}, None)]) == [{"a": [1]}, None]


def test_what_does_not_decode_is_a_decode_error_with_its_cause():
    batch, failed = read(json(), [b"{", b"1"])
    assert batch[1] == 1
    assert isinstance(failed[0], DecodeError)
    assert isinstance(failed[0].__cause__, json_room.JSONDecodeError)
    assert failed[0].field is None  # which the loader adds, with shard and key
    assert isinstance(read(text(), [b"\xff"])[1][0].__cause__, UnicodeDecodeError)


def test_decoded_is_the_codec_of_the_extension():
    arrays = [np.arange(6).reshape(2, 3) + i for i in range(3)]
    np.testing.assert_array_equal(whole(decoded(), [npy(a) for a in arrays], field="x.npy"), np.stack(arrays))
    assert whole(decoded(), [b"4", b"5"], field="cls").tolist() == [4, 5]
    assert whole(decoded(), [b"a", b"b"], field="txt") == ["a", "b"]
    assert whole(decoded(), [b"123456789012345678901"], field="cls") == [123456789012345678901]


def test_arrays_of_several_shapes_are_a_list_or_padded():
    datas = [npy(np.ones(shape, np.float32)) for shape in ((2, 3), (1, 4), (0, 0))]
    listed = whole(decoded(), datas, field="npy")
    assert [a.shape for a in listed] == [(2, 3), (1, 4), (0, 0)]
    padded = whole(decoded(pad=-1), datas, field="npy")
    assert padded.dtype == np.float32
    assert padded.tolist() == [[[1, 1, 1, -1], [1, 1, 1, -1]], [[1, 1, 1, 1], [-1] * 4], [[-1] * 4, [-1] * 4]]
    mixed = [npy(np.ones(2, np.float32)), npy(np.ones(2, np.int8)), npy(np.ones((2, 1)))]
    assert isinstance(whole(decoded(pad=0), mixed, field="npy"), list)


def test_any_function_is_a_reader():
    def lengths(data):
        assert isinstance(data, bytes)
        if not data:
            raise ValueError("empty\nand more")
        return np.full(2, len(data))

    assert whole(reader_of(lengths), [b"a", b"bcd"]).tolist() == [[1, 1], [3, 3]]
    batch, failed = read(using(lengths), [b"abc", b""])
    assert str(failed[1]) == "empty"
    assert batch[0].tolist() == [3, 3]
    assert reader_of(reader := integer()) is reader
    with pytest.raises(TypeError, match="a reader or a function of bytes is wanted, not 'cls'"):
        reader_of("cls")


@pytest.mark.parametrize(
    "reader",
    [array("f4"), integer(), floating(), bytes_(), json(), decoded(pad=1), image(8), using(len)],
    ids=lambda reader: type(reader).__name__,
)
def test_readers_are_pickled(reader):
    assert vars(pickle.loads(pickle.dumps(reader))).keys() == vars(reader).keys()
