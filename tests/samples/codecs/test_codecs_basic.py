"""Text, numbers, JSON, msgpack, CBOR and pickle: there and back, and what is refused."""

import collections
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.errors import DecodeError, EncodeError
from tarshards.samples.codecs import decode_field, encode_field

finite = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))


def trees(leaves, keys=text):
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=20)


@pytest.mark.parametrize("field", ["txt", "text", "transcript"])
def test_text(field):
    assert decode_field(field, encode_field(field, "naïve\n")) == "naïve\n"
    with pytest.raises(DecodeError, match="utf-8"):
        decode_field(field, b"\xff")
    with pytest.raises(EncodeError, match="text is a str, not int"):
        encode_field(field, 3)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_says_the_encoding_of_every_text(encoding):
    assert decode_field("txt", "naïve 12\n".encode(encoding)) == "naïve 12\n"
    assert decode_field("cls", " 12\n".encode(encoding)) == 12
    assert decode_field("json", '["ï", 12]'.encode(encoding)) == ["ï", 12]
    big = {"utf-16": b"\xfe\xff" + "é".encode("utf-16-be"), "utf-32": b"\0\0\xfe\xff" + "é".encode("utf-32-be")}
    assert decode_field("txt", big.get(encoding, b"\xc3\xa9")) == "é"


@pytest.mark.parametrize("data", [b"\xff\xfea", b"\xef\xbb\xbf\xff", b"\xff\xfe\0\xd8"])
def test_text_that_is_not_what_its_mark_says(data):
    for field in "txt", "cls":
        with pytest.raises(DecodeError) as error:
            decode_field(field, data)
        assert error.value.field == field


@pytest.mark.parametrize("field", ["cls", "cls2", "class", "count", "index", "inx", "id"])
@settings(deadline=None)
@given(st.integers())
def test_integers(field, value):
    assert encode_field(field, value) == str(value).encode()
    assert decode_field(field, b" %d\r\n" % value) == value


@pytest.mark.parametrize("value", [np.int8(-3), np.uint64(2**64 - 1), np.array(7)])
def test_numpy_integers_are_integers(value):
    assert decode_field("cls", encode_field("cls", value)) == int(value)


@pytest.mark.parametrize("value", [True, np.bool_(1), np.array(True), 1.0, np.float32(1), None, [1], np.array([1])])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(EncodeError) as error:
        encode_field("cls", value)
    assert error.value.field == "cls"


@pytest.mark.parametrize("data", [b"", b" ", b"1.0", b"1_000", b"0x1", b"1 2", "٣".encode(), b"nan", b"9" * 5000])
def test_bytes_that_are_no_integer_are_refused(data):
    with pytest.raises(DecodeError) as error:
        decode_field("y.cls", data)
    assert error.value.field == "y.cls"


@pytest.mark.parametrize("field", ["json", "jsn"])
@settings(deadline=None)
@given(trees(finite | text).filter(lambda value: not isinstance(value, str)))
def test_json(field, value):
    assert decode_field(field, encode_field(field, value)) == value


def test_json_keeps_the_order_of_keys_and_writes_utf_8():
    assert encode_field("json", {"b": "ü", "a": 1}) == '{"b": "ü", "a": 1}'.encode()


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"a": -math.inf}, {1, 2}, np.int64(3), ["\ud800"], [10**5000]])
def test_what_json_lacks_is_refused(value):
    with pytest.raises(EncodeError):
        encode_field("json", value)


@pytest.mark.parametrize("data", [b"", b"{", b"[1] x", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000])
def test_bad_json(data):
    with pytest.raises(DecodeError):
        decode_field("json", data)


def test_json_nested_too_deep_to_write():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(EncodeError, match=r"recursion|Stack overflow"):
        encode_field("json", value)


