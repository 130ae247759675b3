"""npy, npz, pth and tenbin: there and back, WebDataset and numpy as the oracles, and what is refused."""

import gc
import gzip
import io
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from webdataset import tenbin
from with_torch import torch

from tarshards.errors import DecodeError, EncodeError
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.samples.codecs import npy as npy_codec
from tarshards.storage import compression

numbers = hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.complex_number_dtypes()
dtypes = numbers | hnp.datetime64_dtypes() | hnp.unicode_string_dtypes() | hnp.array_dtypes(numbers)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
tensors = hnp.arrays(
    hnp.integer_dtypes(endianness="<") | hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)), shapes
)


@given(hnp.arrays(numbers | hnp.datetime64_dtypes(), shapes), st.binary(max_size=3), st.integers(0, 200))
@example(np.array(False), b"\n\0", 65)  # the pattern ends before the header does
@settings(max_examples=300)
def test_a_plain_header_is_read_as_numpy_reads_it(array, other, at):
    """By a pattern, also where some bytes of it are others."""
    file = io.BytesIO()
    np.save(file, array)
    data = file.getvalue()
    for header in data, data[:at] + other + data[at + len(other) :]:
        if npy_codec.PLAIN.match(header):
            assert outcome(npy_codec._read_header, header) == outcome(read_by_numpy, header)


@given(hnp.arrays(numbers | hnp.datetime64_dtypes(), shapes), st.binary(max_size=3), st.integers(0, 200))
@example(np.zeros((3, 0)), b"", 0)
@settings(max_examples=300)
def test_a_usual_header_has_the_rows_that_parsing_finds(array, other, at):
    file = io.BytesIO()
    np.save(file, array)
    data = file.getvalue()
    usual = npy_codec.UsualHeaders.like(data[: npy_codec.HEAD])
    for payload in data, data[:at] + other + data[at + len(other) :], data[:-1]:
        rows = usual and usual.rows(payload[: npy_codec.HEAD], len(payload))
        if rows is not None:
            found = npy_codec.parse_header(payload)
            assert (found.shape[0], len(found.prefix)) == (rows, npy_codec.HEAD)
            assert (found.dtype, found.shape[1:]) == (array.dtype, array.shape[1:])
        assert rows is not None or payload is not data or not array.ndim or not array.size


def read_by_numpy(header):
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    return np.lib.format.read_array_header_1_0(stream), stream.tell()


def outcome(read, header):
    """What *read* returns, or the error that it raises."""
    try:
        return read(header)
    except Exception as error:  # numpy falls back to Python's tokenizer, which raises any error
        return f"{error}"


def same(got, wanted):
    return got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()


def npy(header):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


@pytest.mark.filterwarnings("ignore:Stored array in format")  # names of fields beyond Latin-1
@settings(deadline=None)
@given(hnp.arrays(dtypes, shapes))
def test_npy(array):
    data = encode_field("npy", array)
    assert same(decode_field("npy", data), array)
    assert same(np.load(io.BytesIO(data)), array)


def test_npy_takes_scalars_and_tensors_and_normalises_the_layout():
    assert same(decode_field("npy", encode_field("npy", np.float32(3))), np.array(3, "f4"))
    weights = torch.arange(6, dtype=torch.float16).reshape(2, 3).requires_grad_()
    assert same(decode_field("npy", encode_field("npy", weights)), np.arange(6, dtype="f2").reshape(2, 3))
    array = np.arange(6).reshape(2, 3)
    assert encode_field("npy", np.asfortranarray(array)) == encode_field("npy", array)


@pytest.mark.parametrize("field", ["npy", "ten"])
@pytest.mark.parametrize("value", [3, 1.5, {1: 2}, None, np.array([{}]), np.ma.masked_array([1, 2], [0, 1])], ids=repr)
def test_what_is_no_array_of_plain_numbers_is_refused(field, value):
    with pytest.raises(EncodeError) as error:
        encode_field(f"x.{field}", value)
    assert error.value.field == f"x.{field}"


