"""Codecs for arrays: npy, npz, torch's pth, and tenbin, WebDataset's container of aligned tensors."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

from tarshards.samples.codecs.registry import decoder, encoder, require
from tarshards.samples.retry_parse import retry_parse
from tarshards.storage.compression import bomb
from tarshards.storage.streams import PIECE

if TYPE_CHECKING:
    import numpy as np

ZIPPED = frozenset(["npz", "pth"])  # the extensions of zip files
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in zip files
TENBIN_MAGIC = b"~TenBin~"
TENBIN_DTYPES = frozenset(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])


def to_array(value: Any) -> np.ndarray:
    """Return an array, numpy scalar or torch tensor as a C-ordered numpy array; raise TypeError for anything else.

    >>> import numpy as np
    >>> to_array(np.float32(3)).shape
    ()
    """
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"expected an array or tensor, not {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray) or value.dtype.hasobject:
        raise TypeError("masked arrays and arrays of Python objects have no safe form in bytes")
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        raise TypeError(f"{type(value).__name__} would come back as an array; give numpy.array(value), or bytes")
    if value.dtype.isbuiltin == 2:
        raise TypeError(f"{value.dtype} is a type of another package, which numpy's format does not name; give bytes")
    return np.asarray(value, order="C")


@decoder("npy")
def decode_npy(data: bytes) -> np.ndarray:
    """Decode numpy's own format; arrays of Python objects are refused because they require unpickling."""
    from numpy.lib import format

    def read() -> np.ndarray:
        stream = BytesIO(data)
        array = format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError("bytes after the end of the array")
        return array

    return retry_parse(read)


@encoder("npy")
def encode_npy(value: Any) -> bytes:
    """Encode an array, numpy scalar or torch tensor in numpy's own format."""
    from numpy.lib import format

    stream = BytesIO()
    format.write_array(stream, to_array(value), allow_pickle=False)
    return stream.getvalue()


def check_zip(data: bytes, packed: int, max_ratio: float | None) -> None:
    """Raise ValueError for a zip file that expands to more than *packed* bytes may: see ``bomb``.

    Members must be stored or deflated, as numpy and torch write them; zipfile cannot limit other decompression.
    """
    import zipfile

    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        return  # the decoder reports the error
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{member.filename!r} is neither stored nor deflated")
    if reason := bomb(sum(member.file_size for member in members), packed, max_ratio):
        raise ValueError(reason)


@decoder("npz")
def decode_npz(data: bytes) -> dict[str, np.ndarray]:
    """Decode numpy's zip of arrays into a dict."""
    import zipfile

    arrays = {}
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = archive.infolist()
        for member in members:
            with archive.open(member) as stream:  # in pieces, up to the size in the directory
                array = b"".join(iter(lambda stream=stream: stream.read(PIECE), b""))  # type: ignore[misc]
            arrays[member.filename.removesuffix(".npy")] = decode_npy(array)
    if len(arrays) != len(members):
        raise ValueError("two arrays with the same name")
    return arrays


@encoder("npz")
def encode_npz(value: dict[str, Any]) -> bytes:
    """Encode a dict of arrays as numpy's zip, uncompressed and with a fixed time."""
    import zipfile

    if type(value) is not dict:
        raise TypeError(f"expected a dict of arrays, not {type(value).__name__}")
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in value.items():
            if not isinstance(name, str) or "\0" in name:
                raise ValueError(f"{name!r} cannot name an array")
            member = zipfile.ZipInfo(f"{name}.npy", EPOCH)
            member.create_system = 3  # Unix on every platform
            archive.writestr(member, encode_npy(array))
    return stream.getvalue()


@decoder("pth")
def decode_torch(data: bytes) -> Any:
    """Load tensors and plain containers with torch onto the CPU; this runs no code from the data."""
    from pickle import UnpicklingError

    torch = require("torch", extra="torch")
    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except UnpicklingError as exc:
        raise ValueError("more than tensors and plain containers; load it with allow_unsafe=True") from exc


@decoder("pth", unsafe=True)
def decode_torch_unsafe(data: bytes) -> Any:
    """Load with torch onto the CPU; this runs any code in the data."""
    return require("torch", extra="torch").load(BytesIO(data), map_location="cpu", weights_only=False)


@encoder("pth")
def encode_torch(value: Any) -> bytes:
    """Save with torch."""
    stream = BytesIO()
    require("torch", extra="torch").save(value, stream)
    return stream.getvalue()


@decoder("ten", "tb", "tenbin")
def decode_tenbin(data: bytes) -> list[np.ndarray]:
    """Decode a list of arrays.

    The format is a sequence of chunks: for each array, one with its header and one with its elements. A chunk is the
    magic, its length (int64) and its bytes, padded to a multiple of 64. A header is the dtype, a name (8 bytes each)
    and the shape, as int64 ndim and sizes. Everything is little-endian. Source: webdataset/tenbin.py.
    """
    chunks = list(_tenbin_chunks(memoryview(data)))
    if len(chunks) % 2:
        raise ValueError("a header without an array")
    return [_tenbin_array(header, elements) for header, elements in zip(chunks[::2], chunks[1::2])]


@encoder("ten", "tb", "tenbin")
def encode_tenbin(value: Any) -> bytes:
    """Encode a list of arrays, or one array as a list of one; elements are always little-endian."""
    arrays = [to_array(array) for array in (value if isinstance(value, (list, tuple)) else [value])]
    return b"".join(_tenbin_chunk(part) for array in arrays for part in _tenbin_parts(array))


def _tenbin_parts(array: np.ndarray) -> tuple[bytes, bytes]:
    dtype = array.dtype.str[1:]
    if dtype not in TENBIN_DTYPES or array.ndim > 9:
        raise ValueError(f"tenbin has no {array.dtype} of {array.ndim} dimensions")
    header = struct.pack(f"<8s8sq{array.ndim}q", dtype.encode(), b"", array.ndim, *array.shape)
    return header, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _tenbin_chunk(data: bytes) -> bytes:
    return TENBIN_MAGIC + struct.pack("<q", len(data)) + data + bytes(-len(data) % 64)


def _tenbin_chunks(data: memoryview) -> Iterator[memoryview]:
    while data:
        magic, length = struct.unpack("<8sq", data[:16])
        padded = 16 + length + -length % 64
        if magic != TENBIN_MAGIC or length < 0 or padded > len(data):
            raise ValueError("an incomplete tenbin chunk")
        yield data[16 : 16 + length]
        data = data[padded:]


def _tenbin_array(header: memoryview, elements: memoryview) -> np.ndarray:
    import numpy as np

    name, _, ndim = struct.unpack("<8s8sq", header[:24])
    if (dtype := name.rstrip(b"\0").decode()) not in TENBIN_DTYPES:
        raise ValueError(f"tenbin has no dtype {dtype!r}")
    if len(header) != 24 + 8 * ndim:
        raise ValueError(f"a tenbin header of {len(header)} bytes for {ndim} dimensions")
    shape = struct.unpack(f"<{ndim}q", header[24:])
    if min(shape, default=0) < 0 or math.prod(shape) * int(dtype[1:]) != len(elements):
        raise ValueError(f"{len(elements)} bytes are not {dtype} of shape {shape}")
    return np.frombuffer(elements, f"<{dtype}").reshape(shape).copy()
