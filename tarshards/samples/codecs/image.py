"""Codecs for images: libjpeg-turbo decodes JPEG, Pillow all other formats, and CMYK or more than 8 bits in JPEG.

HEIC and JPEG XL need plugins of Pillow: ``pip install 'tarshards[heic]'`` and ``'tarshards[jxl]'``.
"""

from __future__ import annotations

import re
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from tarshards import kernels
from tarshards.errors import DecodeError
from tarshards.samples.codecs import image_headers, jpeg
from tarshards.samples.codecs.array import to_array
from tarshards.samples.codecs.registry import SpecFamily, encoder, require

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from tarshards.samples.payloads import Payloads

# Pillow may only detect these formats: some others (EPS) run programs.
FORMATS = "JPEG", "PNG", "PPM", "WEBP", "GIF", "BMP", "ICO", "TIFF", "JPEG2000", "AVIF"
PLUGINS = {"HEIF": ("pillow_heif", "heic"), "JXL": ("pillow_jxl", "jxl")}  # format: module, extra

Imagespec = Literal[
    "l8",
    "rgb8",
    "rgba8",
    "l",
    "rgb",
    "rgba",
    "l16",
    "torchl16",
    "torchl8",
    "torchrgb8",
    "torchrgba8",
    "torchl",
    "torchrgb",
    "torchrgba",
    "torch",
    "pill",
    "pilrgb",
    "pilrgba",
    "pil",
]
IMAGESPECS: dict[str, tuple[str, str | None, str]] = {  # name: container, element, mode
    "l8": ("numpy", "uint8", "L"),
    "rgb8": ("numpy", "uint8", "RGB"),
    "rgba8": ("numpy", "uint8", "RGBA"),
    "l": ("numpy", "float32", "L"),
    "rgb": ("numpy", "float32", "RGB"),
    "rgba": ("numpy", "float32", "RGBA"),
    "l16": ("numpy", "uint16", "L"),
    "torchl16": ("torch", "uint16", "L"),
    "torchl8": ("torch", "uint8", "L"),
    "torchrgb8": ("torch", "uint8", "RGB"),
    "torchrgba8": ("torch", "uint8", "RGBA"),
    "torchl": ("torch", "float32", "L"),
    "torchrgb": ("torch", "float32", "RGB"),
    "torchrgba": ("torch", "float32", "RGBA"),
    "torch": ("torch", "float32", "RGB"),
    "pill": ("pil", None, "L"),
    "pilrgb": ("pil", None, "RGB"),
    "pilrgba": ("pil", None, "RGBA"),
    "pil": ("pil", None, "RGB"),
}

# libjpeg only warns about this damage, and Pillow ignores it: the rest of the image is grey or noise.
DAMAGE = re.compile("Corrupt JPEG data|Premature end of JPEG")


def decode_image(data: bytes, imagespec: str, exif_transpose: bool = False) -> Any:
    """Decode an image: uint8, or float32 in [0, 1]; numpy HWC, torch CHW (both HW for L), or PIL.

    Animations give their first frame. The 16 bits of a grey image become 8 in uint8 and PIL images, and stay 16 in
    float32 and in ``l16``: uint16, 257 times the value of 8 bits. Of 16-bit colours, Pillow decodes 8 bits, so that
    float32 and ``l16`` are refused. EXIF orientation is applied with *exif_transpose*. Raises an error for damaged and
    truncated images.
    """
    import numpy as np

    container, element, mode = IMAGESPECS[imagespec]
    orientation = read_orientation(data) if exif_transpose else 1
    pixels = _decode_jpeg(data, mode) if data.startswith(b"\xff\xd8\xff") else None
    if container == "pil":
        return _to_picture(data, mode, pixels, orientation)
    if pixels is None:
        pixels = np.array(_decode_pillow(data, mode, keeps_16_bits=element != "uint8"))
        if pixels.dtype == np.uint16 and mode != "L":
            pixels = np.stack([pixels] * 3 + [np.full_like(pixels, 65535)] * (mode == "RGBA"), axis=2)
    if orientation != 1:
        pixels = np.ascontiguousarray(oriented(pixels, orientation))
    if element == "uint16" and pixels.dtype == np.uint8:
        pixels = pixels * np.uint16(257)
    if element == "float32":
        pixels = pixels.astype(np.float32) / np.iinfo(pixels.dtype).max
    if container == "numpy":
        return pixels
    torch = require("torch", extra="torch")
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1) if mode != "L" else pixels))


