"""Image headers agree with Pillow, and truncation at any point is detected."""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tarshards.errors import DecodeError
from tarshards.samples.codecs.image_headers import read_header


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 50).convert(mode)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def with_thumbnail() -> bytes:
    """A JPEG that has a whole other one in its header, as cameras make them."""
    data, thumbnail = encode(noise(90, 70), "JPEG"), b"Exif\0\0" + encode(noise(16, 16), "JPEG")
    return data[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + data[2:]


IMAGES = {
    "baseline": encode(noise(61, 47), "JPEG"),
    "grey": encode(noise(1, 1, "L"), "JPEG"),
    "CMYK": encode(noise(33, 9, "CMYK"), "JPEG"),
    "progressive": encode(noise(61, 47), "JPEG", progressive=True),
    "restart markers": encode(noise(200, 100), "JPEG", restart_marker_blocks=3),
    "thumbnail": with_thumbnail(),
    "PNG": encode(noise(61, 47), "PNG"),
    "palette": encode(noise(300, 2, "P"), "PNG", optimize=True),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_size_is_that_of_pillow(name):
    header = read_header(IMAGES[name])
    with Image.open(BytesIO(IMAGES[name])) as image:
        assert header == (image.format.lower(), image.height, image.width)


@pytest.mark.parametrize("name", IMAGES)
def test_what_follows_an_image_does_no_harm(name):
    assert read_header(IMAGES[name] + bytes(100)) == read_header(IMAGES[name])


@pytest.mark.parametrize("name", IMAGES)
@given(data=st.data())
def test_an_image_cut_anywhere_is_an_error(name, data):
    whole = IMAGES[name]
    cut = whole[: data.draw(st.integers(8, len(whole) - 1))]
    with pytest.raises(DecodeError, match=r"truncated|breaks off|does not say"):
        read_header(cut)


def test_fill_bytes_before_a_marker_are_passed_over():
    data = IMAGES["baseline"]
    assert read_header(data[:2] + b"\xff\xff" + data[2:]) == read_header(data)


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"hello", encode(noise(5, 5), "BMP"), encode(noise(5, 5), "WEBP")])
def test_other_bytes_have_no_header(data):
    assert read_header(data) is None


def test_an_image_without_pixels_is_an_error():
    data = bytearray(IMAGES["PNG"])
    data[16:20] = bytes(4)
    with pytest.raises(DecodeError, match="a PNG of 0 x 47 pixels"):
        read_header(bytes(data))


@given(st.binary(), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_give_a_header_an_error_or_nothing(data, magic):
    try:
        header = read_header(magic + data)
    except DecodeError:
        return
    assert header is None or header.height * header.width > 0


@given(st.sampled_from(sorted(IMAGES)), st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_a_damaged_header_gives_no_other_exception(name, place, damage):
    data = bytearray(IMAGES[name])
    data[place : place + len(damage)] = damage
    with suppress(DecodeError):
        read_header(bytes(data))
