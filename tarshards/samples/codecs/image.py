"""Codecs for images: simplejpeg decodes JPEG, Pillow all other formats and the JPEGs that simplejpeg cannot decode."""

from __future__ import annotations

import re
from io import BytesIO
from typing import TYPE_CHECKING, Any

from tarshards.errors import did_you_mean, shortened
from tarshards.samples.codecs.array import to_array
from tarshards.samples.codecs.registry import encoder, require

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

EXTENSIONS = frozenset(["jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "gif", "bmp", "tif", "tiff"])

# Pillow may only detect these formats: some others (EPS) run programs.
FORMATS = "JPEG", "PNG", "PPM", "WEBP", "GIF", "BMP", "TIFF"

IMAGESPECS = {  # name: container, element, mode
    "l8": ("numpy", "uint8", "L"),
    "rgb8": ("numpy", "uint8", "RGB"),
    "rgba8": ("numpy", "uint8", "RGBA"),
    "l": ("numpy", "float32", "L"),
    "rgb": ("numpy", "float32", "RGB"),
    "rgba": ("numpy", "float32", "RGBA"),
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


def check_imagespec(images: Any) -> str | None:
    """Return *images*; raise TypeError or ValueError unless it is an imagespec or None."""
    if images is None or (isinstance(images, str) and images in IMAGESPECS):
        return images
    if not isinstance(images, str):
        advice = "the other fields need none, and decode({field: function}) decodes one by itself"
        raise TypeError(f'an imagespec for all images is a str such as "rgb8", not {shortened(images)}; {advice}')
    hint = did_you_mean(images, IMAGESPECS)
    raise ValueError(f"unknown imagespec {images!r}; known: {' '.join(IMAGESPECS)}{hint}")


def decode_image(data: bytes, imagespec: str) -> Any:
    """Decode an image: uint8, or float32 in [0, 1]; numpy HWC, torch CHW (both HW for L), or PIL.

    Animations give their first frame, 16 bits become 8, and EXIF orientation is not applied. Raises an
    error for damaged and truncated images.
    """
    container, element, mode = IMAGESPECS[imagespec]
    if container == "pil":
        return _decode_pillow(data, mode)
    import numpy as np

    pixels = _decode_jpeg(data, mode) if data.startswith(b"\xff\xd8\xff") else None
    if pixels is None:
        pixels = np.array(_decode_pillow(data, mode))
    if element == "float32":
        pixels = pixels.astype(np.float32) / 255
    if container == "numpy":
        return pixels
    torch = require("torch", extra="torch")
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1) if mode != "L" else pixels))


def _decode_jpeg(data: bytes, mode: str) -> np.ndarray | None:
    """Decode with simplejpeg; return None if it is missing or Pillow must decode the file (CMYK, odd samplings)."""
    try:
        import simplejpeg
    except ImportError:
        return None
    import numpy as np
    from PIL import Image

    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        _check_pixels(width, height)
        if colorspace not in ("Gray", "YCbCr", "RGB"):  # it converts CMYK to other RGB values than Pillow
            return None
        if mode != "L":
            return simplejpeg.decode_jpeg(data, mode)
        if colorspace == "Gray":
            return simplejpeg.decode_jpeg(data, "GRAY")[:, :, 0]
        # libjpeg's luma differs from the rounded L of Pillow, which other libraries return
        return np.array(Image.fromarray(simplejpeg.decode_jpeg(data, "RGB")).convert("L"))
    except ValueError as exc:
        if DAMAGE.search(str(exc)):
            raise
        return None


def _decode_pillow(data: bytes, mode: str) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        if data.startswith(b"\x89PNG"):  # only verify() checks the checksums and the end
            Image.open(BytesIO(data), formats=["PNG"]).verify()
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"not a whole image in any of {' '.join(FORMATS)}") from None
    _check_pixels(*image.size)
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        image = _to_8_bits(image)
    elif image.mode in ("I", "F"):
        raise ValueError(f"32-bit pixels (mode {image.mode}) do not convert to 8 bits; register a decoder of your own")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Keep the upper 8 of 16 bits, as Pillow does for 16-bit RGB (it would clip 16-bit grey at 255)."""
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _check_pixels(width: int, height: int) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS  # Pillow itself only warns up to twice this number
    if limit is not None and width * height > limit:
        raise ValueError(f"decompression bomb? {width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS")


@encoder("jpg", "jpeg")
def encode_jpeg(value: Any) -> bytes:
    """Encode as JPEG of quality 100, without chroma subsampling."""
    import numpy as np

    image = _to_pillow(value, "L RGB CMYK")
    try:
        import simplejpeg
    except ImportError:
        return _save(image, "JPEG", quality=100, subsampling=0)
    if image.mode == "CMYK":
        return _save(image, "JPEG", quality=100, subsampling=0)
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    grey = image.mode == "L"
    return simplejpeg.encode_jpeg(
        pixels, quality=100, colorspace="GRAY" if grey else "RGB", colorsubsampling="Gray" if grey else "444"
    )


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
    """Return a PIL image, or uint8 or float pixels of shape HW or HWC, as a PIL image of one of *modes*."""
    import numpy as np
    from PIL import Image

    if isinstance(value, np.ndarray):
        image = Image.fromarray(_to_uint8(to_array(value)))
    elif isinstance(value, Image.Image):
        image = value
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
        raise TypeError(f"pixels of {pixels.dtype}; expected uint8, or floats in [0, 1]")
    scaled = np.rint(pixels.astype(np.float32) * 255)
    if not (scaled.min() >= 0 and scaled.max() <= 255):
        raise ValueError(f"pixels from {pixels.min()} to {pixels.max()}; floats must lie in [0, 1]")
    return scaled.astype(np.uint8)
