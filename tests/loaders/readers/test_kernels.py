"""The kernels: Pillow and numpy as oracles, and two makes that agree to the bit."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from readers_data import load_twin, picture

from tarshards.index.memory import Payloads

SIDE = st.integers(1, 70)
PART = st.floats(0, 1, width=32)


def resize(twin, pixels, box, size, *, flip=0, planar=False, normal=(None, None)):
    channels = pixels.shape[2]
    dtype = np.uint8 if normal[0] is None else np.float32
    out = np.empty((1, channels, *size) if planar else (1, *size, channels), dtype)
    payloads = Payloads.of([pixels])
    boxes, flips = np.array([box], np.float32), np.array([flip], np.uint8)
    load_twin(twin).resize(out, payloads.addresses, pixels.shape, boxes, flips, size, planar, *normal)
    return out[0]


def by_pillow(pixels, box, size):
    bands = [Image.fromarray(np.ascontiguousarray(pixels[:, :, c])) for c in range(pixels.shape[2])]
    box = tuple(np.float32(box).tolist())
    return np.stack([band.resize(size[::-1], Image.Resampling.BILINEAR, box=box) for band in bands], axis=2)


@st.composite
def resizes(draw):
    height, width, channels = draw(SIDE), draw(SIDE), draw(st.sampled_from([1, 3, 4]))
    left, right = sorted(draw(st.tuples(PART, PART)))
    top, bottom = sorted(draw(st.tuples(PART, PART)))
    box = np.float32([left * width, top * height, right * width, bottom * height])
    if draw(st.booleans()):
        box = np.floor(box)
    assume(box[2] - box[0] > 0.01 and box[3] - box[1] > 0.01)
    pixels = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels, box, (draw(SIDE), draw(SIDE))


@pytest.mark.parametrize("name", ["native", "python"])
@given(resizes())
def test_resize_is_pillows_within_a_level(name, case):
    """Pillow's weights have more bits; rarely both roundings, between the two sums and after them, fall otherwise."""
    off = np.abs(resize(name, *case).astype(int) - by_pillow(*case))
    assert off.max() <= 2
    assert (off > 1).sum() <= 1 + off.size // 1000


@given(resizes(), st.booleans(), st.booleans(), st.booleans())
def test_native_and_python_resize_alike(case, flip, planar, floats):
    normal = (None, None)
    if floats:
        normal = np.random.default_rng(0).uniform(0.1, 2, (2, case[0].shape[2])).astype(np.float32)
    native, python = (resize(name, *case, flip=flip, planar=planar, normal=normal) for name in ("native", "python"))
    np.testing.assert_array_equal(native, python)


@given(resizes())
def test_native_results_flipped_and_planar_are_the_plain_one_turned(case):
    plain = resize("native", *case)
    np.testing.assert_array_equal(resize("native", *case, flip=1), plain[:, ::-1])
    np.testing.assert_array_equal(resize("native", *case, planar=True), plain.transpose(2, 0, 1))


@pytest.mark.parametrize("name", ["native", "python"])
def test_a_box_of_the_wanted_size_is_cut_out(name):
    pixels = picture(40, 50)
    np.testing.assert_array_equal(resize(name, pixels, (7, 3, 27, 33), (30, 20)), pixels[3:33, 7:27])


@pytest.mark.parametrize("name", ["native", "python"])
@pytest.mark.parametrize("value", [0, 1, 127, 254, 255])
@pytest.mark.parametrize("size", [(1, 1), (3, 700), (299, 2)])
def test_one_colour_stays_that_colour(name, value, size):
    pixels = np.full((301, 403, 3), value, np.uint8)
    assert (resize(name, pixels, (0.3, 0.1, 402.9, 300.7), size) == value).all()


@pytest.mark.parametrize("name", ["native", "python"])
def test_many_images_in_one_call(name):
    images = [picture(32, 32, seed) for seed in range(7)]
    boxes = np.float32([[i, i / 3, 32 - i / 2, 30] for i in range(7)])
    flips = np.uint8([0, 1, 1, 0, 1, 0, 0])
    out = np.empty((7, 20, 24, 3), np.uint8)
    load_twin(name).resize(out, Payloads.of(images).addresses, (32, 32, 3), boxes, flips, (20, 24), False, None, None)
    for row, pixels, box, flip in zip(out, images, boxes, flips):
        np.testing.assert_array_equal(row, resize(name, pixels, box, (20, 24), flip=flip))


@pytest.mark.parametrize("name", ["native", "python"])
@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, 0, 4, 4.5), (2, 0, 2, 4), (0, 3, 4, 1), (0, 0, np.nan, 4)])
def test_a_box_outside_of_its_image_is_refused(name, box):
    with pytest.raises(ValueError, match="a box does not lie in its image"):
        resize(name, picture(4, 4), box, (3, 3))


def test_native_buffers_that_do_not_fit_are_refused():
    kernels, payloads = load_twin("native"), Payloads.of([bytes(12)])
    addresses = payloads.addresses
    box, flip, out = np.float32([[0, 0, 2, 2]]), np.uint8([0]), np.empty((1, 2, 2, 3), np.uint8)
    good = [out, addresses, (2, 2, 3), box, flip, (2, 2), False, None, None]
    kernels.resize(*good)
    wrong = {
        0: out[:, :1],
        2: (2, 2, 2),
        3: box[:, :3],
        4: np.zeros(2, np.uint8),
        5: (0, 2),
        7: np.ones(3, np.float32),
        8: np.ones(3, np.float32),
    }
    for i, value in wrong.items():
        with pytest.raises(ValueError, match=r"must|fit"):
            kernels.resize(*good[:i], np.ascontiguousarray(value) if i in (0, 3) else value, *good[i + 1 :])
    for size in 2**24 + 1, -1:
        with pytest.raises(ValueError, match="sides must be"):
            kernels.resize(*good[:5], (size, size), False, None, None)
    with pytest.raises(ValueError, match="as many rows"):
        kernels.gather(np.empty(7, np.uint8), np.zeros(3, np.uint64), b"")
    with pytest.raises(ValueError, match="fit"):
        kernels.parse_integers(np.empty(1, np.int64), addresses, np.empty(2, np.int64))