@pytest.mark.parametrize("field", ["mp", "msg", "msgpack", "cbor"])
@settings(deadline=None)
@given(
    trees(finite | text | st.binary(), keys=text | st.integers(0, 2**64 - 1)).filter(
        lambda v: type(v) not in (str, bytes)
    )
)
def test_msgpack_and_cbor(field, value):
    data = encode_field(field, value)
    assert decode_field(field, data) == value
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_field(field, data[:length])
    with pytest.raises(DecodeError):
        decode_field(field, data + b"\0")


HOSTILE = {
    "msgpack array of 2**32": ("mp", b"\xdd\xff\xff\xff\xff"),
    "msgpack map of 2**32": ("mp", b"\xdf\xff\xff\xff\xff"),
    "msgpack bytes of 2**32": ("mp", b"\xc6\xff\xff\xff\xff"),
    "msgpack nested": ("mp", b"\x91" * 100_000),
    "msgpack reserved": ("mp", b"\xc1"),
    "msgpack list as key": ("mp", b"\x81\x90\x01"),
    "msgpack bad utf-8": ("mp", b"\xd9\x01\xff"),
    "cbor array of 2**63": ("cbor", b"\x9b\x7f" + b"\xff" * 7),
    "cbor map of 2**63": ("cbor", b"\xbb\x7f" + b"\xff" * 7),
    "cbor bytes of 2**63": ("cbor", b"\x5b\x7f" + b"\xff" * 7),
    "cbor bytes of 64 GiB": ("cbor", b"\x5b\x00\x00\x00\x10" + b"\0" * 4),
    "cbor bignum of 2**63 bytes": ("cbor", b"\xc2\x5b\x7f" + b"\xff" * 7),
    "cbor nested": ("cbor", b"\x81" * 100_000),
    "cbor shared nested": ("cbor", b"\xd8\x1c" * 50_000),
    "cbor break": ("cbor", b"\xff"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_msgpack_and_cbor(case):
    field, data = HOSTILE[case]
    with pytest.raises(DecodeError) as error:
        decode_field(field, data)
    assert error.value.field == field
    assert error.value.reason


def test_what_msgpack_lacks_is_refused():
    for value in 2**64, {1, 2}, object():
        with pytest.raises(EncodeError):
            encode_field("mp", value)


def test_cbor_sets_give_the_same_bytes_in_every_process():
    code = "from tarshards.samples.codecs import *; print(encode_field('cbor', {'a', 'b', 'c', 'd', 'e'}).hex())"
    assert len({subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": s}) for s in "123"}) == 1


def test_without_cbor2_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(DecodeError, match=r"cbor2 is missing: pip install 'tarshards\[cbor\]'"):
        decode_field("cbor", b"\x01")
    with pytest.raises(EncodeError, match=r"pip install 'tarshards\[cbor\]'"):
        encode_field("cbor", 1)


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd"])
def test_pickle_runs_only_when_allowed(field):
    value = {"point": collections.OrderedDict(x=1), "set": {1, 2}}
    data = encode_field(field, value)
    assert decode_field(field, data, allow_unsafe=True) == value
    with pytest.raises(DecodeError, match="allow_unsafe=True") as error:
        decode_field(f"a.{field}", data)
    assert error.value.field == f"a.{field}"


class Marker:
    """Unpickles by calling a function that leaves a trace."""

    ran: list = []  # noqa: RUF012

    def __reduce__(self):
        return Marker.ran.append, (1,)


def test_a_refused_pickle_has_not_run():
    with pytest.raises(DecodeError):
        decode_field("pkl.gz", encode_field("pkl.gz", Marker()))
    assert Marker.ran == []


@pytest.mark.parametrize("data", [b"", b"x", pickle.dumps([1, 2])[:-1], b"cno_such_module\nf\n."])
def test_bad_pickles(data):
    with pytest.raises(DecodeError) as error:
        decode_field("pkl", data, allow_unsafe=True)
    assert error.value.field == "pkl"


def test_what_does_not_pickle():
    with pytest.raises(EncodeError):
        encode_field("pkl", lambda: None)
