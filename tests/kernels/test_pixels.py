"""Resizing images: Pillow as the oracle."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from tarshards.samples.payloads import Payloads


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


SIDE = st.integers(1, 70)
PART = st.floats(0, 1, width=32)


def resize(kernel, image, box, size, *, flip=0, planar=False, normal=None):
    channels = image.shape[2]
    dtype = np.uint8 if normal is None else np.float32
    out = np.empty((1, channels, *size) if planar else (1, *size, channels), dtype)
    payloads = Payloads.of([image])
    boxes, flips = np.array([box], np.float32), np.array([flip], np.uint8)
    kernel.resize(out, payloads.addresses, image.shape, boxes, flips, size, planar, normal)
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


@given(case=resizes())
def test_resize_is_pillows_within_a_level(pixels, case):
    """Pillow's weights have more bits; rarely both roundings, between the two sums and after them, fall otherwise."""
    off = np.abs(resize(pixels, *case).astype(int) - by_pillow(*case))
    assert off.max() <= 2
    assert (off > 1).sum() <= 1 + off.size // 1000


@given(case=resizes(), flip=st.booleans(), planar=st.booleans())
def test_images_are_flipped_planar_and_normalized_after_they_are_resized(pixels, case, flip, planar):
    plain = resize(pixels, *case)[:, :: -1 if flip else 1]
    wanted = plain.transpose(2, 0, 1) if planar else plain
    np.testing.assert_array_equal(resize(pixels, *case, flip=flip, planar=planar), wanted)
    divisors, offsets = np.random.default_rng(0).uniform(0.1, 2, (2, plain.shape[2])).astype(np.float32)
    wanted = plain.astype(np.float32) / divisors - offsets
    normalized = resize(pixels, *case, flip=flip, planar=planar, normal=np.stack([divisors, offsets]))
    np.testing.assert_array_equal(normalized, wanted.transpose(2, 0, 1) if planar else wanted)


def test_a_box_of_the_wanted_size_is_cut_out(pixels):
    image = noise(40, 50)
    np.testing.assert_array_equal(resize(pixels, image, (7, 3, 27, 33), (30, 20)), image[3:33, 7:27])


@pytest.mark.parametrize("value", [0, 1, 127, 254, 255])
@pytest.mark.parametrize("size", [(1, 1), (3, 700), (299, 2)])
def test_one_colour_stays_that_colour(pixels, value, size):
    image = np.full((301, 403, 3), value, np.uint8)
    assert (resize(pixels, image, (0.3, 0.1, 402.9, 300.7), size) == value).all()


def test_many_images_in_one_call(pixels):
    images = [noise(32, 32, seed) for seed in range(7)]
    boxes = np.float32([[i, i / 3, 32 - i / 2, 30] for i in range(7)])
    flips = np.uint8([0, 1, 1, 0, 1, 0, 0])
    out = np.empty((7, 20, 24, 3), np.uint8)
    pixels.resize(out, Payloads.of(images).addresses, (32, 32, 3), boxes, flips, (20, 24), False, None)
    for row, image, box, flip in zip(out, images, boxes, flips):
        np.testing.assert_array_equal(row, resize(pixels, image, box, (20, 24), flip=flip))


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, 0, 4, 4.5), (2, 0, 2, 4), (0, 3, 4, 1), (0, 0, np.nan, 4)])
def test_a_box_outside_of_its_image_is_refused(pixels, box):
    with pytest.raises(ValueError, match="a box does not lie in its image"):
        resize(pixels, noise(4, 4), box, (3, 3))


def test_native_buffers_that_do_not_fit_are_refused(pixels):
    kernel, payloads = pixels.kernel, Payloads.of([bytes(12)])
    addresses = payloads.addresses
    box, flip, out = np.float32([[0, 0, 2, 2]]), np.uint8([0]), np.empty((1, 2, 2, 3), np.uint8)
    good = [out, addresses, (2, 2, 3), box, flip, (2, 2), False, None]
    kernel.resize(*good)
    wrong = {
        0: out[:, :1],
        2: (2, 2, 2),
        3: box[:, :3],
        4: np.zeros(2, np.uint8),
        5: (0, 2),
        7: np.ones(3, np.float32),
    }
    for i, value in wrong.items():
        with pytest.raises(ValueError, match=r"must|fit"):
            kernel.resize(*good[:i], np.ascontiguousarray(value) if i in (0, 3) else value, *good[i + 1 :])
    for size in 2**24 + 1, -1:
        with pytest.raises(ValueError, match="sides must be"):
            kernel.resize(*good[:5], (size, size), False, None)