def test_npy_never_unpickles():
    stream = io.BytesIO()
    np.save(stream, np.array([{}]), allow_pickle=True)
    for allow_unsafe in (False, True):
        with pytest.raises(DecodeError, match="Object arrays cannot be loaded"):
            decode_field("npy", stream.getvalue(), allow_unsafe=allow_unsafe)


def test_npy_truncated_or_lengthened():
    data = encode_field("npy", np.arange(10))
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_field("npy", data[:length])
    with pytest.raises(DecodeError, match="bytes after the end of the array"):
        decode_field("npy", data + b"\0")


HEADER = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"


@pytest.mark.parametrize(
    "header",
    [
        "-" * 9000 + "1",
        "(" * 9000,
        "[" * 4000 + "]" * 4000,
        "{" * 60_000,
        HEADER.format("'<f8'", "(1000000000000000,)"),
        HEADER.format("'<f8'", "(-1,)"),
        HEADER.format("'<f8'", "(0, 99999999999999999999999)"),
        HEADER.format("'no'", "(1,)"),
        HEADER.format("'<f8'", "(2,)"),
    ],
    ids=lambda header: header[:60],
)
def test_npy_headers_that_lie(header):
    with pytest.raises(DecodeError) as error:
        decode_field("npy", npy(header))
    assert len(error.value.reason) <= 300


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), tensors, max_size=3))
def test_npz(arrays):
    data = encode_field("npz", arrays)
    assert data == encode_field("npz", arrays)
    got = decode_field("npz", data)
    assert list(got) == list(arrays)
    assert all(same(got[name], arrays[name]) for name in arrays)


def test_npz_by_numpy_both_ways(tmp_path):
    arrays = {"a": np.arange(6).reshape(2, 3), "b/c": np.float32(2), "zeros": np.zeros((1024, 1000), "u1")}
    for save in np.savez, np.savez_compressed:
        save(tmp_path / "x.npz", **arrays)
        got = decode_field("npz", (tmp_path / "x.npz").read_bytes())
        assert all(same(got[name], np.asarray(arrays[name])) for name in arrays)
        assert got.keys() == arrays.keys()
    with np.load(io.BytesIO(encode_field("npz", arrays))) as loaded:
        assert all(same(loaded[name], np.asarray(arrays[name])) for name in arrays)


def test_npz_has_no_wall_clock():
    with zipfile.ZipFile(io.BytesIO(encode_field("npz", {"a": np.zeros(3)}))) as archive:
        assert [member.date_time for member in archive.infolist()] == [(1980, 1, 1, 0, 0, 0)]


def test_npz_truncated_anywhere():
    data = encode_field("npz", {"a": np.arange(10), "b": np.zeros(3)})
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_field("npz", data[:length])


def test_npz_damaged_anywhere_never_gives_other_values():
    arrays = {"a": np.arange(10)}
    data = encode_field("npz", arrays)
    for place in range(len(data)):
        try:
            got = decode_field("npz", data[:place] + bytes([data[place] ^ 0x21]) + data[place + 1 :])
        except DecodeError:
            continue
        assert [array.tobytes() for array in got.values()] == [arrays["a"].tobytes()]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_npz_that_would_lose_or_invent_arrays():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", encode_field("npy", np.zeros(1)))
        archive.writestr("a.npy", encode_field("npy", np.ones(1)))
    with pytest.raises(DecodeError, match="two arrays with the same name"):
        decode_field("npz", stream.getvalue())
    for value in [np.zeros(3), {1: np.zeros(3)}, {"a\0b": np.zeros(3)}, {"a": [1, 2]}]:
        with pytest.raises(EncodeError):
            encode_field("npz", value)
    with pytest.raises(DecodeError):
        decode_field("npz", encode_field("npy", np.zeros(3)))


def test_npz_bomb(held):
    """Many entries that share the same deflated bytes: small in the tar, endless in memory."""
    name, plain = b"a.npy", bytes(2**20)
    deflate = zlib.compressobj(9, wbits=-15)
    packed = deflate.compress(plain) + deflate.flush()
    sizes = struct.pack("<LLL", zlib.crc32(plain), len(packed), len(plain))
    local = b"PK\3\4" + struct.pack("<5H", 20, 0, 8, 0, 33) + sizes + struct.pack("<2H", len(name), 0) + name + packed
    entry = b"PK\1\2" + struct.pack("<6H", 20, 20, 0, 8, 0, 33) + sizes + struct.pack("<5H2L", len(name), *[0] * 6)
    directory = (entry + name) * 1000
    end = b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 1000, 1000, len(directory), len(local), 0)
    with pytest.raises(DecodeError, match="more than 200 times the compressed size"):
        decode_field("npz", local + directory + end)