def decode_mask(data: bytes) -> np.ndarray:
    """Return the number of each pixel of a mask, of shape (height, width): its grey level, or its index in a palette.

    Raises ValueError for colours, and an error for damaged and truncated images.
    """
    import numpy as np

    _verify_png(data)
    image = open_image(data)
    _check_pixels(*image.size)
    if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
        raise ValueError(f"colours (mode {image.mode}) are no numbers of pixels: a mask is grey, or has a palette")
    return np.asarray(image)


IMAGES = SpecFamily(
    "imagespec",
    "images",
    IMAGESPECS,
    frozenset(
        "jpg jpeg jpe jfif png ppm pgm pbm pnm webp gif bmp ico tif tiff avif jp2 j2k heic heif jxl".split()  # noqa: SIM905
    ),
    decode_image,
    ("exif_transpose",),
)
IMAGES.add()


def _to_picture(data: bytes, mode: str, pixels: np.ndarray | None, orientation: int) -> Image.Image:
    """Return a PIL image of *pixels*, or, if None, of *data*; with Pillow's metadata, unless it is rotated."""
    import numpy as np
    from PIL import Image

    if pixels is None:
        picture = _decode_pillow(data, mode)
        if orientation == 1:
            return picture
        pixels = np.asarray(picture)
    picture = Image.fromarray(np.ascontiguousarray(oriented(pixels, orientation)))
    if orientation == 1:
        with suppress(Exception):  # damaged metadata of undamaged pixels
            picture.info = open_image(data).info
    return picture


def check_image(data: bytes) -> None:
    """Raise DecodeError if an image does not decode.

    A JPEG is decoded at an eighth of its size, which reads every bit, so it finds damage, but computes fewer pixels.
    """
    with suppress(ValueError):  # ``decode_image`` decides
        if data.startswith(b"\xff\xd8\xff") and _decode_jpeg(data, "RGB", eighths=1) is not None:
            return
    try:
        decode_image(data, "rgb8")
    except Exception as exc:
        raise DecodeError.because(exc) from exc


def _decode_jpeg(data: bytes, mode: str, eighths: int = 8) -> np.ndarray | None:
    """Decode by libjpeg-turbo; return None if it is missing, or Pillow must decode the file (CMYK, more than 8 bits).

    Raises ValueError for damage, which Pillow ignores: CMYK is checked here and decoded by Pillow.
    """
    if not jpeg.library():
        return None
    import numpy as np
    from PIL import Image

    try:
        height, width, colours = kernels.jpeg.header(data)
        _check_pixels(width, height)
        if colours not in ("L", "YCbCr", "RGB"):  # it converts CMYK to other RGB values than Pillow
            jpeg.decode(data, (height, width), "CMYK", 1)
            return None
        if mode != "L":
            return jpeg.decode(data, (height, width), mode, eighths)
        if colours == "L":
            return jpeg.decode(data, (height, width), "L")[:, :, 0]
        # libjpeg's luma differs from the rounded L of Pillow, which other libraries return
        return np.array(Image.fromarray(jpeg.decode(data, (height, width), "RGB")).convert("L"))
    except ValueError as exc:
        if DAMAGE.search(str(exc)):
            raise
        return None


def open_image(data: bytes) -> Image.Image:
    """Open an image by its header; raise PIL.UnidentifiedImageError for other bytes."""
    from PIL import Image, UnidentifiedImageError

    formats: tuple[str, ...] = FORMATS
    if kind := image_headers.plugin_format(data):
        formats = (kind,)
        _register(kind)
        if kind == "JXL":  # decoded when opened
            _check_pixels(*image_headers.jxl_size(data))
    for begin, end in image_headers.icon_images(data):  # Pillow decodes these when it opens the file
        _verify_png(data[begin:end])
    try:
        return Image.open(BytesIO(data), formats=formats)
    except UnidentifiedImageError:  # its text is the address of a Python object
        known = " ".join((*FORMATS, *PLUGINS))
        raise UnidentifiedImageError(f"not a whole image in any of {known}") from None


def _register(kind: str) -> None:
    """Register a plugin with Pillow."""
    module, extra = PLUGINS[kind]
    plugin = require(module, extra=extra)
    if kind == "HEIF":
        plugin.register_heif_opener()


def read_size(data: bytes) -> image_headers.ImageHeader:
    """Return the format and the size of an image by its header.

    Raises DecodeError for a damaged header, or the missing end, of a JPEG or PNG, and for an unknown format; Pillow's
    errors for others.
    """
    header = image_headers.read_header(data)
    if header is None:
        from PIL import UnidentifiedImageError

        try:
            with open_image(data) as image:
                header = image_headers.ImageHeader(image.format or "", image.height, image.width)
        except UnidentifiedImageError:
            start = f"{bytes(data[:12])!r}..." if data else "empty"
            raise DecodeError(f"not an image in any of {' '.join(FORMATS)}: {start}") from None
    return header