@pytest.mark.parametrize("name", ["native", "python"])
@given(st.data())
def test_gather_is_numpys_take(name, data):
    rows, size, head = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 700)), data.draw(st.binary(max_size=9))
    table = np.random.default_rng(0).integers(0, 256, (rows, size), dtype=np.uint8)
    indices = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=40)), np.int64)
    stored, width = b"".join(head + row.tobytes() for row in table), len(head) + size
    payloads = Payloads.within(stored, indices * width, np.full(len(indices), width))
    out = np.empty((len(indices), size), np.uint8)
    assert load_twin(name).gather(out, payloads.addresses, head) == -1
    np.testing.assert_array_equal(out, table[indices])


@pytest.mark.parametrize("name", ["native", "python"])
def test_gather_stops_at_the_first_that_begins_otherwise(name):
    payloads, out = Payloads.of([b"head 1", b"head 2", b"heed 3", b"head 4"]), np.zeros((4, 2), np.uint8)
    assert load_twin(name).gather(out, payloads.addresses, b"head") == 2
    assert out.tobytes() == b" 1 2\0\0\0\0"


@pytest.mark.parametrize("name", ["native", "python"])
@given(datas=st.lists(st.binary(max_size=700), max_size=40))
def test_pack_puts_one_after_the_other(name, datas):
    payloads, whole = Payloads.of(datas), b"".join(datas)
    out = np.empty(len(whole), np.uint8)
    load_twin(name).pack(out, payloads.addresses, payloads.sizes)
    assert out.tobytes() == whole


@pytest.mark.parametrize("first", [0, 1, 15, 16, 17, 63, 4097])
def test_native_pack_fills_batches_that_no_cache_holds(first):
    data = np.random.default_rng(first).integers(0, 256, (9 << 21) + 5, dtype=np.uint8)
    cuts = [0, first, first + 4096, first + 3 * 4097, *range(1 << 21, len(data), (1 << 21) + 77), len(data)]
    payloads = Payloads.of([data[begin:end] for begin, end in pairwise(cuts)])
    out = np.zeros(len(data) + 3, np.uint8)
    load_twin("native").pack(out[3:], payloads.addresses, payloads.sizes)
    assert np.array_equal(out[3:], data)


@pytest.mark.parametrize("name", ["native", "python"])
@pytest.mark.parametrize(("room", "sizes"), [(8, [3, 4]), (6, [3, 4]), (7, [3]), (0, [0, 0, 0])])
def test_pack_refuses_what_does_not_just_fill(name, room, sizes):
    payloads, out = Payloads.of([b"cat", b"bird"]), np.zeros(room, np.uint8)
    with pytest.raises(ValueError):  # noqa: PT011 - each twin has its words
        load_twin(name).pack(out, payloads.addresses, np.array(sizes, np.int64))
    assert not out.any()


@pytest.mark.parametrize("sizes", [[-1, 8], [8, -1], [2**62, 2**62]])
def test_pack_refuses_sizes_that_no_payload_has(sizes):
    payloads = Payloads.of([b"cat", b"bird"])
    with pytest.raises(ValueError, match="fit"):
        load_twin("native").pack(np.zeros(7, np.uint8), payloads.addresses, np.array(sizes, np.int64))


@pytest.mark.parametrize("name", ["native", "python"])
def test_find_other_finds_the_first_that_begins_otherwise(name):
    find_other = load_twin(name).find_other
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


@pytest.mark.parametrize("name", ["native", "python"])
@pytest.mark.parametrize(("kernel", "python_type"), [("parse_integers", int), ("parse_floats", float)])
@given(st.lists(NUMBER.map("".join).map(str.encode), max_size=6))
def test_numbers_are_pythons(name, kernel, python_type, texts):
    payloads = Payloads.of(texts)
    out = np.zeros(len(texts), python_type)
    wanted = [expected(python_type, text) for text in texts]
    failed = getattr(load_twin(name), kernel)(out, payloads.addresses, payloads.sizes)
    assert failed == (wanted.index(None) if None in wanted else -1)
    good = failed if failed >= 0 else len(texts)
    np.testing.assert_array_equal(out[:good], np.array(wanted[:good], python_type))


@pytest.mark.parametrize("threads", [1, 4])
def test_native_kernels_release_what_they_were_given(threads):
    kernels, payloads = load_twin("native"), Payloads.of([bytes(range(12))])
    addresses = payloads.addresses.tobytes()
    box, flip = np.float32([0, 0, 2, 2]).tobytes(), bytes(1)
    calls = {
        "resize": lambda out: kernels.resize(out, addresses, (2, 2, 3), box, flip, (2, 2), False, None, None),
        "gather": lambda out: kernels.gather(out, addresses, b""),
        "pack": lambda out: kernels.pack(out, addresses, np.int64([12]).tobytes()),
        "parse_integers": lambda out: kernels.parse_integers(out, addresses, bytes(8)),
        "parse_floats": lambda out: kernels.parse_floats(out, addresses, bytes(8)),
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
