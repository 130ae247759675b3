"""Images that Pillow needs plugins for: HEIC and JPEG XL; round trips, limits, and damage."""

import io
import sys

import numpy as np
import pytest
from PIL import Image
from test_codecs_image import RGB, RGBA, listed, seen_of_changed_bits

from tarshards.errors import DecodeError
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.samples.codecs.image_headers import jxl_size

try:
    import pillow_heif
    import pillow_jxl  # noqa: F401 - registers its format
except ImportError:
    pillow_heif = None
else:
    pillow_heif.register_heif_opener()

pytestmark = [pytest.mark.interop, pytest.mark.skipif(pillow_heif is None, reason="needs pillow-heif, pillow-jxl")]


def saved(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


@pytest.mark.parametrize("image", [RGB, RGBA, RGB.convert("L")], ids=["RGB", "RGBA", "L"])
@pytest.mark.parametrize("field", ["heic", "heif", "jxl"])
def test_round_trips(field, image):
    data = encode_field(field, image)
    assert data == encode_field(field, image)
    got = decode_field(field, data, "rgba8")
    assert np.array_equal(got, np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")))
    off = np.abs(got.astype(int) - np.asarray(image.convert("RGBA"))).max()
    assert off <= (0 if field == "jxl" else 12)


@pytest.mark.parametrize("format", ["HEIF", "JXL"])
def test_truncated_images_are_errors_never_half_a_picture(format):
    data = saved(RGB, format)
    whole = decode_field("heic", data, "rgb8")
    assert whole.shape == (37, 53, 3)
    for length in range(len(data)):
        with pytest.raises(DecodeError):
            decode_field("heic", data[:length], "rgb8")


def test_the_page_lists_what_is_seen_of_changed_bits():
    for field, format in ("heic", "HEIF"), ("heif", "HEIF"), ("jxl", "JXL"):
        assert seen_of_changed_bits(saved(RGB, format)) == listed()[field]


@pytest.mark.parametrize("field", ["heic", "jxl"])
def test_decompression_bombs(field, monkeypatch):
    data = encode_field(field, RGB)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 37 * 53 - 1)
    with pytest.raises(DecodeError, match="decompression bomb"):
        decode_field(field, data, "rgb8")


@pytest.mark.parametrize(
    "size", [(1, 1), (8, 8), (16, 24), (40, 30), (60, 40), (12, 10), (256, 9), (513, 600), (600, 2)]
)
def test_the_size_of_a_jxl_is_known_before_it_is_decoded(size):
    for options in {"lossless": True}, {"use_container": True}:
        assert jxl_size(saved(Image.new("RGB", size), "JXL", **options)) == size


@pytest.mark.parametrize(("field", "module"), [("heic", "pillow_heif"), ("jxl", "pillow_jxl")])
def test_a_missing_plugin_names_its_extra(field, module, monkeypatch):
    data = encode_field(field, RGB)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DecodeError, match=rf"{module} is missing: pip install 'tarshards\[{field}\]'"):
        decode_field(field, data, "rgb8")
