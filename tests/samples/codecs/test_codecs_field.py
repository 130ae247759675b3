"""decode_field and encode_field: which codec a field has, gzip around it, errors, and the user's own codecs."""

import collections
import datetime
import enum
import gzip
import io
import json
import subprocess
import sys
import tarfile
import tracemalloc
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tarshards import write_samples
from tarshards.errors import DecodeError, EncodeError
from tarshards.samples.codecs import decode_field, decoder, encode_field, encoder, registry
from tarshards.storage import compression
from tarshards.stream.ops import decode


@pytest.fixture
def own_codecs():
    """Let a test register any codecs; restore the tables when it ends."""
    tables = registry.DECODERS, registry.UNSAFE_DECODERS, registry.ENCODERS
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)


@pytest.mark.parametrize("field", ["json", "meta.json", "a.b.json", "meta.JSON"])
def test_the_last_part_of_a_field_decides(field):
    assert decode_field(field, b"[1]") == [1]
    assert encode_field(field, [1]) == b"[1]"


@pytest.mark.parametrize("field", ["", "raw", "json.raw", "raw.gz", "gz", "jpg", "png.gz", "seg.png"])
def test_unknown_fields_and_images_without_imagespec_stay_bytes(field):
    assert decode_field(field, b"\x00\xff") == b"\x00\xff"


@settings(deadline=None)
@given(st.sampled_from(["raw", "json", "jpg", "npy", "txt.gz", "pkl"]), st.binary())
def test_bytes_are_encoded_already(field, data):
    assert encode_field(field, data) == data
    assert encode_field(field, bytearray(data)) == data
    assert encode_field(field, memoryview(data)) == data
    assert type(encode_field(field, memoryview(data))) is bytes


class Grade(enum.IntEnum):
    GOOD = 1


class Units(np.ndarray):
    """An array with more than an array has."""


Point = collections.namedtuple("Point", "x y")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4)
ODD = st.sampled_from(
    [
        *(Grade.GOOD, Point(1, 2), np.float64(1.5), np.int64(7), np.float32(0.5), np.str_("a"), np.bool_(True), 1 + 2j),
        *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1]), bytearray(b"x"), range(3)),
        *({1, 2}, frozenset([1]), {(1, 2): 3}, {frozenset([1]): 2}, Decimal("1.10"), Decimal("NaN"), Fraction(1, 3)),
        *(datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
        *(
            np.arange(6).reshape(2, 3),
            np.array(["a"]),
            np.array([1.5], ">f4"),
            np.zeros(2).view(Units),
            np.rec.array([(1,)]),
        ),
        *([np.zeros(2, "f4")], {"a": np.zeros((0, 3))}, "{}", "[1, 2]", "null", "5", "\ufeffx", "\ud800"),
    ]
)
KEYS = st.text() | st.integers() | st.floats() | st.booleans() | st.none() | st.binary(max_size=4)
VALUES = ODD | st.recursive(
    SCALARS | ODD,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=2)
    ),
    max_leaves=8,
)
DATA = sorted(registry.ENCODERS.keys() - registry.FAMILY_OF_EXTENSION.keys())


def as_listed(value):
    """Return a value as JSON and its like hold it."""
    if type(value) in (list, tuple):
        return [as_listed(each) for each in value]
    return {name: as_listed(each) for name, each in value.items()} if type(value) is dict else value


