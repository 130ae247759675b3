"""Writing shards: webdataset's arguments for our writers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from io import BytesIO
from typing import Any

import msgpack

from tarshards.errors import EncodeError
from tarshards.samples.codecs import encode_field
from tarshards.samples.codecs.basic import INTEGERS
from tarshards.samples.codecs.registry import ENCODERS
from tarshards.samples.keys import Sample
from tarshards.storage.compression import compressed
from tarshards.storage.location import Location
from tarshards.webdataset.tariterators import gopen as gopen
from tarshards.write import shards

torch_dumps: Callable[[Any], bytes] = ENCODERS["pth"]
numpy_dumps: Callable[[Any], bytes] = ENCODERS["npy"]
numpy_npz_dumps: Callable[[Any], bytes] = ENCODERS["npz"]
encode_integer: Callable[[Any], bytes] = ENCODERS["cls"]
FIXED = ("user", "group", "mode", "mtime", "format", "keep_meta")


def _encode_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _encode_text(value: Any) -> bytes:
    try:
        return encode_integer(value)
    except (TypeError, ValueError):
        return str(value).encode("ascii")


def imageencoder(value: Any, format: str = "PNG") -> bytes:
    """Encode a PIL image or an array as webdataset does: floats are cut off, and JPEG has quality 100."""
    import numpy as np
    from PIL import Image

    if isinstance(value, np.ndarray):
        if value.dtype in (np.float32, np.float64):
            if value.min() <= -0.001 or value.max() >= 1.001:
                raise ValueError(f"pixels from {value.min()} to {value.max()}; floats must lie in [0, 1]")
            value = (np.clip(value, 0.0, 1.0) * 255.0).astype(np.uint8)
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise TypeError(f"an image is a PIL image or a numpy array, not {type(value).__name__}")
    format = {"JPG": "JPEG", "IMG": "PPM", "IMAGE": "PPM"}.get(format.upper(), format.upper())
    stream = BytesIO()
    value.save(stream, format, **({"quality": 100} if format == "JPEG" else {}))
    return stream.getvalue()


#: Functions by extension that encode as webdataset does; our codecs refuse values that would not read back unchanged.
default_handlers: dict[str, Callable[[Any], bytes]] = {
    **ENCODERS,
    **dict.fromkeys(INTEGERS, _encode_text),
    **dict.fromkeys(("json", "jsn"), _encode_json),
    **dict.fromkeys(("mp", "msg", "msgpack"), msgpack.packb),
    **dict.fromkeys(("jpg", "jpeg", "img", "image"), partial(imageencoder, format="JPEG")),
    **dict.fromkeys(("tiff", "tif"), partial(imageencoder, format="TIFF")),
    "ppm": partial(imageencoder, format="PPM"),
    "png": imageencoder,
}


def add_handlers(d: dict[str, Any], keys: str | Iterable[str], value: Any) -> None:
    """Set the entries *keys* of *d*, a list or words, to *value*."""
    d |= dict.fromkeys(keys.split() if isinstance(keys, str) else keys, value)


def make_encoder(spec: Any) -> Callable[[Sample], Sample]:
    """Return a function of a sample that encodes its fields.

    *spec* is True for ``default_handlers``, False or None for samples of bytes, a dict of functions by extension that
    run before our codecs, or the function itself. A str is written as UTF-8 in any field, bytes unchanged, and both are
    compressed if the field ends in ``.gz``. As in webdataset, values may change their types: ``{1: 2}`` in JSON comes
    back as ``{"1": 2}``.
    """
    if callable(spec):
        return spec
    if spec is None or spec is False:
        return _check_bytes
    return partial(_encode, spec if isinstance(spec, Mapping) else default_handlers)


def _encode(encoders: Mapping[str, Callable[[Any], bytes]], sample: Sample) -> Sample:
    encoded = dict(sample)
    for name, value in sample.items():
        if name[:1] != "_":
            try:
                encoded[name] = encode_field(name, value.encode() if isinstance(value, str) else value, encoders)
            except ValueError as error:
                reason = error.reason if isinstance(error, EncodeError) else EncodeError.because(error).reason
                raise EncodeError(reason, key=str(sample.get("__key__")), field=name) from error.__cause__ or error
    return encoded


def _check_bytes(sample: Sample) -> Sample:
    for name, value in sample.items():
        if name[:1] != "_" and not isinstance(value, bytes | bytearray | memoryview):
            raise ValueError(f"{sample.get('__key__')}.{name}: without an encoder it must be bytes, not {value!r:.100}")
    return sample


def _encoded(encoder: Callable[[Sample], Sample], sample: Sample) -> Sample:
    """Return the fields of a sample, encoded, less those with a leading _."""
    return {name: value for name, value in encoder(sample).items() if name == "__key__" or name[:1] != "_"}


class TarWriter(shards.TarWriter):
    """Writes samples to a shard: a path, any writable URL, or a file object, which is left open.

    *encoder* is as for ``make_encoder``. *compress* compresses under any name, True and "gz" with gzip, also "bz2" and
    "xz"; ValueError if the name contradicts it. *user*, *group*, *mode*, *mtime* and *format* are fixed, so that the
    same samples give the same bytes; passing them gives a warning.
    """

    def __init__(self, fileobj: Any, compress: bool | str | None = None, encoder: Any = True, **fixed: Any):
        if unknown := fixed.keys() - {*FIXED}:
            raise TypeError(f"TarWriter takes no {' '.join(sorted(unknown))}")
        if fixed:
            words = "user, group, mode, mtime and format are fixed, and names with a leading _ are not written"
            warnings.warn(f"TarWriter: {words}; see tarshards.TarWriter", stacklevel=2)
        by_word = Location.of(f"a.{'gz' if compress is True else compress or 'tar'}")
        asked = by_word.compression()
        named = Location.of(fileobj).compression() if isinstance(fileobj, str | os.PathLike) else None
        if (compress and asked is None) or (compress is not None and named not in (None, asked)):
            raise ValueError(f"compress={compress!r} for {fileobj}: it is True, 'gz', 'bz2' or 'xz', as the name says")
        super().__init__(fileobj, allow_pipe=True)
        self.encoder: Callable[[Sample], Sample] = make_encoder(encoder)
        if asked and not self.is_compressed:
            self._stream = compressed(self._stream, asked)
            self.is_compressed = True

    def write(self, obj: Sample) -> int:  # type: ignore[override]
        """Append one sample, and return the bytes that it takes in the archive."""
        before = self.end
        super().write(_encoded(self.encoder, obj))
        return self.end - before


class ShardWriter(shards.ShardWriter):
    """Writes samples to numbered shards, with an index each and a manifest.

    *post* is called with the name of each finished shard, *opener* opens shards instead of ``gopen``; *options* are
    those of ``TarWriter``. For the current shard, *fname* is its name, *count* its samples and *size* its bytes;
    *shard* is the number of the next shard, and *total* counts all samples.
    """

    def __init__(
        self,
        pattern: str,
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **options: Any,
    ):
        opened: list[Any] = []

        def open_writer(name: str) -> TarWriter:
            if opener is not None:
                opened.append(opener(name))
            else:
                self._claims.take(name)
            return TarWriter(opened[-1] if opened else name, **options)

        def finish(name: str, _: Any) -> None:
            if opened:
                opened.pop().close()
            if post is not None:
                post(name)

        hooks: Any = {"open_writer": open_writer, "on_finish": finish}
        limits: Any = {"max_samples": int(maxcount), "max_bytes": int(maxsize)}
        super().__init__(pattern, start=start_shard, allow_pipe=True, **limits, **hooks)
        self.encoder: Callable[[Sample], Sample] = make_encoder(options.get("encoder", True))

    def write(self, obj: Sample) -> None:
        """Append one sample."""
        super().write(_encoded(self.encoder, obj))

    fname = property(lambda self: None if self._writer is None else self._name())
    shard = property(lambda self: self._number + (self._writer is not None))
    total = property(lambda self: self.samples)
    count = property(lambda self: 0 if self._writer is None else self._writer.samples)
    size = property(lambda self: 0 if self._writer is None else self._writer.size)
