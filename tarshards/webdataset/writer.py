"""Writing shards: webdataset's arguments for our writers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from typing import Any

from tarshards.samples.codecs import codec_of, gzip
from tarshards.samples.codecs.array import encode_npy, encode_torch
from tarshards.samples.keys import Sample
from tarshards.storage.compression import compressed
from tarshards.storage.location import Location
from tarshards.write import shards

torch_dumps, numpy_dumps = encode_torch, encode_npy
FIXED = ("user", "group", "mode", "mtime", "format", "keep_meta")


def make_encoder(spec: Any) -> Callable[[Sample], Sample]:
    """Return a function of a sample that encodes its fields, as far as our codecs do not when it is written.

    *spec* is True for webdataset's encoders, False or None for samples of bytes, a dict of functions by extension that
    come before those, or the function itself. As in webdataset, a str is written as it is in any field, and values
    change their types on the way: ``{1: 2}`` in JSON comes back as ``{"1": 2}``. Our codecs encode what webdataset's do
    not, and refuse that.
    """
    if callable(spec):
        return spec
    if isinstance(spec, Mapping):
        return partial(_encode, {**default_handlers, **spec})
    return partial(_encode, default_handlers) if spec else _check_bytes


def _encode(encoders: Mapping[str, Callable[[Any], bytes]], sample: Sample) -> Sample:
    return {name: value if name[:1] == "_" else _encode_field(encoders, name, value) for name, value in sample.items()}


def _encode_field(encoders: Mapping[str, Callable[[Any], bytes]], name: str, value: Any) -> Any:
    extension, is_gzip = codec_of(name)
    if isinstance(value, str):
        data = value.encode()
    elif isinstance(value, bytes):
        data = value
    elif extension in encoders:
        data = encoders[extension](value)
    else:
        return value
    return gzip(data) if is_gzip else data


def _encode_image(format: str, value: Any) -> bytes:
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
    stream = BytesIO()
    value.save(stream, format, **({"quality": 100} if format == "JPEG" else {}))
    return stream.getvalue()


def _encode_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _encode_msgpack(value: Any) -> bytes:
    import msgpack

    data: bytes = msgpack.packb(value)
    return data


def _encode_number(value: Any) -> bytes:
    return str(value).encode("ascii")


#: Those of webdataset's encoders that take other values, or write other bytes, than our codecs.
default_handlers: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _encode_number),
    **dict.fromkeys(("json", "jsn"), _encode_json),
    **dict.fromkeys(("mp", "msgpack", "msg"), _encode_msgpack),
    **dict.fromkeys(("jpg", "jpeg", "img", "image"), partial(_encode_image, "JPEG")),
    **dict.fromkeys(("tiff", "tif"), partial(_encode_image, "TIFF")),
    "ppm": partial(_encode_image, "PPM"),
    "png": partial(_encode_image, "PNG"),
}


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

    *encoder* is as for ``make_encoder``, *compress* packs with gzip whatever the name. *user*, *group*, *mode*, *mtime*
    and *format* are fixed here, so that the same samples give the same bytes: they give a warning.
    """

    def __init__(self, fileobj: Any, compress: bool | str | None = None, encoder: Any = True, **fixed: Any):
        if unknown := fixed.keys() - {*FIXED}:
            raise TypeError(f"TarWriter takes no {' '.join(sorted(unknown))}")
        if fixed:
            words = "user, group, mode, mtime and format are fixed, and names with a leading _ are not written"
            warnings.warn(f"TarWriter: {words}; see tarshards.TarWriter", stacklevel=2)
        super().__init__(fileobj, allow_pipe=True)
        self.encoder = make_encoder(encoder)
        if compress and not self.is_compressed:
            self._stream, self.is_compressed = compressed(self._stream, Location.of("a.gz")), True

    def write(self, obj: Sample) -> int:  # type: ignore[override]
        """Append one sample, and return the bytes that it takes in the archive."""
        before = self.size
        super().write(_encoded(self.encoder, obj))
        return self.size - before


class ShardWriter(shards.ShardWriter):
    """Writes samples to numbered shards, with an index each and a manifest.

    *post* is called with the name of each finished shard, *opener* opens shards in place of ``gopen``; *options* are
    those of ``TarWriter``. What is being written: *fname* is the shard, *count* its samples and *size* its bytes;
    *shard* is the number of the next one, and *total* are all samples.
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
            return TarWriter(opened[-1] if opened else name, **options)

        def finish(name: str, _: Any) -> None:
            if opened:
                opened.pop().close()
            if post is not None:
                post(name)

        hooks: Any = {"open_writer": open_writer, "on_finish": finish}
        limits: Any = {"max_samples": int(maxcount), "max_bytes": int(maxsize)}
        super().__init__(pattern, start=start_shard, allow_pipe=True, **limits, **hooks)
        self.encoder = make_encoder(options.get("encoder", True))

    def write(self, obj: Sample) -> None:
        """Append one sample."""
        super().write(_encoded(self.encoder, obj))

    fname = property(lambda self: None if self._writer is None else self._name())
    shard = property(lambda self: self._number + (self._writer is not None))
    total = property(lambda self: self.samples)
    count = property(lambda self: 0 if self._writer is None else self._writer.samples)
    size = property(lambda self: 0 if self._writer is None else self._writer.size)
