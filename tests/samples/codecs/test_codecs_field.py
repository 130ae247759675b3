"""decode_field and encode_field: which codec a field has, gzip around it, errors, and the user's own codecs."""

import gzip
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.errors import DecodeError, EncodeError
from tarshards.samples import codecs
from tarshards.samples.codecs import decode_field, decoder, encode_field, encoder, registry


@pytest.fixture
def own_codecs():
    """Let a test register what it likes; the tables are as before when it ends."""
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


@settings(deadline=None)
@given(st.sampled_from(["raw", "json", "jpg", "cls", "pkl"]), st.text())
def test_str_becomes_utf_8_in_every_field(field, text):
    assert encode_field(field, text) == text.encode()


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


def test_gzip_bomb_is_refused_and_our_own_long_runs_are_not():
    zeros = bytes(4 * 2**20)
    with pytest.raises(DecodeError, match="more than 200 times the compressed size"):
        decode_field("txt.gz", gzip.compress(zeros))
    assert decode_field("txt.gz", gzip.compress(zeros[: 2**20])) == zeros[: 2**20].decode()
    assert decode_field("txt.gz", encode_field("txt.gz", zeros.decode())) == zeros.decode()


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
        decode_field("txt", b"", images="rgb16")


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
    assert decode_field("jpg", b"abc") == decode_field("jpg", b"abc", images="rgb8") == 3
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
    decoded = registry.DECODERS.keys() | registry.UNSAFE_DECODERS.keys() | codecs.image.EXTENSIONS
    decoded |= codecs.audio.EXTENSIONS
    only_read = {"ico", *"aifc sph au snd caf m4a aac mka weba w64 mp2 ac3 amr wma wv ape".split()}  # noqa: SIM905
    assert decoded - only_read == registry.ENCODERS.keys()
    assert not only_read & registry.ENCODERS.keys()


def test_importing_the_codecs_is_light():
    heavy = {"numpy", "PIL", "simplejpeg", "torch", "msgpack", "cbor2"}
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
