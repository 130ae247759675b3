"""MDS, the shards of MosaicML's streaming: an ``index.json``, and files of samples whose columns it describes.

A file begins with the number of its samples and their offsets, and one more, each a uint32. A sample begins with the
sizes, each a uint32, of the columns whose size is not fixed; then come the values. Source of the format: the package
mosaicml-streaming, ``streaming/base/format/mds``.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from tarshards.errors import OpenError, SampleError, UrlError
from tarshards.formats.pieces import Plan, RecordPiece, file_identity, lose
from tarshards.samples.ledger import Ledger
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard

if TYPE_CHECKING:
    import numpy as np

INDEX = "index.json"
MOST_INDEX = 1 << 28  # bytes of an index
MOST_FILE = 1 << 32  # bytes of a file, whose offsets are of 32 bits
_SCALARS = {"int": "<i8", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8"}
_SCALARS |= {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8"}
_SCALARS |= {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}


@dataclass(frozen=True)
class MdsPiece(RecordPiece):
    """A file of MDS; *columns* are the names, encodings and fixed sizes, None for others."""

    columns: tuple[tuple[str, str, int | None], ...]
    samples_in: int
    identity: list[Any]
    unit = "sample"

    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            with open_shard(self.url) as stream:
                data = _whole(stream)
            (count,) = struct.unpack_from("<I", data)
            offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
            if count != self.samples_in or offsets[-1] != len(data):
                raise ValueError(f"{count} samples in {len(data):,} bytes, which differs from {INDEX} or its offsets")
        except OpenError as error:
            ledger(error)
            return
        except (ValueError, struct.error) as error:
            ledger(SampleError(f"not a file of MDS: {error}", url=self.name))
            return
        decoders = [(name, size, decoder_of(encoding)) for name, encoding, size in self.columns]
        for number in range(count):
            try:
                yield number, _sample(data[offsets[number] : offsets[number + 1]], decoders)
            except (ValueError, struct.error, LookupError) as error:
                lose(ledger, SampleError(str(error), url=self.at(number)))


def _whole(stream: BinaryIO) -> bytes:
    parts, size = [], 0
    while data := stream.read(1 << 20):
        parts.append(data)
        size += len(data)
        if size > MOST_FILE:
            raise ValueError(f"more than {MOST_FILE:,} bytes")
    return b"".join(parts)


def _sample(data: bytes, columns: list[tuple[str, int | None, Callable[[bytes], Any]]]) -> dict[str, Any]:
    place, sizes = 0, []
    for _, size, _ in columns:
        if not size:
            (size,) = struct.unpack_from("<I", data, place)
            place += 4
        sizes.append(size)
    if place + sum(sizes) != len(data):
        raise ValueError(f"a sample of {len(data):,} bytes, and its columns have {place + sum(sizes):,}")
    sample = {}
    for (name, _, decode), size in zip(columns, sizes):
        try:
            sample[name] = decode(data[place : place + size])
        except (ValueError, struct.error, LookupError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
        place += size
    return sample


def plan_mds(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Make a piece of each file in folders, which ``index.json`` lists.

    Raises UrlError for an index that is malformed, or that lists columns of pickles.
    """
    pieces: list[MdsPiece] = []
    for url in urls:
        index = Location.of(url).at(f"{Location.of(url).url.rstrip('/')}/{INDEX}")
        try:
            found = json.loads(index.read(MOST_INDEX))
            if found["version"] != 2:
                raise ValueError(f"version {found['version']!r}; only version 2 is supported")
            for about in found["shards"]:
                pieces.append(_piece(index, about))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UrlError(f"not an index of MDS: {error}", url=index.name) from error
    columns = {piece.columns for piece in pieces}
    if len(columns) > 1:
        raise UrlError("files with different columns; import them separately", url=Location.of(urls[0]).name)
    return Plan(pieces, order=[name for name, _, _ in pieces[0].columns] if pieces else None)


def _piece(index: Location, about: Mapping[str, Any]) -> MdsPiece:
    if about["format"] != "mds":
        raise ValueError(f"files of {about['format']!r}, not mds")
    columns = tuple(zip(about["column_names"], about["column_encodings"], about["column_sizes"], strict=True))
    for _, encoding, _ in columns:
        decoder_of(encoding)
    basename = (about["zip_data"] or about["raw_data"])["basename"]
    raw = about["raw_data"]["basename"]
    if os.path.basename(basename) != basename or os.path.basename(raw) != raw:
        raise ValueError(f"{basename!r} is not the name of a file beside it")
    file = index.beside(basename)
    if about["zip_data"] and not file.exists():  # streaming's reader leaves only the decompressed file
        file = index.beside(raw)
    return MdsPiece(file.url, basename.partition(".mds")[0], columns, about["samples"], file_identity(file.url))


def decoder_of(encoding: str) -> Callable[[bytes], Any]:
    """Return the decoder of an encoding; images stay encoded. Raises ValueError for pickles and unknown ones."""
    kind, _, options = encoding.partition(":")
    if kind in _SCALARS:
        return partial(_scalar, _SCALARS[kind])
    if kind == "ndarray":
        return partial(_array, options)
    if encoding not in _DECODERS:
        unsafe = ": pickles could run code" if encoding == "pkl" else ""
        raise ValueError(f"the encoding {encoding} is not supported{unsafe}")
    return _DECODERS[encoding]


def _scalar(dtype: str, data: bytes) -> int | float:
    import numpy as np

    (value,) = np.frombuffer(data, dtype).tolist()
    number: int | float = value
    return number


def _array(options: str, data: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    dtype, _, shape = options.partition(":")
    place = 0
    if not dtype:
        dtype, place = _DTYPES[data[0]], 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        dimensions, width = data[place] >> 2, 1 << data[place] % 4
        sizes = np.frombuffer(data, f"<u{width}", dimensions, place + 1).tolist()
        place += 1 + dimensions * width
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=place).reshape(sizes).copy()


def _pixels(data: bytes) -> Any:
    """Return the image that is stored as its width, its height, and its mode with its size, before the pixels."""
    from PIL import Image

    width, height, size = struct.unpack_from("<III", data)
    return Image.frombytes(data[12 : 12 + size].decode(), (width, height), data[12 + size :])


def _parts(decode: Callable[[bytes], Any], begin: int, data: bytes) -> list[Any]:
    """Return the parts of a list: their number at *begin*, then their sizes, then the parts."""
    (count,) = struct.unpack_from("<I", data, begin)
    sizes = struct.unpack_from(f"<{count}I", data, begin + 4)
    place, parts = begin + 4 + 4 * count, []
    for size in sizes:
        parts.append(decode(data[place : place + size]))
        place += size
    return parts


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "jpeg": bytes,
    "png": bytes,
    "pil": _pixels,
    "str_int": int,
    "str_float": float,
    "str_decimal": bytes.decode,
    "list[jpeg]": partial(_parts, bytes, 4),
    "list[png]": partial(_parts, bytes, 4),
    "list[pil]": partial(_parts, _pixels, 4),
    "jpeg_array": partial(_parts, bytes, 0),
    "jpegarray": partial(_parts, bytes, 0),
}