def zipped(arrays, method=zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in arrays.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    return stream.getvalue()


@pytest.fixture
def held(monkeypatch) -> None:
    """Allow only 1 MiB to be held whatever its ratio."""
    monkeypatch.setattr(compression, "MAX_HELD", 1 << 20)


def test_zeros_beyond_the_limit_expand_too_far(held):
    half = encode_field("npy", np.zeros(500_000, "u1"))
    assert decode_field("npz", zipped({"a.npy": half, "b.npy": half})).keys() == {"a", "b"}
    more = zipped({"a.npy": half, "b.npy": half, "c.npy": half})
    for data in more, gzip.compress(more):
        with pytest.raises(DecodeError, match="more than 1 MiB, and more than 200 times the compressed size, would be"):
            decode_field("npz" if data is more else "npz.gz", data)
        assert len(decode_field("npz" if data is more else "npz.gz", data, max_ratio=1e9)) == 3


def test_a_zip_within_gzip_is_measured_by_the_outermost_size(held):
    twice = gzip.compress(zipped({"a.npy": encode_field("npy", np.zeros(100 * 2**20, "u1"))}))
    with pytest.raises(DecodeError, match="more than 200 times the compressed size"):
        decode_field("npz.gz", twice)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_cannot_be_bounded_is_refused(method):
    small = zipped({"a.npy": encode_field("npy", np.zeros(3))}, method)
    with pytest.raises(DecodeError, match="neither stored nor deflated"):
        decode_field("npz", small)


def test_a_directory_that_lies_about_sizes_gives_an_error_and_little_memory():
    data = bytearray(zipped({"a.npy": encode_field("npy", np.zeros(150 * 2**20, "u1"))}))
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<L", 1000)  # of the directory, in which zipfile looks
    code = """
import resource, sys
from tarshards.errors import DecodeError
from tarshards.samples.codecs import decode_field
data = sys.stdin.buffer.read()
decode_field("npz", b"") if not data else None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_field("npz", data)
except DecodeError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], input=bytes(data), capture_output=True, timeout=60, check=True)
    assert 0 <= int(done.stdout) < 100 << 10, "KiB"


def test_pth_bombs(held):
    stream = io.BytesIO()
    torch.save(torch.zeros(2 * 2**20, dtype=torch.uint8), stream)
    with zipfile.ZipFile(stream) as saved:
        members = {member.filename: saved.read(member) for member in saved.infolist()}
    for data in zipped(members, zipfile.ZIP_STORED), stream.getvalue():
        assert decode_field("pth", data).shape == (2 * 2**20,)
    with pytest.raises(DecodeError, match="more than 200 times the compressed size"):
        decode_field("pth", zipped(members))
    with pytest.raises(DecodeError, match="more than 200 times the compressed size"):
        decode_field("pth", zipped(members), allow_unsafe=True)


def test_pth_loads_weights_safely_and_the_rest_only_when_allowed():
    value = {"weights": torch.arange(6.0).reshape(2, 3), "epoch": 3}
    for allow_unsafe in (False, True):
        got = decode_field("pth", encode_field("pth", value), allow_unsafe=allow_unsafe)
        assert torch.equal(got["weights"], value["weights"])
        assert got["epoch"] == 3
    assert encode_field("pth", value) == encode_field("pth", value)
    data = encode_field("a.pth", {"range": slice, "fixture": pytest.fixture})
    assert decode_field("a.pth", data, allow_unsafe=True)["fixture"] is pytest.fixture
    with pytest.raises(DecodeError, match="allow_unsafe=True") as error:
        decode_field("a.pth", data)
    assert error.value.field == "a.pth"


def test_pth_truncated():
    data = encode_field("pth", torch.arange(6))
    for length in range(0, len(data), 13):
        with pytest.raises(DecodeError):
            decode_field("pth", data[:length])


@pytest.mark.parametrize("field", ["ten", "tb", "tenbin"])
@settings(deadline=None)
@given(st.lists(tensors, max_size=3))
def test_tenbin(field, arrays):
    data = encode_field(field, arrays)
    got = decode_field(field, data)
    assert len(got) == len(arrays)
    assert all(same(*pair) for pair in zip(got, arrays))
    assert all(array.flags.writeable for array in got)
    assert len(data) % 8 == 0


@settings(deadline=None)
@given(st.lists(tensors.filter(lambda a: a.dtype != np.uint32 and a.ndim > 0), max_size=3))
def test_tenbin_by_webdataset_both_ways(arrays):
    """But for uint32 (misspelt there) and 0-d arrays, which webdataset cannot read."""
    assert bytes(tenbin.encode_buffer(arrays)) == encode_field("ten", arrays)
    got = tenbin.decode_buffer(encode_field("ten", [array for array in arrays if array.size]))
    assert all(same(*pair) for pair in zip(got, [array for array in arrays if array.size]))


def test_tenbin_takes_one_array_tensors_and_any_byte_order():
    wanted = np.arange(6, dtype="<i4").reshape(2, 3)
    for value in wanted, [wanted], (wanted,), torch.from_numpy(wanted), wanted.astype(">i4"), wanted.copy(order="F"):
        (got,) = decode_field("ten", encode_field("ten", value))
        assert same(got, wanted)


@pytest.mark.parametrize("value", [np.zeros(3, "?"), np.zeros(3, "c8"), np.zeros((1,) * 10), np.zeros(3, "U3"), ["a"]])
def test_what_tenbin_lacks_is_refused(value):
    with pytest.raises(EncodeError):
        encode_field("ten", value)


def test_tenbin_truncated_within_a_list_of_one():
    data = encode_field("ten", [np.arange(30)])
    for length in range(1, len(data)):
        with pytest.raises(DecodeError):
            decode_field("ten", data[:length])


def chunk(data, length=None):
    return b"~TenBin~" + struct.pack("<q", len(data) if length is None else length) + data + bytes(-len(data) % 64)


def header(dtype=b"f4", shape=(2,), ndim=None):
    return struct.pack(f"<8s8sq{len(shape)}q", dtype, b"", len(shape) if ndim is None else ndim, *shape)


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 64,
        chunk(header()),
        chunk(header(), -1) + chunk(bytes(8)),
        chunk(header(), 2**62) + chunk(bytes(8)),
        chunk(header()) + chunk(bytes(8), 2**63 - 1),
        chunk(header()) + chunk(bytes(9)),
        chunk(header()) + chunk(bytes(4)),
        chunk(header(dtype=b"O")) + chunk(bytes(8)),
        chunk(header(dtype=b"\xff")) + chunk(bytes(8)),
        chunk(header(shape=(-2, -1))) + chunk(bytes(8)),
        chunk(header(shape=(2**62, 2**62))) + chunk(bytes(8)),
        chunk(header(shape=(2**62, 0, 2**62))) + chunk(b""),
        chunk(header(ndim=-1)) + chunk(bytes(8)),
        chunk(header(ndim=2**60)) + chunk(bytes(8)),
        chunk(b"f4") + chunk(bytes(8)),
    ],
    ids=range(15),
)
def test_tenbin_that_lies(data):
    with pytest.raises(DecodeError) as error:
        decode_field("x.ten", data)
    assert error.value.field == "x.ten"
    assert error.value.reason


def test_threads_decode_npy_at_once():
    """Where Python's parser counts its depth for all threads together, a switch amid one call makes another fail."""
    data = encode_field("x.npy", np.zeros((3, 4)))
    before, interval = gc.get_threshold(), sys.getswitchinterval()

    def switch(*_: object) -> None:
        time.sleep(0)

    def decode(_: int) -> list[tuple[int, ...]]:
        return [decode_field("x.npy", data).shape for _ in range(1000)]

    gc.callbacks.append(switch)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(decode, range(4)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*before)
        gc.callbacks.remove(switch)
    assert found == [[(3, 4)] * 1000] * 4