def read_sizes(images: Payloads) -> tuple[np.ndarray, dict[int, image_headers.ImageHeader | DecodeError]]:
    """Return height and width of many images, uint32 of shape (n, 2), and more of those in some rows.

    These are the headers of images that are neither JPEG nor PNG, and the errors of ``read_size``.
    """
    import numpy as np

    sizes = np.zeros((len(images), 2), np.uint32)
    others: dict[int, image_headers.ImageHeader | DecodeError] = {}
    row = 0
    while (found := kernels.rows.parse_image_sizes(sizes[row:], images.addresses[row:], images.sizes[row:])) >= 0:
        row += found
        try:
            header = read_size(images[row])
        except Exception as exc:
            others[row] = exc if isinstance(exc, DecodeError) else DecodeError.because(exc)
        else:
            others[row], sizes[row] = header, header[1:]
        row += 1
    return sizes, others


def read_orientation(data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if there is none."""
    if data.startswith(b"\xff\xd8\xff") and b"Exif" not in data[: 1 << 16]:
        return 1
    with open_image(data) as image:
        if image.format == "TIFF":  # Pillow always applies it
            return 1
        orientation = image.getexif().get(0x0112, 1)
    return orientation if orientation in range(1, 9) else 1


def oriented(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return a view of *pixels* (HW or HWC) with an EXIF *orientation* applied: 5 to 8 swap height and width."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels


def _decode_pillow(data: bytes, mode: str, *, keeps_16_bits: bool = False) -> Image.Image:
    _verify_png(data)
    image = open_image(data)
    _check_pixels(*image.size)
    if image.format == "JPEG2000":  # Pillow decodes a truncated one as far as it goes
        image_headers.check_jpeg2000(data)
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        image = _with_bits(image, 16 if keeps_16_bits else 8)
        if keeps_16_bits:
            return image
    elif image.mode in ("I", "F"):
        raise ValueError(f"32-bit pixels (mode {image.mode}) do not convert to 8 bits; register a decoder of your own")
    elif keeps_16_bits and _has_deep_colours(image, data):
        reason = f"more than 8 bits a channel, of which Pillow decodes 8 in colours (mode {image.mode})"
        raise ValueError(f"{reason}: decode rgb8 or l8, or register a decoder of your own")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _has_deep_colours(image: Image.Image, data: bytes) -> bool:
    """Return whether a channel of an image that is not grey has more than the 8 bits that Pillow decodes."""
    if image_headers.bits_of(data, image.format or "") > 8:
        return True
    tiles: Any = getattr(image, "tile", ())
    for _, _, _, arguments in tiles:
        layout, *more = (arguments,) if isinstance(arguments, str) else arguments or ("",)
        if ";16" in str(layout) or (image.format == "PPM" and more and more[0] > 255):
            return True
    return False


def _verify_png(data: bytes) -> None:
    """Compare the checksums of a PNG, and find its end; ignore other bytes."""
    from PIL import Image, UnidentifiedImageError

    if data.startswith(image_headers.PNG):
        image_headers.read_header(data)
        with suppress(UnidentifiedImageError):
            Image.open(BytesIO(data), formats=["PNG"]).verify()


def _with_bits(image: Image.Image, bits: int) -> Image.Image:
    """Keep all 16 bits, or the upper 8, as Pillow does for 16-bit RGB (it would clip 16-bit grey at 255)."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(image)
    return Image.fromarray((pixels >> 8).astype(np.uint8) if bits == 8 else pixels.astype(np.uint16))


def _check_pixels(width: int, height: int) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS  # Pillow itself only warns up to twice this number
    if limit is not None and width * height > limit:
        raise ValueError(f"decompression bomb? {width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS")


@encoder("jpg", "jpeg", "jpe", "jfif")
def encode_jpeg(value: Any) -> bytes:
    """Encode as JPEG of quality 100, without chroma subsampling."""
    return _save(_to_pillow(value, "L RGB CMYK"), "JPEG", quality=100, subsampling=0)


@encoder("png")
def encode_png(value: Any) -> bytes:
    """Encode as PNG."""
    return _save(_to_pillow(value, "1 L LA P RGB RGBA I;16"), "PNG")


@encoder("ppm", "pnm")
def encode_ppm(value: Any) -> bytes:
    """Encode as portable pixmap, graymap or bitmap, depending on the mode."""
    return _save(_to_pillow(value, "1 L RGB I;16"), "PPM")


@encoder("pgm")
def encode_pgm(value: Any) -> bytes:
    """Encode a grey image as portable graymap."""
    return _save(_to_pillow(value, "L I;16"), "PPM")


@encoder("pbm")
def encode_pbm(value: Any) -> bytes:
    """Encode a PIL image of mode 1 as portable bitmap."""
    return _save(_to_pillow(value, "1"), "PPM")


@encoder("webp")
def encode_webp(value: Any) -> bytes:
    """Encode as lossless WebP."""
    return _save(_to_pillow(value, "L RGB RGBA"), "WEBP", lossless=True, exact=True)


@encoder("avif")
def encode_avif(value: Any) -> bytes:
    """Encode as AVIF of quality 100, without chroma subsampling."""
    return _save(_to_pillow(value, "L RGB RGBA"), "AVIF", quality=100, subsampling="4:4:4")


@encoder("jp2")
def encode_jp2(value: Any) -> bytes:
    """Encode as lossless JPEG 2000."""
    return _save(_to_pillow(value, "L LA RGB RGBA I;16"), "JPEG2000")


@encoder("j2k")
def encode_j2k(value: Any) -> bytes:
    """Encode as a bare codestream of lossless JPEG 2000."""
    return _save(_to_pillow(value, "L LA RGB RGBA I;16"), "JPEG2000", no_jp2=True)


@encoder("heic", "heif")
def encode_heic(value: Any) -> bytes:
    """Encode as HEIC of quality 100, without chroma subsampling."""
    image = _to_pillow(value, "L RGB RGBA")
    _register("HEIF")
    return _save(image, "HEIF", quality=100, chroma=444)


@encoder("jxl")
def encode_jxl(value: Any) -> bytes:
    """Encode as lossless JPEG XL."""
    image = _to_pillow(value, "L LA RGB RGBA")
    _register("JXL")
    return _save(image, "JXL", lossless=True)


@encoder("gif")
def encode_gif(value: Any) -> bytes:
    """Encode a grey or palette image as GIF."""
    return _save(_to_pillow(value, "L P"), "GIF")


@encoder("bmp")
def encode_bmp(value: Any) -> bytes:
    """Encode as BMP."""
    return _save(_to_pillow(value, "1 L P RGB"), "BMP")


@encoder("tif", "tiff")
def encode_tiff(value: Any) -> bytes:
    """Encode as uncompressed TIFF."""
    return _save(_to_pillow(value, "1 L LA P RGB RGBA CMYK I;16 I F"), "TIFF")


def _save(image: Image.Image, format: str, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def _to_pillow(value: Any, modes: str) -> Image.Image:
    """Return a PIL image, or pixels of shape HW or HWC, as a PIL image of one of *modes*; uint16 are HW."""
    import numpy as np
    from PIL import Image

    if isinstance(value, np.ndarray):
        array = to_array(value)
        image = Image.fromarray(
            array if (array.dtype, array.ndim) == (np.uint16, 2) and array.size else _to_uint8(array)
        )
    elif isinstance(value, Image.Image):
        image = value
        if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: small previews of a camera
            raise ValueError("an animation, or several pages: only one would be written; give image.copy(), or bytes")
    else:
        raise TypeError(
            f"an image is a PIL image or a numpy array (HW or HWC), not {type(value).__name__}; "
            "for a CHW tensor pass tensor.permute(1, 2, 0).numpy()"
        )
    if image.mode not in modes.split():  # Pillow would drop alpha or colours silently
        raise ValueError(f"an image of mode {image.mode} is not supported; supported modes: {modes}")
    return image


def _to_uint8(pixels: np.ndarray) -> np.ndarray:
    import numpy as np

    if pixels.size == 0 or pixels.ndim < 2 or pixels.shape[2:] not in ((), (1,), (3,), (4,)):
        raise ValueError(f"pixels of shape {pixels.shape}; expected (H, W) or (H, W, 1, 3 or 4)")
    if pixels.shape[2:] == (1,):
        pixels = pixels[:, :, 0]
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind != "f":
        raise TypeError(f"pixels of {pixels.dtype}; expected uint8, floats in [0, 1], or uint16 of one channel")
    scaled = np.rint(pixels.astype(np.float32) * 255)
    if not (scaled.min() >= 0 and scaled.max() <= 255):
        raise ValueError(f"pixels from {pixels.min()} to {pixels.max()}; floats must lie in [0, 1]")
    return scaled.astype(np.uint8)
