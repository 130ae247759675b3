"""Images: WebDataset's imagespecs as the oracle, lossless encoders, and damage that is never half a picture."""

import io
import re
import struct
import zlib
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageOps
from soak import SOAK, rounds
from webdataset.autodecode import ImageHandler
from with_torch import needs_torch, torch

from tarshards import kernels, readers
from tarshards.errors import DecodeError, EncodeError
from tarshards.kernels import _jpeg_py
from tarshards.loaders.arrays.readers.draws import draws_of
from tarshards.samples.codecs import decode_field, encode_field, image_headers
from tarshards.samples.codecs.image import IMAGES, IMAGESPECS, check_image, decode_image, read_size, read_sizes
from tarshards.samples.payloads import Payloads
from tarshards.stream.ops import decode

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "images.md"
RNG = np.random.default_rng(0)
BLOCKS = np.kron(RNG.integers(0, 236, (5, 7, 3)), np.ones((8, 8, 1))) + RNG.integers(0, 20, (40, 56, 3))
RGB = Image.fromarray(BLOCKS.astype(np.uint8)[:37, :53])
RGBA = Image.merge("RGBA", [*RGB.split(), RGB.convert("L").transpose(Image.Transpose.FLIP_LEFT_RIGHT)])


def saved(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


FILES = {
    "jpg": saved(RGB, "JPEG"),
    "444.jpg": saved(RGB, "JPEG", quality=100, subsampling=0),
    "422.jpg": saved(RGB, "JPEG", subsampling=1),
    "progressive.jpg": saved(RGB, "JPEG", progressive=True),
    "grey.jpg": saved(RGB.convert("L"), "JPEG"),
    "rgb.jpg": saved(RGB, "JPEG", keep_rgb=True),
    "cmyk.jpg": saved(RGB.convert("CMYK"), "JPEG"),
    "turned.jpeg": saved(RGB, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
    "png": saved(RGB, "PNG"),
    "rgba.png": saved(RGBA, "PNG"),
    "la.png": saved(RGBA.convert("LA"), "PNG"),
    "grey.png": saved(RGB.convert("L"), "PNG"),
    "bilevel.png": saved(RGB.convert("1"), "PNG"),
    "palette.png": saved(RGB.convert("P"), "PNG"),
    "transparent.png": saved(RGB.convert("P"), "PNG", transparency=bytes(range(256))),
    "cut.png": saved(RGB, "PNG", transparency=RGB.getpixel((0, 0))),
    "ppm": saved(RGB, "PPM"),
    "pnm": saved(RGB, "PPM"),
    "pgm": saved(RGB.convert("L"), "PPM"),
    "pbm": saved(RGB.convert("1"), "PPM"),
    "webp": saved(RGB, "WEBP"),
    "rgba.webp": saved(RGBA, "WEBP", lossless=True),
    "gif": saved(RGB, "GIF"),
    "transparent.gif": saved(RGB.convert("P"), "GIF", transparency=3),
    "bmp": saved(RGB, "BMP"),
    "tif": saved(RGB, "TIFF"),
    "rgba.tiff": saved(RGBA, "TIFF", compression="tiff_deflate"),
    "cmyk.tiff": saved(RGB.convert("CMYK"), "TIFF"),
    "lzw.tif": saved(RGB, "TIFF", compression="tiff_lzw"),
    "jpeg.tif": saved(RGB, "TIFF", compression="jpeg"),
    "avif": saved(RGB, "AVIF"),
    "rgba.avif": saved(RGBA, "AVIF"),
    "jp2": saved(RGB, "JPEG2000"),
    "rgba.jp2": saved(RGBA, "JPEG2000"),
    "lossy.j2k": saved(RGB, "JPEG2000", no_jp2=True, irreversible=True, quality_mode="rates", quality_layers=[8]),
    "png_named.jpg": saved(RGB, "PNG"),
    "jpg_named.png": saved(RGB, "JPEG"),
    "jfif": saved(RGB, "JPEG"),
    "jpe": saved(RGB.convert("L"), "JPEG"),
    "ico": saved(RGBA.resize((40, 32)), "ICO", sizes=[(16, 16), (40, 32)]),
    "bitmap.ico": saved(RGBA.resize((40, 32)), "ICO", sizes=[(16, 16), (40, 32)], bitmap_format="bmp"),
    "masked.ico": saved(RGB.resize((40, 32)), "ICO", sizes=[(40, 32)], bitmap_format="bmp"),
}
SPECS = [imagespec for imagespec in IMAGESPECS if find_spec("torch") or not imagespec.startswith("torch")]
THEIRS = [imagespec for imagespec in SPECS if not imagespec.endswith("16")]
WITHOUT = [pytest.param(True, id="libjpeg-turbo"), pytest.param(False, id="Pillow")]


@pytest.fixture
def library(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(kernels, "jpeg", _jpeg_py)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("library", WITHOUT, indirect=True)
@pytest.mark.parametrize("field", FILES)
def test_imagespecs_give_what_webdataset_gives(field, library):
    for imagespec in THEIRS:
        wanted = ImageHandler(imagespec, [field.rpartition(".")[2]])(f".{field}", FILES[field])
        got = decode_field(field, FILES[field], imagespec)
        if isinstance(wanted, Image.Image):
            assert (got.mode, got.size, got.tobytes()) == (wanted.mode, wanted.size, wanted.tobytes()), imagespec
        else:
            assert type(got) is type(wanted)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert np.array_equal(got, wanted), imagespec


@pytest.mark.parametrize("field", FILES)
def test_decoding_warns_of_nothing_and_gives_arrays_of_their_own(field):
    for imagespec in SPECS:
        got = decode_field(field, FILES[field], imagespec)
        if isinstance(got, np.ndarray):
            assert got.flags.writeable
            if find_spec("torch"):
                torch.from_numpy(got)
        elif not isinstance(got, Image.Image):
            assert got.is_contiguous()


@needs_torch
def test_shapes_and_ranges():
    assert decode_field("png", FILES["png"], "l8").shape == (37, 53)
    assert decode_field("png", FILES["png"], "rgba").shape == (37, 53, 4)
    assert decode_field("png", FILES["png"], "torchrgb").shape == (3, 37, 53)
    white = encode_field("png", np.full((2, 3, 3), 255, np.uint8))
    assert decode_field("png", white, "rgb").tolist() == [[[1.0] * 3] * 3] * 2


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_upper_bits_where_webdataset_clips(format):
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    field = {"PNG": "png", "TIFF": "tif", "PPM": "pgm"}[format]
    assert np.array_equal(decode_field(field, saved(Image.fromarray(grey), format), "l8"), grey >> 8)


@pytest.mark.parametrize("field", ["png", "tif", "pgm", "jp2"])
def test_16_bit_grey_is_kept_where_it_is_asked_for(field):
    grey = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    data = encode_field(field, grey)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), grey)
    got = decode_field(field, data, "l16")
    assert (got.dtype, np.array_equal(got, grey)) == (np.uint16, True)
    assert np.array_equal(decode_field(field, data, "l8"), grey >> 8)


@pytest.mark.parametrize("field", ["png", "tif", "pgm", "jp2"])
def test_16_bit_grey_is_kept_in_floats(field):
    grey = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    data = encode_field(field, grey)
    exact = grey.astype(np.float32) / 65535
    opaque = np.stack([exact] * 3 + [np.ones_like(exact)], axis=2)
    assert np.array_equal(decode_field(field, data, "l"), exact)
    assert np.array_equal(decode_field(field, data, "rgb"), opaque[:, :, :3])
    assert np.array_equal(decode_field(field, data, "rgba"), opaque)
    assert np.array_equal(decode_field(field, data, "rgb8"), np.stack([grey >> 8] * 3, axis=2))
    if find_spec("torch"):
        assert np.array_equal(decode_field(field, data, "torchrgb").numpy(), np.stack([exact] * 3))
    upper = encode_field(field, (grey >> 8) * 257)
    assert np.allclose(decode_field(field, upper, "l"), (grey >> 8) / np.float32(255), rtol=1e-6)


def png_of_16_bits(pixels: np.ndarray, colour: int) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    height, width = pixels.shape[:2]
    head = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = b"IHDR" + head, b"IDAT" + zlib.compress(rows), b"IEND"
    packed = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def tiff_of_16_bits(pixels: np.ndarray, photometric: int) -> bytes:
    height, width, channels = pixels.shape
    tags = {256: width, 257: height, 259: 1, 262: photometric, 277: channels, 278: height, 279: pixels.nbytes, 284: 1}
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    tags |= {258: start, 273: start + 2 * channels}
    forms = {258: (3, channels)}  # the others are one number of 32 bits
    entries = [struct.pack("<HHII", tag, *forms.get(tag, (4, 1)), value) for tag, value in sorted(tags.items())]
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries) + bytes(4)
    return head + struct.pack(f"<{channels}H", *[16] * channels) + pixels.astype("<u2").tobytes()


