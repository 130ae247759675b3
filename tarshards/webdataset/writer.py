"""Writing shards: webdataset's arguments for our writers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tarshards.samples.codecs.array import encode_npy, encode_torch
from tarshards.samples.keys import Sample
from tarshards.storage.compression import compressed
from tarshards.storage.location import Location
from tarshards.write import shards

torch_dumps, numpy_dumps = encode_torch, encode_npy
FIXED = ("user", "group", "mode", "mtime", "format", "keep_meta")


def make_encoder(spec: Any) -> Callable[[Sample], Sample]:
    """Return a function of a sample that encodes its fields, as far as our codecs do not when it is written.

    *spec* is True for our codecs, False or None for samples of bytes, a dict of functions by extension that come
    before our codecs, or the function itself.
    """
    if callable(spec):
        return spec
    if isinstance(spec, Mapping):
        return partial(_encode, spec)
    return dict if spec else _check_bytes


def _encode(encoders: Mapping[str, Callable[[Any], bytes]], sample: Sample) -> Sample:
    functions = {name: encoders.get(name.rpartition(".")[2]) for name in sample if name[:1] != "_"}
    return {**sample, **{name: function(sample[name]) for name, function in functions.items() if function}}


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