def same(value, other) -> bool:
    """Say whether values have the same types and contents, NaN being equal to itself."""
    if type(value) is not type(other):
        return False
    if isinstance(value, np.ndarray):
        native = [each.astype(each.dtype.newbyteorder("=")) for each in (value, other)]  # as numpy pickles it
        return native[0].dtype == native[1].dtype and np.array_equal(*native)
    if type(value) in (list, tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if type(value) is dict:
        pairs = [sorted(each.items(), key=lambda item: repr(item[0])) for each in (value, other)]  # CBOR sorts names
        return same(*pairs)
    return value == other or (value != value and other != other)


def what_comes_back(extension, value):
    """Return the result of ``decode`` that docs/fields.md gives for a value that the codec of an extension accepts."""
    if extension in ("json", "jsn") and isinstance(value, str):
        return json.loads(value)
    if extension in ("json", "jsn", "mp", "msg", "msgpack", "cbor"):
        return as_listed(value)
    if extension in ("cls", "cls2", "class", "count", "index", "inx", "id"):
        return int(value)
    if extension in ("txt", "text", "transcript"):
        return str(value)
    if extension in ("ten", "tb", "tenbin"):
        arrays = value if type(value) in (list, tuple) else [value]
        return [np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("<")) for array in arrays]
    return np.asarray(value) if extension == "npy" else value


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([*DATA, "raw", "html"]), st.sampled_from(["", ".gz"]), VALUES)
def test_what_a_codec_takes_comes_back_with_its_type(extension, packed, value):
    field, stream = f"x.{extension}{packed}", io.BytesIO()
    try:
        write_samples([{"__key__": "k", field: value}], stream)
    except EncodeError as refused:
        if (refused.key, refused.field) == ("k", field):
            return
        raise
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as archive:
        data = archive.extractfile(f"k.{field}").read()
    if isinstance(value, bytes | bytearray):
        assert data == value
    else:
        found = decode_field(field, data, allow_unsafe=True)
        if type(value) not in (set, frozenset):
            assert same(found, what_comes_back(extension, value))
        assert type(found) is type(what_comes_back(extension, value))


@pytest.mark.parametrize(
    "extension", [each for each in [*registry.ENCODERS, "raw"] if each not in ("txt", "text", "transcript")]
)
@pytest.mark.parametrize("text", ["5", "null", "hello", "", "[1", '"x"'])
def test_a_str_in_a_field_that_is_not_text_is_refused_with_the_cure(extension, text):
    with pytest.raises(
        EncodeError, match=r"a str in a field that is not text.*give the value, or bytes|give bytes, such"
    ):
        encode_field(extension, text)


@pytest.mark.parametrize("text", ['{"a": [1, null]}', "[]", ' {"a": NaN}\n'])
def test_a_str_of_a_json_object_or_array_is_written_as_it_is(text):
    assert encode_field("meta.json", text) == text.encode()
    assert gzip.decompress(encode_field("json.gz", text)) == text.encode()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("json", {"a": {7: 1}}, "the name 7 in a dict, of type int, would not come back"),
        ("json", {"a": [np.float64(1.5)]}, "np.float64.*, of type float64, would not come back"),
        ("mp", {"a": bytearray(b"x")}, "bytearray.*, of type bytearray, would not come back"),
        ("mp", {(1, 2): 3}, r"the name \(1, 2\) in a dict, of type tuple, would not come back"),
        ("cbor", {"a": collections.OrderedDict()}, "of type OrderedDict, would not come back"),
        ("cbor", {np.float64(1.5): 1}, "of type float64, would not come back"),
        ("cbor", {np.float64(1.5)}, "of type set, would not come back"),
        ("npy", np.zeros(2).view(Units), "Units would come back as an array"),
        ("txt", "\ufeffa", "begins with a byte order mark"),
        ("html", "<p>", r"no encoder for 'html'; give bytes, such as text.encode\(\)"),
    ],
)
def test_what_would_come_back_as_something_else_names_itself(field, value, reason):
    with pytest.raises(EncodeError, match=reason):
        encode_field(field, value)


@pytest.mark.parametrize("field", ["json", "mp", "cbor", "pkl"])
def test_what_is_nested_too_deep_to_be_read_is_not_written(field):
    value: list = []
    for _ in range(399):
        value = [value]
    assert decode_field(field, encode_field(field, value), allow_unsafe=True) == value
    if field != "pkl":
        with pytest.raises(EncodeError, match="more than 400 dicts and lists within each other"):
            encode_field(field, [value])


@settings(deadline=None)
@given(st.text())
def test_gzip_wraps_the_inner_codec(text):
    packed = encode_field("note.txt.gz", text)
    assert gzip.decompress(packed).decode() == text
    assert decode_field("note.txt.gz", packed) == text
    assert packed[4:8] == b"\0\0\0\0", "no time in the header"
    assert decode_field("json.gz", encode_field("json.gz", {"text": text})) == {"text": text}


def test_gzip_of_several_members_is_read_whole():
    assert decode_field("txt.gz", gzip.compress(b"one ") + gzip.compress(b"two")) == "one two"