DEEP = np.random.default_rng(0).integers(0, 1 << 16, (16, 16, 4), np.uint16)
SMOOTH = Image.fromarray(np.full((32, 32, 3), 90, np.uint8))
BARE = saved(SMOOTH, "JPEG2000", no_jp2=True)
COMPONENTS = BARE.index(b"\xff\x51") + 40
COLOURS = {
    "rgb.png": png_of_16_bits(DEEP[:, :, :3], 2),
    "grey_alpha.png": png_of_16_bits(DEEP[:, :, :2], 4),
    "rgba.png": png_of_16_bits(DEEP, 6),
    "rgb.tiff": tiff_of_16_bits(DEEP[:, :, :3], 2),
    "cmyk.tiff": tiff_of_16_bits(DEEP, 5),
    "ppm": b"P6 16 16 65535\n" + DEEP[:, :, :3].astype(">u2").tobytes(),
    "of_1000.ppm": b"P6 16 16 1000\n" + (DEEP[:, :, :3] % 1001).astype(">u2").tobytes(),
    "j2k": BARE[:COMPONENTS] + b"\x0b\1\1" * 3 + BARE[COMPONENTS + 9 :],  # the header of 12 bits; Pillow writes only 8
}


@pytest.mark.parametrize("field", COLOURS)
def test_16_bit_colours_do_not_become_256_levels_where_more_are_asked_for(field):
    for imagespec in "l16", "rgb", "l", "torchrgb", "rgba":
        with pytest.raises(DecodeError, match=r"more than 8 bits a channel, of which Pillow decodes 8 in .* rgb8"):
            decode_field(field, COLOURS[field], imagespec)
    if field != "j2k":
        assert decode_field(field, COLOURS[field], "rgb8").dtype == np.uint8
        assert decode_field(field, COLOURS[field], "pil").mode == "RGB"


