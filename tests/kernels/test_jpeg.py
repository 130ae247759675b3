"""Decoding JPEGs: whole images by Pillow, then resized, as the oracle; damage is noticed wherever it is."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from programs import load_kernel
from soak import rounds

from tarshards import kernels
from tarshards.kernels import _jpeg_py
from tarshards.samples.codecs import jpeg
from tarshards.samples.payloads import Payloads

MORE = 16  # rows beside those of a box that may be decoded


@pytest.fixture(scope="module")
def kernel():
    module = load_kernel("tarshards.kernels._jpeg")
    assert jpeg.library()
    return module


def picture(height, width, seed=0):
    """Smooth colours, and noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 9 + 1, width // 9 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (smooth + rng.integers(-9, 10, smooth.shape)).clip(0, 255).astype(np.uint8)


def saved(image, **options):
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


def with_factors(data, factors):
    """Return a grey JPEG with other sampling factors, which mean nothing in an image of one colour."""
    frame = data.index(b"\xff\xc0")
    return data[: frame + 11] + bytes([factors]) + data[frame + 12 :]


def made(kind, pixels, quality, subsampling):
    image, grey = Image.fromarray(pixels), Image.fromarray(pixels).convert("L")
    options = {"quality": quality, "subsampling": subsampling}
    return {
        "grey": lambda: saved(grey, quality=quality),
        "grey of other factors": lambda: with_factors(saved(grey, quality=quality), 0x22),
        "rgb": lambda: saved(image, quality=quality, keep_rgb=True, subsampling=0),
        "progressive": lambda: saved(image, progressive=True, **options),
        "restarts": lambda: saved(image, restart_marker_blocks=5, **options),
        "restarts by row": lambda: saved(image, restart_marker_rows=1, **options),
        "baseline": lambda: saved(image, **options),
        "upright": lambda: turned(saved(image, quality=quality, subsampling=1)),
    }[kind]()


def turned(data):
    """Return a JPEG with its chroma halved down instead of across, of other pixels."""
    frame = data.index(b"\xff\xc0")
    data = bytearray(data)
    height, width = data[frame + 5 : frame + 7], data[frame + 7 : frame + 9]
    across = int.from_bytes(width, "big")
    if across % 16 or int.from_bytes(height, "big") % 16:  # as many blocks must be in the file
        return bytes(data)
    data[frame + 11] = 0x12
    return bytes(data)


KINDS = "grey", "grey of other factors", "rgb", "progressive", "restarts", "restarts by row", "baseline", "upright"


def decode(kernel, datas, boxes, size, *, flips=None, planar=False, normal=None):
    """Return the output and the numbers of decoded rows."""
    payloads, count = Payloads.of(datas), len(datas)
    shape = (count, 3, *size) if planar else (count, *size, 3)
    out = np.zeros(shape, np.uint8 if normal is None else np.float32)
    rows = np.array([row.__array_interface__["data"][0] for row in out], np.uint64)
    decoded, targets = np.ones(count, np.int32), np.tile(np.int32(size), (count, 1))
    flips = np.zeros(count, np.uint8) if flips is None else np.uint8(flips)
    of_payloads = payloads.addresses, payloads.sizes
    kernel.decode(decoded, rows, *of_payloads, np.float32(boxes), flips, targets, planar, normal)
    return out, decoded