def test_gzip_truncated_anywhere_is_an_error():
    packed = encode_field("txt.gz", "the quick brown fox " * 20)
    for length in range(len(packed)):
        with pytest.raises(DecodeError):
            decode_field("txt.gz", packed[:length])


def test_gzip_damaged_anywhere_never_gives_another_text():
    text = "the quick brown fox " * 20
    packed = encode_field("txt.gz", text)
    for place in range(len(packed)):
        with suppress(DecodeError):
            assert decode_field("txt.gz", packed[:place] + bytes([packed[place] ^ 0x21]) + packed[place + 1 :]) == text


def test_gzip_bomb_is_refused_and_our_own_long_runs_are_not(monkeypatch):
    monkeypatch.setattr(compression, "MAX_HELD", 1 << 20)
    zeros = bytes(4 * 2**20)
    bomb = gzip.compress(zeros)
    for data in bomb, bomb[: len(bomb) // 2], gzip.compress(zeros[: 2**20]) * 4:
        with pytest.raises(DecodeError, match="more than 1 MiB, and more than 200 times the compressed size"):
            decode_field("txt.gz", data)
    assert decode_field("txt.gz", bomb, max_ratio=2000) == zeros.decode()
    for options in {}, {"txt": bytes.decode}:
        assert list(decode([{"txt.gz": bomb}], max_ratio=2000, **options)) == [{"txt.gz": zeros.decode()}]
    with pytest.raises(DecodeError, match="more than 200 times"):
        list(decode([{"txt.gz": bomb}], txt=bytes.decode))
    with pytest.raises(ValueError, match="max_ratio must be a number of at least 1, not 0"):
        list(decode([{"txt.gz": bomb}], max_ratio=0))
    assert decode_field("txt.gz", gzip.compress(zeros[: 2**20])) == zeros[: 2**20].decode()
    assert decode_field("txt.gz", encode_field("txt.gz", zeros.decode())) == zeros.decode()


def test_a_bomb_of_gzip_takes_little_more_memory_than_is_allowed(monkeypatch):
    monkeypatch.setattr(compression, "MAX_HELD", 1 << 22)
    bomb = gzip.compress(bytes(1 << 26))
    tracemalloc.start()
    with pytest.raises(DecodeError, match="more than 200 times"):
        decode_field("txt.gz", bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * len(bomb) + 2 * 2**22


@pytest.mark.parametrize("field", ["npy.gz", "json.gz", "npz", "npz.gz", "png", "tiff"])
def test_masks_of_common_programs(field):
    """Zeros almost everywhere, which shrink a thousandfold."""
    mask = np.zeros((4096, 4096) if field != "json.gz" else (1024, 1024), np.uint8)
    mask[100, 100:120] = 7
    stream = io.BytesIO()
    if field in ("png", "tiff"):
        Image.fromarray(mask).save(stream, field, compression="tiff_deflate" if field == "tiff" else None)
        assert (decode_field(field, stream.getvalue(), "l8") == mask).all()
        return
    if "npz" in field:
        np.savez_compressed(stream, mask=mask)
    elif field == "npy.gz":
        np.save(stream, mask)
    else:
        stream.write(json.dumps(mask.tolist()).encode())
    data = gzip.compress(stream.getvalue()) if field.endswith(".gz") else stream.getvalue()
    assert len(data) * 200 < mask.nbytes
    found = decode_field(field, data)
    assert (np.asarray(found["mask"] if "npz" in field else found) == mask).all()


def test_errors_name_the_field_and_keep_the_cause():
    with pytest.raises(DecodeError) as decoding:
        decode_field("meta.json", b"{")
    assert (decoding.value.field, decoding.value.key) == ("meta.json", None)
    assert decoding.value.reason == str(decoding.value.__cause__)
    with pytest.raises(EncodeError) as encoding:
        encode_field("meta.json", {1, 2})
    assert encoding.value.field == "meta.json"
    assert isinstance(encoding.value.__cause__, TypeError)


def test_an_error_is_one_line(own_codecs):
    @decoder("odd")
    def decode_odd(data):
        raise ValueError("first\nsecond" if data else "")

    with pytest.raises(DecodeError, match=r"\Aodd: first\Z"):
        decode_field("odd", b"x")
    with pytest.raises(DecodeError, match=r"\Aodd: ValueError\Z"):
        decode_field("odd", b"")


def test_a_missing_encoder_lists_the_known_ones_in_one_line():
    with pytest.raises(EncodeError, match=r"no encoder for 'xyz'.* cls .*json.*npy.*png") as error:
        encode_field("a.xyz", 3)
    assert "\n" not in str(error.value)


def test_an_unknown_imagespec_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown imagespec 'rgb16'; known: l8 rgb8 .*torchrgba.* pil"):
        decode([], "rgb16")


def test_users_register_codecs_of_their_own(own_codecs):
    @decoder("celsius", "temp")
    def decode_celsius(data):
        return float(data.removesuffix(b" C"))

    @encoder("celsius", "temp")
    def encode_celsius(value):
        return b"%.1f C" % value

    assert decode_field("room.celsius", encode_field("room.celsius", 21.5)) == 21.5
    assert decode_field("temp.gz", encode_field("temp.gz", 21.5)) == 21.5
    with pytest.raises(EncodeError):
        encode_field("celsius", [])


def test_the_last_registration_counts(own_codecs):
    decoder("jpg", "pkl", "pth")(len)
    assert decode_field("jpg", b"abc") == decode_field("jpg", b"abc", "rgb8") == 3
    for allow_unsafe in (False, True):
        assert decode_field("pkl", b"abc", allow_unsafe=allow_unsafe) == 3
        assert decode_field("pth", b"abc", allow_unsafe=allow_unsafe) == 3
    decoder("npy", unsafe=True)(len)
    assert decode_field("npy", b"abc", allow_unsafe=True) == 3
    with pytest.raises(DecodeError):
        decode_field("npy", b"abc")


def test_an_encoder_must_give_bytes(own_codecs):
    encoder("odd")(str)
    with pytest.raises(EncodeError, match="gave str, not bytes"):
        encode_field("odd", 3)


@pytest.mark.parametrize("register", [decoder, encoder])
@pytest.mark.parametrize("extensions", [(), ("",), ("JPG",), ("tar.gz",), (".jpg",), ("gz",)])
def test_extensions_are_lower_case_without_a_dot(register, extensions):
    with pytest.raises(ValueError, match="is not an extension"):
        register(*extensions)(len)


def test_a_decorator_without_its_extensions_is_refused():
    with pytest.raises(TypeError, match="an extension is a str"):
        decoder(len)(len)


def test_every_decoded_type_encodes():
    decoded = registry.DECODERS.keys() | registry.UNSAFE_DECODERS.keys() | registry.FAMILY_OF_EXTENSION.keys()
    decoded -= {each for each, family in registry.FAMILY_OF_EXTENSION.items() if family.spec == "videospec"}
    only_read = {"ico", *"aifc sph au snd caf m4a aac mka weba w64 mp2 ac3 amr wma wv ape".split()}  # noqa: SIM905
    assert decoded - only_read == registry.ENCODERS.keys()
    assert not only_read & registry.ENCODERS.keys()


def test_importing_the_codecs_is_light():
    heavy = {"numpy", "PIL", "torch", "msgpack", "cbor2"}
    code = f"import sys, tarshards.samples.codecs; print({heavy} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("msg", b"\xdd\xff\xff\xff\xff"),  # an array of 2**32 - 1
        ("msg", b"\xc6\xff\xff\xff\xff"),
        ("msg", b"\xdf\xff\xff\xff\xff"),
        ("cbor", b"\x9b\0\0\0\xff\xff\xff\xff\xff"),
        ("cbor", b"\x5b\0\0\0\xff\xff\xff\xff\xff"),
        ("cbor", b"\xbb\0\0\0\xff\xff\xff\xff\xff"),
        ("json", b"[" * 100_000),
        ("json", b"9" * 100_000),
        ("cls", b"9" * 100_000),
        (
            "npy",
            b"\x93NUMPY\1\0\x76\0"
            + b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}".ljust(117)
            + b"\n",
        ),
        ("ten", b"~TenBin~" + (2**62).to_bytes(8, "little")),
    ],
)
def test_claims_of_length_allocate_nothing(field, data):
    with pytest.raises(DecodeError):
        decode_field(field, data)
