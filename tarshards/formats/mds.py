"""MDS, the shards of MosaicML's streaming: a folder of files of samples, and an ``index.json`` that describes them.

A file begins with the number of its samples, the offset of each sample, and the offset of the end, each a uint32. A
sample begins with the sizes, each a uint32, of the columns whose size the index does not give; then come the values.
Source of the format: the package mosaicml-streaming, ``streaming/base/format/mds``.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tarshards.errors import OpenError, SampleError, UrlError
from tarshards.formats.pieces import Plan, RecordPiece, fail_rows, file_identity
from tarshards.samples.ledger import Ledger
from tarshards.storage.compression import read_held
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard

if TYPE_CHECKING:
    import numpy as np

INDEX = "index.json"
MOST_INDEX = 1 << 28  # most bytes of an index
MOST_FILE = 1 << 32  # most bytes of a file, because offsets have 32 bits
_SCALARS = {"int": "<i8", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8"}
_SCALARS |= {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8"}
_SCALARS |= {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}


@dataclass(frozen=True)
class MdsPiece(RecordPiece):
    """A file of MDS with *count* samples.

    A column has a name, an encoding and the size of its values in bytes (None: they vary).
    """

    columns: tuple[tuple[str, str, int | None], ...]
    count: int
    unit = "sample"

    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            with open_shard(self.url) as stream:
                data = read_held(stream, MOST_FILE + 1)
            if len(data) > MOST_FILE:
                raise ValueError(f"more than {MOST_FILE:,} bytes")
            (count,) = struct.unpack_from("<I", data)
            offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
            if count != self.count or offsets[-1] != len(data):
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
                fail_rows(ledger, SampleError(str(error), url=self.origin(number)))


def _sample(data: bytes, columns: list[tuple[str, int | None, Callable[[bytes], Any]]]) -> dict[str, Any]:
    """Return the values of a sample, from the name, the fixed size and the decoder of each column."""
    offset, sizes = 0, []
    for _, size, _ in columns:
        if not size:
            (size,) = struct.unpack_from("<I", data, offset)
            offset += 4
        sizes.append(size)
    if offset + sum(sizes) != len(data):
        raise ValueError(f"a sample of {len(data):,} bytes, and its columns have {offset + sum(sizes):,}")
    sample = {}
    for (name, _, decode), size in zip(columns, sizes):
        try:
            sample[name] = decode(data[offset : offset + size])
        except (ValueError, struct.error, LookupError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
        offset += size
    return sample


def plan_mds(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Make a piece of each file that the index in a folder lists; *urls* are folders.

    Raises UrlError for a malformed index, and for columns of pickles or of another unsupported encoding.
    """
    pieces: list[MdsPiece] = []
    for url in urls:
        index = Location.of(url).at(f"{Location.of(url).url.rstrip('/')}/{INDEX}")
        try:
            found = json.loads(index.read(MOST_INDEX))
            if found["version"] != 2:
                raise ValueError(f"version {found['version']!r}; only version 2 is supported")
            pieces += [_piece(index, entry) for entry in found["shards"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UrlError(f"not an index of MDS: {error}", url=index.name) from error
    columns = {piece.columns for piece in pieces}
    if len(columns) > 1:
        raise UrlError("the files have different columns; import them separately", url=Location.of(urls[0]).name)
    return Plan(pieces, order=[name for name, _, _ in pieces[0].columns] if pieces else None)


def _piece(index: Location, entry: Mapping[str, Any]) -> MdsPiece:
    """Return the piece of the file that an *entry* of the index describes."""
    if entry["format"] != "mds":
        raise ValueError(f"files of {entry['format']!r}, not mds")
    columns = tuple(zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True))
    for _, encoding, _ in columns:
        decoder_of(encoding)  # raises ValueError
    basename = (entry["zip_data"] or entry["raw_data"])["basename"]
    raw = entry["raw_data"]["basename"]
    if os.path.basename(basename) != basename or os.path.basename(raw) != raw:
        raise ValueError(f"{basename!r} is not the name of a file beside it")
    file = index.beside(basename)
    if entry["zip_data"] and not file.exists():  # streaming's reader leaves only the decompressed file
        file = index.beside(raw)
    return MdsPiece(file.url, basename.partition(".mds")[0], file_identity(file.url), columns, entry["samples"])


def decoder_of(encoding: str) -> Callable[[bytes], Any]:
    """Return the decoder of an encoding; images stay encoded. Raises ValueError for pickles and unknown encodings."""
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
    """Return the number in *data*."""
    import numpy as np

    (value,) = np.frombuffer(data, dtype).tolist()
    number: int | float = value
    return number


def _array(options: str, data: bytes) -> np.ndarray[Any, Any]:
    """Return an array whose encoding is ``ndarray:DTYPE:SHAPE``; *data* begins with what these *options* leave out.

    A dtype is one byte, as in ``_DTYPES``. A shape is a byte with the number of dimensions and the width of their
    sizes, then the sizes.
    """
    import numpy as np

    dtype, _, shape = options.partition(":")
    offset = 0
    if not dtype:
        dtype, offset = _DTYPES[data[0]], 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        dimensions, width = data[offset] >> 2, 1 << data[offset] % 4  # the width in bytes
        sizes = np.frombuffer(data, f"<u{width}", dimensions, offset + 1).tolist()
        offset += 1 + dimensions * width
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=offset).reshape(sizes).copy()


def _pixels(data: bytes) -> Any:
    """Return the image in *data*: its width, its height, the length of its mode, the mode, and the pixels."""
    from PIL import Image

    width, height, size = struct.unpack_from("<III", data)
    return Image.frombytes(data[12 : 12 + size].decode(), (width, height), data[12 + size :])


def _parts(decode: Callable[[bytes], Any], begin: int, data: bytes) -> list[Any]:
    """Return the decoded parts of a list, which starts at *begin*: their number, their sizes, and the parts."""
    (count,) = struct.unpack_from("<I", data, begin)
    sizes = struct.unpack_from(f"<{count}I", data, begin + 4)
    offset, parts = begin + 4 + 4 * count, []
    for size in sizes:
        parts.append(decode(data[offset : offset + size]))
        offset += size
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