def test_the_bits_of_a_channel_are_in_the_header():
    data = saved(SMOOTH, "AVIF")
    assert [image_headers.bits_of(*each) for each in ((data, "AVIF"), (BARE, "JPEG2000"), (data, "PNG"))] == [8, 8, 0]
    ten = data.replace(b"pixi\0\0\0\0\3\x08\x08\x08", b"pixi\0\0\0\0\3\n\n\n")  # which Pillow does not write
    assert image_headers.bits_of(ten, "HEIF") == 10
    for length in range(len(data)):
        assert image_headers.bits_of(data[:length], "AVIF") in (0, 8)


@pytest.mark.parametrize("field", ["jpg", "png", "cmyk.jpg", "webp"])
def test_8_bits_become_16_by_the_factor_that_keeps_white_white(field):
    got = decode_field(field, FILES[field], "l16")
    assert np.array_equal(got, decode_field(field, FILES[field], "l8") * np.uint16(257))
    if find_spec("torch"):
        assert np.array_equal(decode_field(field, FILES[field], "torchl16").numpy(), got)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_pillow_does(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(RGB, format, exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    upright = wanted.shape[:2] == ((53, 37) if orientation >= 5 else (37, 53))
    assert upright
    for imagespec in ["rgb8", "pilrgb", "rgb", *(["torchrgb8"] if find_spec("torch") else [])]:
        got = decode_field("jpg", data, imagespec, exif_transpose=True)
        if imagespec == "torchrgb8":
            got = got.permute(1, 2, 0).numpy()
        assert np.array_equal(np.asarray(got), wanted / np.float32(255) if imagespec == "rgb" else wanted)
    (sample,) = decode([{"__key__": "a", "jpg": data}], "rgb8", exif_transpose=True)
    assert np.array_equal(sample["jpg"], wanted)
    if format != "TIFF":  # which Pillow turns always
        left_alone = decode_field("jpg", data, "rgb8")
        assert np.array_equal(left_alone, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused_where_webdataset_clips(dtype):
    data = saved(Image.fromarray(np.ones((4, 4), dtype)), "TIFF")
    with pytest.raises(DecodeError, match="32-bit pixels"):
        decode_field("tif", data, "l8")


@pytest.mark.parametrize("library", WITHOUT, indirect=True)
@pytest.mark.parametrize("field", FILES)
def test_truncated_images_are_errors_never_half_a_picture(field, library):
    data = FILES[field]
    whole = decode_field(field, data, "rgba8")
    for length in sorted({*range(64), *range(64, len(data), 41), *range(len(data) - 64, len(data))}):
        if data.startswith((b"GIF", b"BM")) and length >= len(data) - 4:  # where there is no more picture
            with suppress(DecodeError):
                assert np.array_equal(decode_field(field, data[:length], "rgba8"), whole)
            continue
        with pytest.raises(DecodeError) as error:
            decode_field(field, data[:length], "rgba8")
        assert error.value.field == field
        assert "0x" not in error.value.reason, "no addresses of Python objects"


@pytest.mark.parametrize("imagespec", ["l8", "rgb", "torchrgb8", "pil"])
def test_truncated_images_are_errors_for_every_kind_of_imagespec(imagespec):
    for field in "jpg", "cmyk.jpg", "png":
        for length in range(0, len(FILES[field]) - 4, 17):
            with pytest.raises(DecodeError):
                decode_field(field, FILES[field][:length], imagespec)


def seen_of_changed_bits(data):
    """Return "unseen" if other pixels came of changed bits, without an error; else "an error"."""
    rng, whole = np.random.default_rng(0), decode_image(data, "rgba8")
    for bit in rng.integers(0, 8 * len(data), 100 * SOAK).tolist():
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            pixels = decode_image(bytes(flipped), "rgba8")
        except Exception:
            continue
        if not np.array_equal(pixels, whole):
            return "unseen"
    return "an error"


def listed():
    """The extensions, by the page's words on the detection of a changed bit."""
    rows = re.findall(r"^\| ([a-z0-9 `]+) \| an error \| (an error|unseen) \|", PAGE.read_text(), re.MULTILINE)
    return {name: seen for names, seen in rows for name in names.strip("`").split()}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_the_page_lists_what_is_seen_of_changed_bits(capfd):
    assert set(listed()) == IMAGES.extensions
    found: dict[str, set[str]] = {}
    for field, data in FILES.items():
        if "named" not in field:
            found.setdefault(field.rpartition(".")[2], set()).add(seen_of_changed_bits(data))
    assert {name: max(seen) for name, seen in found.items()} == {name: listed()[name] for name in found}


def test_damaged_png_is_an_error_at_every_byte_before_its_empty_last_chunk():
    data = FILES["grey.png"]
    for place in range(len(data) - 12):
        with pytest.raises(DecodeError):
            decode_field("png", data[:place] + bytes([data[place] ^ 0x21]) + data[place + 1 :], "l8")


def test_jpeg_that_libjpeg_calls_corrupt_is_an_error():
    data = FILES["jpg"]
    start = data.index(b"\xff\xda") + 20
    for place in range(start, start + 30):
        with pytest.raises(DecodeError, match="Corrupt JPEG data"):
            decode_field("jpg", data[:place] + data[place + 40 :], "rgb8")


def read_by(reader, data):
    """The result of a reader of an ArrayLoader."""
    payloads = Payloads.of([data])
    opened = reader.open("jpg", payloads[0])
    batch = opened.make(1)
    if failed := opened.read(batch, payloads, draws_of(0, 0, [0])):
        raise failed[0]
    return batch[0]


def test_sizes_of_many_are_those_of_each():
    rng = np.random.default_rng(0)
    files = [each for data in FILES.values() for each in (data, *damaged(data, rng))]
    sizes, others = read_sizes(Payloads.of(files))
    for row, data in enumerate(files):
        header = None
        with suppress(Exception):
            header = read_size(data)
        assert tuple(sizes[row].tolist()) == (header[1:] if header else (0, 0))
        if header is None:
            assert isinstance(others[row], DecodeError)
        else:
            assert others.get(row) == (None if header.kind in ("jpeg", "png") else header)


#: All that decodes or checks an image. Those that give every pixel as it is, in RGB, come first.
WAYS = {
    **{spec: partial(decode_image, imagespec=spec) for spec in ("rgb8", "pilrgb", "pil")},
    "readers.image()": partial(read_by, readers.image()),
    "readers.decoded": partial(read_by, readers.decoded("pil")),
    **{spec: partial(decode_image, imagespec=spec) for spec in SPECS if spec not in ("rgb8", "pilrgb", "pil")},
    "readers.image(8)": partial(read_by, readers.image(8)),
    "a crop": partial(read_by, readers.image(8, crop="center", dtype="float32")),
    "tarcheck": check_image,
}


def seen_by(data):
    """Return the ways that give *data*, after a check that pixels are equal."""
    given = {}
    for name, way in WAYS.items():
        with suppress(Exception):
            given[name] = way(data)
    pixels = [np.asarray(given[name]) for name in list(WAYS)[:5] if name in given]
    assert all(np.array_equal(each, pixels[0]) for each in pixels)
    return set(given)


def damaged(data, rng):
    """*data* cut anywhere, and with a bit, or a byte near the beginning, changed."""
    for place in rng.integers(0, len(data), rounds(2)):
        yield data[:place]
    for place, bit in zip(rng.integers(0, len(data), rounds(6)), rng.integers(0, 8, rounds(6))):
        yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
    for place in rng.integers(0, min(len(data), 400), rounds(4)):
        yield data[:place] + rng.bytes(1) + data[place + 1 :]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", WITHOUT, indirect=True)
@pytest.mark.parametrize("field", FILES)
def test_whatever_decodes_an_image_calls_the_same_ones_damaged(field, library, capfd):
    ways = seen_by(FILES[field])
    assert set(WAYS) - ways <= {"DALI"}  # which refuses some formats
    for data in damaged(FILES[field], np.random.default_rng(0)):
        assert seen_by(data) & ways in (set(), ways)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", FILES)
def test_the_full_check_for_dali_calls_the_same_ones_damaged(field, monkeypatch, capfd):
    from tarshards.loaders.dali.image_check import ImageGuard

    guard = ImageGuard("jpg", on_bad="drop", check="full")

    def check(data):
        def fail(error):
            raise error

        guard.encode_samples([{"jpg": data}], fail)

    monkeypatch.setitem(WAYS, "DALI", check)
    test_whatever_decodes_an_image_calls_the_same_ones_damaged(field, None, capfd)


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("field", [field for field, data in FILES.items() if data.startswith(b"\xff\xd8")])
def test_a_jpeg_whose_header_says_twice_its_rows_or_half_is_an_error(field, factor):
    data = bytearray(FILES[field])
    (frame,) = (match.start() for match in re.finditer(rb"\xff[\xc0\xc2]\0", data))
    data[frame + 5 : frame + 7] = int(37 * factor).to_bytes(2, "big")
    assert seen_by(bytes(data)) == set()


def test_jpegs_of_4_4_1_are_decoded_and_checked():
    data = bytearray(saved(RGB.crop((0, 0, 16, 16)), "JPEG", subsampling="4:2:0"))
    frame = data.index(b"\xff\xc0")
    assert data[frame + 11] == 0x22
    data[frame + 5 : frame + 9], data[frame + 11] = struct.pack(">HH", 32, 8), 0x14  # its blocks one below the other
    assert seen_by(bytes(data)) == set(WAYS)
    data[frame + 5 : frame + 7] = struct.pack(">H", 64)
    assert seen_by(bytes(data)) == set()


def test_a_pil_image_of_a_jpeg_keeps_its_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(RGB, "JPEG", exif=exif, icc_profile=b"a profile", dpi=(90, 90))
    picture, theirs = decode_image(data, "pil"), Image.open(io.BytesIO(data)).convert("RGB")
    assert picture.info == theirs.info
    assert picture.getexif() == theirs.getexif() == {0x0112: 6}
    assert ImageOps.exif_transpose(picture).size == (37, 53)


@pytest.mark.parametrize("size", [(300, 300), (39, 32)])
def test_an_icon_whose_image_is_not_of_the_size_that_it_says_is_an_error(size):
    data = bytearray(FILES["masked.ico"])
    data[6:8] = bytes(side % 256 for side in size)
    with pytest.raises(DecodeError, match=r"an icon of .* pixels whose image has 40 x 32"):
        decode_field("ico", bytes(data), "rgb8")


@pytest.mark.parametrize("data", [b"", b"x", b"\xff\xd8\xff", b"\x89PNG", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\0" * 1000])
def test_what_is_no_image(data):
    with pytest.raises(DecodeError, match="not a whole image in any of JPEG PNG"):
        decode_field("png", data, "rgb8")


@pytest.mark.parametrize("field", ["jpg", "png", "gif"])
def test_decompression_bombs(field, monkeypatch):
    for limit in 37 * 53 - 1, 37:  # where Pillow warns, and where it raises
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DecodeError, match="decompression bomb"):
            decode_field(field, FILES[field], "rgb8")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 37 * 53)
    assert decode_field(field, FILES[field], "rgb8").shape == (37, 53, 3)


@pytest.mark.filterwarnings("ignore")
def test_decompression_bombs_are_errors_also_where_warnings_are_not(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 37 * 53 - 1)
    with pytest.raises(DecodeError, match="decompression bomb"):
        decode_field("png", FILES["png"], "rgb8")


pixels = st.sampled_from([(), (1,), (3,), (4,)]).flatmap(
    lambda channels: hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda hw: hw + channels))
)
LOSSLESS = {
    "l8": ["png", "ppm", "pnm", "pgm", "webp", "gif", "bmp", "tif", "tiff"],
    "rgb8": ["png", "ppm", "pnm", "webp", "bmp", "tif", "tiff"],
    "rgba8": ["png", "webp", "tif", "tiff"],
}


@settings(deadline=None)
@given(pixels)
def test_lossless_round_trips(array):
    imagespec = {2: "l8", 3: {1: "l8", 3: "rgb8", 4: "rgba8"}.get(array.shape[-1])}[array.ndim]
    wanted = array[:, :, 0] if array.shape[2:] == (1,) else array
    for field in LOSSLESS[imagespec]:
        data = encode_field(field, array)
        assert np.array_equal(decode_field(field, data, imagespec), wanted), field
        assert encode_field(field, Image.fromarray(wanted)) == data == encode_field(field, np.asfortranarray(array))


@pytest.mark.parametrize("imagespec", ["l", "rgb", "rgba"])
def test_floats_round_trip(imagespec):
    floats = decode_field("png", FILES["rgba.png"], imagespec)
    assert np.array_equal(decode_field("png", encode_field("png", floats), imagespec), floats)
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for dtype in np.float16, np.float32, np.float64:
        assert np.array_equal(decode_field("png", encode_field("png", (every / 255).astype(dtype)), "l8"), every)


@pytest.mark.parametrize("library", WITHOUT, indirect=True)
@pytest.mark.parametrize("field", ["jpg", "jpeg"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpeg_round_trips_within_rounding(field, mode, library):
    image = RGB.convert(mode)
    data = encode_field(field, np.asarray(image))
    assert data == encode_field(field, image)
    got = decode_field(field, data, "l8" if mode == "L" else "rgb8")
    assert got.shape == np.asarray(image).shape
    assert np.abs(got.astype(int) - np.asarray(image)).max() <= 4


def test_pil_images_of_other_modes():
    for field, mode in [("pbm", "1"), ("gif", "P"), ("png", "P"), ("tif", "CMYK"), ("png", "LA"), ("bmp", "1")]:
        image = RGBA.convert("RGB").convert(mode)
        with Image.open(io.BytesIO(encode_field(field, image))) as got:
            assert np.array_equal(got.convert("RGB"), image.convert("RGB")), (field, mode)
    depth = Image.fromarray(np.arange(100, dtype=np.uint16).reshape(10, 10) * 600)
    for field in "png", "pgm", "tif":
        with Image.open(io.BytesIO(encode_field(field, depth))) as got:
            assert np.array_equal(np.asarray(got), np.asarray(depth))
    assert decode_field("jpg", encode_field("jpg", RGB.convert("CMYK")), "pil").size == RGB.size


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("jpg", RGBA, "mode RGBA is not supported; supported modes: L RGB CMYK"),
        ("ppm", np.asarray(RGBA), "mode RGBA is not supported"),
        ("bmp", RGBA, "mode RGBA is not supported"),
        ("gif", RGB, "mode RGB is not supported"),
        ("pgm", RGB, "mode RGB is not supported"),
        ("pbm", RGB.convert("L"), "mode L is not supported"),
        ("png", np.zeros((3, 4, 2), np.uint8), r"shape \(3, 4, 2\)"),
        ("png", np.zeros(3, np.uint8), r"shape \(3,\)"),
        ("png", np.zeros((0, 3), np.uint8), r"shape \(0, 3\)"),
        ("png", np.zeros((3, 8, 8), np.uint8), r"shape \(3, 8, 8\)"),
        ("png", np.zeros((3, 3), np.int64), "pixels of int64"),
        ("png", np.zeros((3, 3), bool), "pixels of bool"),
        ("png", np.full((3, 3), 1.1), "must lie in"),
        ("png", np.full((3, 3), -0.1), "must lie in"),
        ("png", np.full((3, 3), np.nan), "must lie in"),
        ("jpg", [[1, 2]], "not list"),
    ],
)
def test_what_does_not_fit_is_refused(field, value, reason):
    with pytest.raises(EncodeError, match=reason) as error:
        encode_field(f"a.{field}", value)
    assert error.value.field == f"a.{field}"


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_not_written_as_its_first_frame(format):
    frames = [Image.new("L", (4, 4), shade).convert("P" if format == "GIF" else "RGB") for shade in (0, 204)]
    animation = Image.open(io.BytesIO(saved(frames[0], format, save_all=True, append_images=frames[1:])))
    field = "gif" if format == "GIF" else "png"
    with pytest.raises(EncodeError, match=r"an animation, or several pages: .*; give image.copy\(\), or bytes"):
        encode_field(field, animation)
    animation.seek(1)
    copy = animation.copy().convert(frames[0].mode)
    assert decode_field(field, encode_field(field, copy), "l8").max() == 204


def test_a_tensor_is_refused_with_a_hint():
    with pytest.raises(EncodeError, match=r"not Tensor; for a CHW tensor pass tensor.permute\(1, 2, 0\).numpy\(\)"):
        encode_field("png", torch.zeros(3, 4, 4))