def eighths_of(shape, box, size):
    """Return the least number of eighths of an image at which its box covers *size*."""
    (height, width), (left, top, right, bottom) = shape, map(float, np.float32(box))
    factor = max(size[0] / (bottom - top), size[1] / (right - left))
    fits = (n for n in (1, 2, 3, 4) if -(-height * n // 8) >= height * factor and -(-width * n // 8) >= width * factor)
    return next(fits, 8)


def resized(pixels, box, size, flip, planar, normal):
    payloads = Payloads.of([pixels])
    out = np.zeros((1, 3, *size) if planar else (1, *size, 3), np.uint8 if normal is None else np.float32)
    boxes, flips = np.float32([box]), np.uint8([flip])
    kernels.pixels.resize(out, payloads.addresses, pixels.shape, boxes, flips, size, planar, normal)
    return out[0]


def whole_then_resized(data, box, size, flip, planar, normal):
    """Decode the whole image at its scale, and resize the box of it."""
    with Image.open(io.BytesIO(data)) as image:
        shape = image.height, image.width
    eighths = eighths_of(shape, box, size)
    pixels = jpeg.decode(data, shape, "RGB", eighths)
    if pixels.shape[:2] != shape:
        box = np.float32(box) * np.float32(eighths / 8)
    return resized(pixels, box, size, flip, planar, normal)


SIDE, PART = st.one_of(st.integers(1, 70), st.integers(1, 300)), st.floats(0, 1, width=32)


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    sides=st.tuples(SIDE, SIDE),
    parts=st.tuples(PART, PART, PART, PART),
    rounded=st.booleans(),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    quality=st.integers(10, 100),
    subsampling=st.integers(0, 2),
    flip=st.booleans(),
    planar=st.booleans(),
    is_float=st.booleans(),
)
def test_a_box_is_what_the_whole_image_has_there(
    kernel, kind, sides, parts, rounded, size, quality, subsampling, flip, planar, is_float
):
    data = made(kind, picture(*sides, seed=quality), quality, subsampling)
    (height, width), ((top, bottom), (left, right)) = sides, (sorted(parts[:2]), sorted(parts[2:]))
    box = np.float32([left * width, top * height, right * width, bottom * height])
    if rounded or box[2] - box[0] < 0.01 or box[3] - box[1] < 0.01:
        box = np.floor(box)
        box[2:] = np.maximum(box[2:], box[:2] + 1).clip(None, [width, height])
        box[:2] = np.minimum(box[:2], box[2:] - 1)
    normal = np.float32([[200, 100, 50], [0.1, 0.2, 0.3]]) if is_float else None
    (got,), (rows,) = decode(kernel, [data], [box], size, flips=[flip], planar=planar, normal=normal)
    assert rows
    np.testing.assert_array_equal(got, whole_then_resized(data, box, size, flip, planar, normal))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", [1, 2, 4, 8])
def test_whole_images_are_those_of_pillow(kernel, kind, draft):
    data = made(kind, picture(96, 64), 80, 2)
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB" if image.mode == "RGB" else "L", (image.width // draft, image.height // draft))
        wanted = np.asarray(image.convert("RGB"))
    size = wanted.shape[:2]
    (got,), (rows,) = decode(kernel, [data], [(0, 0, 64, 96)], size)
    np.testing.assert_array_equal(got, wanted)
    assert rows == size[0]
    np.testing.assert_array_equal(jpeg.decode(data, (96, 64), "RGB", 8 // draft), wanted)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("kind", ["baseline", "grey", "restarts"])
def test_no_more_rows_are_decoded_than_those_of_the_box_and_16(kernel, kind, subsampling):
    data = made(kind, picture(375, 500), 90, subsampling)
    for top in range(0, 375, 23):
        for height in {1, 50, 375 - top}:
            box, size = (30, top, 330, min(375, top + height)), (224, 224)
            _, (rows,) = decode(kernel, [data], [box], size)
            eighths = eighths_of((375, 500), box, size)
            scaled = (box[3] - box[1]) * eighths / 8
            assert 0 < rows <= scaled + MORE


@pytest.mark.parametrize(("size", "eighths"), [(16, 1), (17, 2), (32, 2), (48, 3), (50, 4), (64, 4), (65, 8), (128, 8)])
def test_an_image_is_decoded_at_the_smallest_scale_that_covers_its_box(kernel, size, eighths):
    data = saved(Image.fromarray(picture(128, 128)), quality=95)
    _, (rows,) = decode(kernel, [data], [(0, 0, 128, 128)], (size, size))
    assert rows == 16 * eighths


def damaged(data, rng):
    """Yield the data cut, with a bit changed, with bytes left out, and with bytes put in."""
    for _ in range(rounds(9)):
        place = int(rng.integers(0, len(data)))
        yield data[:place]
        yield data[:place] + bytes([data[place] ^ 1 << int(rng.integers(0, 8))]) + data[place + 1 :]
        yield data[:place] + data[place + int(rng.integers(1, 40)) :]
        yield data[:place] + rng.bytes(9) + data[place:]
        place = int(rng.integers(0, 700))
        yield data[:place] + rng.bytes(1) + data[place + 1 :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed_in_a_box_as_in_the_whole_image(kernel, kind):
    """Wherever both are: in the header, in the box, above it, and below."""
    datas = [*damaged(made(kind, picture(80, 64), 80, 2), np.random.default_rng(0))]
    found = jpeg.read_headers(Payloads.of(datas))
    for top in 0, 40, 72:
        boxes = [(8, top, 40, top + 8)] * len(datas)
        out, decoded = decode(kernel, datas, boxes, (9, 33))
        for data, (height, width, _), row, rows in zip(datas, found.tolist(), out, decoded.tolist()):
            try:
                pixels = jpeg.decode(data, (height, width), "RGB") if height else None
            except ValueError:
                pixels = None
            is_in_it = pixels is not None and height >= top + 8 and width >= 40
            assert bool(rows) == is_in_it
            if is_in_it:
                np.testing.assert_array_equal(row, resized(pixels, boxes[0], (9, 33), 0, False, None))


@pytest.mark.parametrize("part", [0.3, 0.6, 0.99])
def test_a_truncated_image_is_not_decoded_even_where_its_box_is_whole(kernel, part):
    data = saved(Image.fromarray(picture(128, 128)), quality=90)
    _, decoded = decode(kernel, [data[: int(part * len(data))], data], [(0, 0, 64, 8)] * 2, (8, 64))
    assert [bool(rows) for rows in decoded] == [False, True]


def test_what_is_not_taken_is_left_to_others(kernel):
    image = Image.fromarray(picture(40, 40))
    png, cmyk, good = io.BytesIO(), saved(image.convert("CMYK")), saved(image)
    image.save(png, "PNG")
    frame = good.index(b"\xff\xc0")
    arithmetic, deep = bytearray(good), bytearray(good)
    arithmetic[frame + 1], deep[frame + 4] = 0xC9, 12
    others = [b"", b"\xff", b"\xff\xd8\xff", png.getvalue(), cmyk, bytes(arithmetic), bytes(deep), good[: frame + 6]]
    assert not jpeg.read_headers(Payloads.of(others))[:, 0].any()
    out, decoded = decode(kernel, [*others, good], [(0, 0, 40, 40)] * 9, (20, 20))
    assert [bool(rows) for rows in decoded] == 8 * [False] + [True]
    assert not out[:8].any()
    boxes = [(0, 0, 41, 40), (-1, 0, 9, 9), (5, 0, 5, 9), (0, 0, np.nan, 9)]
    _, decoded = decode(kernel, [good] * 4, boxes, (20, 20))
    assert not decoded.any()


def test_only_images_that_are_asked_for_are_decoded(kernel):
    payloads = Payloads.of([saved(Image.fromarray(picture(40, 40)))] * 2)
    out = np.zeros((2, 8, 8, 3), np.uint8)
    rows = np.array([row.__array_interface__["data"][0] for row in out], np.uint64)
    decoded, targets, boxes = np.int32([0, 1]), np.full((2, 2), 8, np.int32), np.float32([[0, 0, 40, 40]] * 2)
    kernel.decode(decoded, rows, payloads.addresses, payloads.sizes, boxes, np.zeros(2, np.uint8), targets, False, None)
    assert (decoded > 0).tolist() == [False, True]
    assert not out[0].any()
    assert out[1].any()


def test_headers_say_sizes_and_whether_there_may_be_exif_data(kernel):
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(picture(30, 50))
    datas = [saved(image), saved(image, exif=exif), saved(image, comment=bytes(60_000)), saved(image.convert("L"))]
    datas += [saved(image, comment=b"Exi" * 9), saved(image, comment=b"E" * 9 + b"xif")]
    wanted = [[30, 50, is_there] for is_there in (0, 1, 0, 0, 0, 1)]
    assert jpeg.read_headers(Payloads.of(datas), True).tolist() == wanted
    assert jpeg.read_headers(Payloads.of(datas)).tolist() == 6 * [[30, 50, 0]]


def test_the_colours_of_an_image(kernel):
    image = Image.fromarray(picture(30, 50))
    for mode, colours in ("L", "L"), ("RGB", "YCbCr"), ("CMYK", "CMYK"):
        assert kernel.header(saved(image.convert(mode))) == (30, 50, colours)
    with pytest.raises(ValueError, match="Not a JPEG file"):
        kernel.header(b"not a JPEG")
    with pytest.raises(ValueError, match="contains no image"):
        kernel.header(saved(image)[:30])
    with pytest.raises(ValueError, match="do not fit"):
        kernel.whole(np.empty(5, np.uint8), saved(image), "RGB", 8)


def test_threads_decode_the_same(kernel):
    datas = [saved(Image.fromarray(picture(100 + i, 120, i)), progressive=i == 3) for i in range(8)]
    boxes = [(i, 2 * i, 90, 80 + i) for i in range(8)]
    wanted, _ = decode(kernel, datas, boxes, (50, 60))
    with ThreadPoolExecutor(8) as pool:
        for out, decoded in pool.map(lambda _: decode(kernel, datas, boxes, (50, 60)), range(16)):
            assert decoded.all()
            np.testing.assert_array_equal(out, wanted)


def test_a_file_that_shrinks_is_an_error_and_the_next_image_is_decoded(kernel, tmp_path):
    mapped = load_kernel("tarshards.kernels._mapped")
    data = saved(Image.fromarray(picture(300, 300)), quality=98)
    assert len(data) > 5 << 12
    path = tmp_path / "image.jpg"
    path.write_bytes(data)
    mapping = mapped.Mapping(str(path))
    payloads = Payloads.within(memoryview(mapping), [0], [len(data)])
    os.truncate(path, 2 << 12)
    out, box = np.zeros((1, 8, 8, 3), np.uint8), np.float32([[0, 0, 300, 300]])
    rows, of_payloads = np.uint64([out.__array_interface__["data"][0]]), (payloads.addresses, payloads.sizes)
    for _ in range(3):
        with pytest.raises(OSError, match="has shrunk"):
            kernel.decode(np.int32([1]), rows, *of_payloads, box, np.uint8([0]), np.int32([[8, 8]]), False, None)
    with pytest.raises(OSError, match="has shrunk"):
        kernel.headers(np.empty((1, 3), np.int32), payloads.addresses + np.uint64(2 << 12), payloads.sizes, False)
    _, decoded = decode(kernel, [data], box, (8, 8))
    assert decoded.all()


def test_arrays_that_do_not_fit_are_refused(kernel):
    good = [np.int32([1]), np.uint64([0]), np.uint64([0]), np.int64([0]), np.zeros((1, 4), np.float32), np.uint8([0])]
    good += [np.int32([[1, 1]]), False, None]
    kernel.decode(*good)
    for i in 0, 1, 2, 3, 4, 5, 6, 8:
        wrong = np.zeros(5, np.float32) if good[i] is None else np.concatenate([good[i], good[i]])
        with pytest.raises(ValueError, match="fit"):
            kernel.decode(*good[:i], wrong, *good[i + 1 :])
    with pytest.raises(ValueError, match="fit"):
        kernel.headers(np.zeros(2, np.int32), good[2], good[3], False)


WITHOUT = """
import numpy as np
from tarshards.kernels import _jpeg
print(_jpeg.open_library("/no/such/file"), _jpeg.open_library(np._core._multiarray_umath.__file__))
found = np.ones((1, 3), np.int32)
_jpeg.headers(found, np.zeros(1, np.uint64), np.zeros(1, np.int64), True)
print(found.tolist())
"""


def test_without_a_library_no_image_is_taken(kernel):
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None None", "[[0, 0, 0]]"]


def test_the_twin_takes_no_image():
    data = saved(Image.fromarray(picture(20, 20)))
    assert _jpeg_py.open_library("libjpeg.so.62") is None
    _, decoded = decode(_jpeg_py, [data], [(0, 0, 20, 20)], (8, 8))
    assert not decoded.any()
    found = np.ones((1, 3), np.int32)
    _jpeg_py.headers(found, *([Payloads.of([data]).addresses] * 2), True)
    assert not found.any()
    for call in (lambda: _jpeg_py.header(data)), (lambda: _jpeg_py.whole(found, data, "RGB", 8)):
        with pytest.raises(ValueError, match="no library is open"):
            call()
