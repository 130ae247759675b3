"""Gathering, packing and parsing the rows of a batch: numpy and Python as oracles."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from soak import rounds

from tarshards.errors import DecodeError
from tarshards.samples.codecs.image_headers import read_header
from tarshards.samples.payloads import Payloads


def test_native_arrays_that_do_not_fit_are_refused(rows):
    addresses = Payloads.of([bytes(12)]).addresses
    with pytest.raises(ValueError, match="as many rows"):
        rows.kernel.gather(np.empty(7, np.uint8), np.zeros(3, np.uint64), b"")
    with pytest.raises(ValueError, match="fit"):
        rows.kernel.parse_integers(np.empty(1, np.int64), addresses, np.empty(2, np.int64))


@given(data=st.data())
def test_gather_is_numpys_take(rows, data):
    count, size, head = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 700)), data.draw(st.binary(max_size=9))
    table = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    indices = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=40)), np.int64)
    stored, width = b"".join(head + row.tobytes() for row in table), len(head) + size
    payloads = Payloads.within(stored, indices * width, np.full(len(indices), width))
    out = np.empty((len(indices), size), np.uint8)
    assert rows.gather(out, payloads.addresses, head) == -1
    np.testing.assert_array_equal(out, table[indices])


def test_gather_stops_at_the_first_that_begins_otherwise(rows):
    payloads, out = Payloads.of([b"head 1", b"head 2", b"heed 3", b"head 4"]), np.zeros((4, 2), np.uint8)
    assert rows.gather(out, payloads.addresses, b"head") == 2
    assert out.tobytes() == b" 1 2\0\0\0\0"


@given(datas=st.lists(st.binary(max_size=700), max_size=40))
def test_pack_puts_one_after_the_other(rows, datas):
    payloads, whole = Payloads.of(datas), b"".join(datas)
    out = np.empty(len(whole), np.uint8)
    rows.pack(out, payloads.addresses, payloads.sizes)
    assert out.tobytes() == whole


@pytest.mark.parametrize("first", [0, 1, 15, 16, 17, 63, 4097])
def test_native_pack_fills_batches_that_no_cache_holds(rows, first):
    data = np.random.default_rng(first).integers(0, 256, (9 << 21) + 5, dtype=np.uint8)
    cuts = [0, first, first + 4096, first + 3 * 4097, *range(1 << 21, len(data), (1 << 21) + 77), len(data)]
    payloads = Payloads.of([data[begin:end] for begin, end in pairwise(cuts)])
    out = np.zeros(len(data) + 3, np.uint8)
    rows.kernel.pack(out[3:], payloads.addresses, payloads.sizes)
    assert np.array_equal(out[3:], data)


@pytest.mark.parametrize(("length", "sizes"), [(8, [3, 4]), (6, [3, 4]), (7, [3]), (0, [0, 0, 0])])
def test_pack_refuses_what_does_not_just_fill(rows, length, sizes):
    payloads, out = Payloads.of([b"cat", b"bird"]), np.zeros(length, np.uint8)
    with pytest.raises(ValueError, match="do not fit together"):
        rows.pack(out, payloads.addresses, np.array(sizes, np.int64))
    assert not out.any()


@pytest.mark.parametrize("sizes", [[-1, 8], [8, -1], [2**62, 2**62]])
def test_pack_refuses_sizes_that_no_payload_has(rows, sizes):
    payloads = Payloads.of([b"cat", b"bird"])
    with pytest.raises(ValueError, match="fit"):
        rows.pack(np.zeros(7, np.uint8), payloads.addresses, np.array(sizes, np.int64))


def test_find_other_finds_the_first_that_begins_otherwise(rows):
    find_other = rows.find_other
    payloads = Payloads.of([b"head 1", b"head 2", b"heed 3", b"hood 4"])
    assert find_other(payloads.addresses, b"head") == 2
    assert find_other(payloads.addresses[:2], b"head") == -1
    assert find_other(payloads.addresses[:0], b"head") == -1


NUMBER = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.text("0123456789+-.eE_ \t\n\v\f\r\0nafit", max_size=12),
    st.sampled_from(
        ["9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "1" * 400]
    ),
).flatmap(lambda text: st.tuples(st.sampled_from(["", " ", "\n\t"]), st.just(text), st.sampled_from(["", " ", "\r\n"])))


def expected(python_type, text):
    """What Python makes of the text, within the limits of the kernels; None where that is nothing."""
    try:
        value = python_type(text)
    except ValueError:
        return None
    if b"_" in text or (python_type is int and not -(2**63) <= value < 2**63):
        return None
    return None if python_type is float and len(text.strip()) > 319 else value


@pytest.mark.parametrize(("kernel", "python_type"), [("parse_integers", int), ("parse_floats", float)])
@given(texts=st.lists(NUMBER.map("".join).map(str.encode), max_size=6))
def test_numbers_are_pythons(rows, kernel, python_type, texts):
    payloads = Payloads.of(texts)
    out = np.zeros(len(texts), python_type)
    wanted = [expected(python_type, text) for text in texts]
    failed = getattr(rows, kernel)(out, payloads.addresses, payloads.sizes)
    assert failed == (wanted.index(None) if None in wanted else -1)
    good = failed if failed >= 0 else len(texts)
    np.testing.assert_array_equal(out[:good], np.array(wanted[:good], python_type))


def any_text(rng):
    """Mostly a number of any sign, length and spelling, and then often one byte more, less or other."""
    kinds = [
        lambda: str(rng.randrange(-(10 ** rng.randrange(1, 25)), 10 ** rng.randrange(1, 25))),
        lambda: repr(rng.uniform(-1, 1) * 10.0 ** rng.randrange(-320, 309)),
        lambda: rng.choice(["inf", "-Infinity", "nan", "-nan", "1_0", "0x1p3", "+5", "-0", "-0.0", "1e999", "", "--1"]),
        lambda: str(2**63 + rng.randrange(-2, 2)),
        lambda: str(-(2**63) + rng.randrange(-2, 2)),
        lambda: "0" * rng.randrange(310, 325) + "1",
    ]
    text = (
        rng.choice(["", "", " ", "\n\t", "\v\f "]) + rng.choice(kinds)() + rng.choice(["", "", " ", "\r\n", "\0", "x"])
    )
    at = rng.randrange(len(text) + 1)
    return (text[:at] + rng.choice(["", "", "", "7", " ", "-", ".", "e", "_"]) + text[at + rng.randrange(2) :]).encode()


@pytest.mark.parametrize(("kernel", "type"), [("parse_integers", np.int64), ("parse_floats", np.float64)])
def test_any_text_is_a_number_or_none_for_both(rows, kernel, type):
    rng, parse = random.Random(0), getattr(rows, kernel)
    found = set()
    for _ in range(rounds(3000)):
        payloads, out = Payloads.of([any_text(rng) for _ in range(rng.choice([1, 1, 12]))]), np.zeros(12, type)
        found.add(parse(out[: len(payloads)], payloads.addresses, payloads.sizes))
    assert found >= {-1, 0, 1, 2}


def images():
    """A JPEG, a progressive one with fill bytes and a marker without length in its header, and a PNG."""
    encoded = []
    for kind, options in ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}):
        stream = BytesIO()
        Image.effect_noise((61, 47), 50).save(stream, kind, **options)
        encoded.append(stream.getvalue())
    encoded[1] = encoded[1][:2] + b"\xff\xff\xff\x01" + encoded[1][2:]
    return encoded


def any_image(rng, whole):
    """Mostly an image, and then often one that is cut, longer, or damaged where its header is."""
    data = bytearray(rng.choice(whole))
    for _ in range(rng.choice([0, 1, 1, 3])):
        place = rng.randrange(min(len(data), rng.choice([30, 700, 1 << 20])))
        data[place : place + rng.randrange(3)] = rng.choice([b"", b"\xff", b"\0\0", b"\xff\xda", rng.randbytes(2)])
    return bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data) + 1)])]) + rng.choice(
        [b"", bytes(40)]
    )


def size_by_header(data):
    with suppress(DecodeError):
        if header := read_header(data):
            return header.height, header.width
    return None


def test_image_sizes_are_those_of_whole_headers(rows):
    rng, whole = random.Random(0), images()
    found = set()
    for _ in range(rounds(1500)):
        datas = [any_image(rng, whole) for _ in range(rng.choice([1, 1, 12]))]
        payloads, out = Payloads.of(datas), np.zeros((len(datas), 2), np.uint32)
        row = rows.parse_image_sizes(out, payloads.addresses, payloads.sizes)
        wanted = [size_by_header(data) for data in datas]
        assert row == (wanted.index(None) if None in wanted else -1)
        good = row if row >= 0 else len(datas)
        assert [*map(tuple, out.tolist())][:good] == wanted[:good]
        found.add(row)
    assert found >= {-1, 0, 1, 2}


def test_bytes_are_copied_from_an_address(rows):
    data = np.arange(200_000, dtype=np.uint32)
    for size in (0, 1, 7, 4096, 70_000, data.nbytes):
        assert rows.copy_bytes(data.ctypes.data, size) == data.tobytes()[:size]
    rows.ask(np.array([data.ctypes.data], np.uint64), np.array([data.nbytes], np.int64))


@pytest.mark.parametrize("threads", [1, 4])
def test_native_kernels_release_what_they_were_given(rows, pixels, threads):
    kernels, payloads = rows.kernel, Payloads.of([bytes(range(12))])
    addresses = payloads.addresses.tobytes()
    box, flip = np.float32([0, 0, 2, 2]).tobytes(), bytes(1)
    calls = {
        "resize": lambda out: pixels.kernel.resize(out, addresses, (2, 2, 3), box, flip, (2, 2), False, None),
        "gather": lambda out: kernels.gather(out, addresses, b""),
        "pack": lambda out: kernels.pack(out, addresses, np.int64([12]).tobytes()),
        "parse_integers": lambda out: kernels.parse_integers(out, addresses, bytes(8)),
        "parse_floats": lambda out: kernels.parse_floats(out, addresses, bytes(8)),
        "parse_image_sizes": lambda out: kernels.parse_image_sizes(out, addresses, bytes(8)),
    }
    for name, call in calls.items():
        out = bytearray(8 if "parse" in name else 12)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _, call=call, out=out: call(out), range(100)))
        out.append(0)  # a BufferError if anyone still held it
        if name != "gather":
            with pytest.raises(ValueError, match="fit"):
                call(out)
            out.append(0)


def test_payloads_must_lie_in_their_buffer():
    payloads = Payloads.within(bytearray(b"0123456789"), [7, 0, 10], [3, 3, 0])
    assert [bytes(payload) for payload in payloads] == [b"789", b"012", b""]
    assert bytes(payloads[np.array([1])][0]) == b"012"
    assert not len(Payloads.within(b"", [], []))
    for buffer, start, size in [(b"0123456789", *each) for each in [(8, 3), (-1, 3), (0, -1), (11, 0)]] + [(b"", 0, 1)]:
        with pytest.raises(ValueError, match="outside"):
            Payloads.within(buffer, [start], [size])
