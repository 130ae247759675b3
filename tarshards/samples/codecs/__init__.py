"""Decode and encode fields; the extension (the last dotted part of a field) selects the codec, as in WebDataset.

- ``registry``: the decorators ``decoder`` and ``encoder``, and families of codecs
- ``basic``, ``array``, ``image``: the built-in codecs; ``media``: those of sound and video; ``jpeg``: by libjpeg-turbo
- ``decoding``: decoding by a pipeline's functions and handlers
- ``shrinking``: images made smaller for training
- ``npy``, ``image_headers``: headers read without decoding
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, NoReturn

from tarshards.errors import DecodeError, EncodeError
from tarshards.samples.codecs import array, basic
from tarshards.samples.codecs import image as image
from tarshards.samples.codecs.registry import (
    DECODERS,
    ENCODERS,
    FAMILY_OF_EXTENSION,
    UNSAFE_DECODERS,
    decoder,
    decoder_of,
    encoder,
)
from tarshards.storage.compression import MAX_RATIO, bomb, gunzip

__all__ = ["decode_field", "decoder", "encode_field", "encoder"]

MEDIA = "tarshards.samples.codecs.media"  # registers its families, unless it was removed
if find_spec(MEDIA):
    import_module(MEDIA)

Encoders = Mapping[str, Callable[[Any], bytes]]
_BYTES = (bytes, bytearray, memoryview)
_NO_TEXT = frozenset(ENCODERS.values()) - {basic.encode_text, basic.encode_json}  # built-in encoders that refuse a str


class ByExtension(NamedTuple):
    """How to decode fields by their extension.

    Images, sounds and videos stay bytes unless one of the *words*, at most one of a family, says in which form to
    decode them: an imagespec (`l8 rgb8 rgba8 l rgb rgba l16 torchl8 ... pilrgba pil`), an audiospec (`audio
    torchaudio`), a videospec (`video torchvideo`). With *exif_transpose* images are rotated by their EXIF orientation;
    videos are rotated by their metadata unless *rotate* is False. The extension ``gz`` is decompressed first, and the
    part before it selects the decoder. A gzip or zip (npz, pth) may not expand to more than both 256 MiB and
    *max_ratio* times its size, by default 200.
    """

    words: tuple[str, ...] = ()
    exif_transpose: bool = False
    rotate: bool = True
    allow_unsafe: bool = False
    max_ratio: float | None = None

    def decode(self, field: str, data: bytes) -> Any:
        """Return the value of *field*, or *data* if there is no decoder; raise DecodeError with the field."""
        words, exif_transpose, rotate, allow_unsafe, max_ratio = self
        extension, gzipped = codec_of(field)
        if allow_unsafe and extension in UNSAFE_DECODERS:
            decode = UNSAFE_DECODERS[extension]
        elif extension in DECODERS:
            decode = DECODERS[extension]
        elif extension in UNSAFE_DECODERS:
            raise DecodeError(f"{extension} can run code from the data; decode it with allow_unsafe=True", field=field)
        else:
            family = FAMILY_OF_EXTENSION.get(extension) if words else None
            word = family and next(filter(family.words.__contains__, words), None)
            if not word:
                return data
            decode = decoder_of(word, exif_transpose=exif_transpose, rotate=rotate)

        try:
            plain = gunzip(data, max_ratio) if gzipped else data
            if extension in array.ZIPPED:
                array.check_zip(plain, len(data), max_ratio)
            return decode(plain)
        except Exception as exc:
            raise DecodeError.because(exc, field) from exc


_PLAIN = ByExtension()


def decode_field(field: str, data: bytes, *words: str, **how: Any) -> Any:
    """Do what ``ByExtension(words, **how).decode(field, data)`` does.

    >>> decode_field("meta.json", b'{"boxes": 2}'), decode_field("cls", b"7"), decode_field("raw", b"7")
    ({'boxes': 2}, 7, b'7')
    """
    return (ByExtension(words, **how) if words or how else _PLAIN).decode(field, data)


def encode_field(field: str, value: Any, encoders: Encoders | None = None) -> bytes:
    """Encode *value* by the extension of *field*; bytes are returned unchanged.

    The extension ``gz`` compresses the encoded value; bytes count as already compressed. ``decode_field`` returns the
    value with its type, except that lossy images and audio change, tuples become lists, and tensors arrays. Raises
    EncodeError, with the field, for a value that would change, and for a str in a field that is not text, which could
    be the value or its bytes. JSON accepts a str with an object or an array, as from ``json.dumps``. Other *encoders*,
    functions by extension, run before ours, which encode what is not bytes yet; with them ``gz`` also compresses bytes.

    >>> encode_field("meta.json", {"boxes": 2}), encode_field("cls", 7), encode_field("raw", b"7")
    (b'{"boxes": 2}', b'7', b'7')
    """
    if encoders is None and isinstance(value, _BYTES):
        return bytes(value)
    extension, gzipped = codec_of(field)
    try:
        if encoders is not None and not isinstance(value, _BYTES) and (encode := encoders.get(extension)):
            value = encode(value)
        data = bytes(value) if isinstance(value, _BYTES) else _encoded(extension, value)
        return gzip(data) if gzipped else data
    except Exception as exc:
        raise EncodeError.because(exc, field) from exc


def _encoded(extension: str, value: Any) -> bytes:
    encode = ENCODERS.get(extension) or _no_encoder(extension)
    if isinstance(value, str) and encode in _NO_TEXT:
        raise TypeError("a str in a field that is not text; give the value, or bytes")
    data = encode(value)
    if not isinstance(data, bytes):
        raise TypeError(f"the encoder of {extension} gave {type(data).__name__}, not bytes")
    return data


def _no_encoder(extension: str) -> NoReturn:
    known = " ".join(sorted(ENCODERS))
    raise ValueError(f"no encoder for {extension!r}; give bytes, such as text.encode(), or use one of: {known}")


@lru_cache(1024)
def codec_of(field: str) -> tuple[str, bool]:
    """Return the extension that selects the codec, and whether the data is compressed with gzip.

    >>> codec_of("seg.PNG"), codec_of("json.gz"), codec_of("gz")
    (('png', False), ('json', True), ('', True))
    """
    *_, inner, last = ["", *field.lower().split(".")]
    return (inner, True) if last == "gz" else (last, False)


def gzip(data: bytes) -> bytes:
    """Compress *data*, without a timestamp."""
    # A long run of one byte shrinks a thousandfold, more than decode_field accepts of much data; Huffman alone shrinks
    # eightfold.
    for strategy in zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY:
        stream = zlib.compressobj(wbits=31, strategy=strategy)
        packed = stream.compress(data) + stream.flush()
        if bomb(len(data), len(packed), MAX_RATIO) is None:
            break
    return packed
