"""Squirrel's msgpack shards: gzip files of concatenated msgpack objects, one per sample.

Source of the format: squirrel-core's ``MessagepackSerializer``, and msgpack-numpy for arrays. An array is a map whose
names are bytes: ``nd`` (true), ``type`` (numpy's text for the dtype; for structures, kind ``V``, a list of names and
types), ``kind``, ``shape`` and ``data``. In a numpy scalar, ``nd`` is false. Kind ``O`` is a pickle, which is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tarshards.errors import DecodeError, EncodeError, OpenError, SampleError, TarshardsError, shortened
from tarshards.samples.codecs.basic import check_types
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.storage.compression import bomb_in
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard

if TYPE_CHECKING:
    import numpy as np

PIECE = 1 << 18  # bytes that are read at once, and of a long line
FILE_NUMBER = re.compile(r"-\d+-of-\d+$")  # TensorFlow appends it to the names of files
_EXTENSION = re.compile(r"(?<=.)\.[^\d.][^.]*$")  # numbers are no extensions
MOST_BYTES = 1 << 30  # most bytes of a sample, also of TFRecord
MOST_ITEMS = 1 << 20  # most items of a list or map; memory for them is allocated before they are read


def read_msgpack(urls: Any, *, on_error: ErrorPolicy = None, allow_pipe: bool = False) -> Iterator[Sample]:
    """Yield the samples of the msgpack shards *urls*, with the stored values.

    *urls* is a shard expression, or a store of Squirrel: a folder whose files ``*.gz`` are the shards.

    A sample without ``__key__`` gets a key from the name of its shard and its number, such as ``shard/000000007``.
    numpy arrays own their memory. The first error is raised, or passed to *on_error* ("skip", a ``Ledger`` or a
    function of the error); reading then continues with the next sample, or after damage with the next shard.

    Raises OpenError for a file that cannot be read or decompressed, and SampleError, which names file and record, for
    data that is not msgpack or not a dict, for pickled objects, and for a sample of more than 1 GiB or a list of more
    than 1,048,576 items.
    """
    ledger = Ledger.of(on_error)
    for shard in find_shards(in_store(urls), allow_pipe=allow_pipe):
        yield from read_msgpack_shard(shard.location(), ledger=ledger)


def in_store(urls: Any) -> Any:
    """Return the shard expression of *urls*, which may be a store of Squirrel's: a folder.

    >>> in_store("gs://bucket/store/"), in_store("store/0.gz")
    ('gs://bucket/store/*.gz', 'store/0.gz')
    """
    if isinstance(urls, str | os.PathLike):
        name = os.fspath(urls)
        if name.endswith("/") or os.path.isdir(name):
            return f"{name.rstrip('/')}/*.gz"
    return urls


def read_msgpack_shard(url: str | Location, *, ledger: Ledger) -> Iterator[Sample]:
    """Yield the samples of one msgpack shard, as ``read_msgpack`` does."""
    location = Location.of(url)
    stem, name = stem_of(location), location.name
    count = 0
    try:
        for number, (record, refused) in enumerate(_records(location)):
            if refused is None and not isinstance(record, dict):
                refused = f"a sample is a dict, not {shortened(record)}"
            if refused is None and not isinstance(record.get("__key__", ""), str):
                refused = f"__key__ is a str, not {shortened(record['__key__'])}"
            if refused is not None:
                ledger(SampleError(refused, url=f"{name}: record {number}"))
                continue
            yield {"__key__": f"{stem}/{number:09d}", **record, "__url__": name}
            count += 1
        ledger.count(shards=1)
    except _Damaged as error:
        ledger(error.error)
    finally:
        ledger.count(samples=count, streamed=count)


class _Damaged(Exception):
    """Damage that makes the rest of a shard unreadable."""

    def __init__(self, error: TarshardsError):
        self.error = error


def stem_of(location: Location) -> str:
    """Return the name of a file without its extensions, for keys: with the numbers in it, and other dots as hyphens.

    >>> [stem_of(Location(name)) for name in ("d/train-00.parquet", "a.tfrecord-0-of-2", "c4.0-of-9.json.gz", "b.1")]
    ['train-00', 'a-0-of-2', 'c4-0-of-9', 'b-1']
    >>> stem_of(Location("-")), stem_of(Location(".hidden.csv.zst")), stem_of(Location("__x__.gz"))
    ('stdin', 'hidden', 'x')
    """
    if location.scheme == "-":
        return "stdin"
    name = location.stem.lstrip(".")
    number = FILE_NUMBER.search(name)
    stem = _EXTENSION.sub("", name[: number.start()] if number else name)
    return (stem + (number[0] if number else "")).replace(".", "-").strip("_") or "file"


def _records(location: Location) -> Iterator[tuple[Any, str | None]]:
    """Yield every object of a shard with the reason why it is refused, or None."""
    import msgpack

    refusals: list[str] = []
    unpacker = _unpacker(refusals)
    number = fed = done = 0
    try:
        with open_shard(location) as stream:
            while data := stream.read(PIECE):
                fed += len(data)
                if too_large := bomb_in(stream, fed - done):
                    raise OpenError(too_large, url=f"{location.name}: record {number}")
                unpacker.feed(data)
                for record in unpacker:
                    done = unpacker.tell()
                    yield record, refusals[0] if refusals else None
                    refusals.clear()
                    number += 1
            if done < fed:
                raise ValueError("the file ends within it")
    except OpenError as error:
        raise _Damaged(error) from error
    except (msgpack.exceptions.UnpackException, ValueError) as error:
        words = str(error) if isinstance(error, ValueError) else ""
        reason = f"{words or 'not msgpack'}; the rest of the file is not read"
        raise _Damaged(SampleError(reason, url=f"{location.name}: record {number}")) from error


def _unpacker(refusals: list[str]) -> Any:
    """Return an Unpacker that leaves out values that it refuses, and appends the reasons to *refusals*."""
    import msgpack

    def unpacked(value: Any) -> Any:
        if b"nd" not in value and b"data" not in value:
            return value
        # An error raised here would leave the unpacker in the middle of the object.
        try:
            return _unpack_map(value)
        except (ValueError, TypeError, KeyError, IndexError, SyntaxError) as error:
            refusals.append(str(error) if isinstance(error, ValueError) else f"not an array: {error!r}")
            return None

    return msgpack.Unpacker(
        object_hook=unpacked,
        strict_map_key=False,
        unicode_errors="surrogateescape",
        max_buffer_size=MOST_BYTES,
        max_array_len=MOST_ITEMS,
        max_map_len=MOST_ITEMS,
    )


def unpack(field: str, data: bytes) -> Any:
    """Return the value of a msgpack field, whose arrays are encoded as in msgpack shards."""
    refusals: list[str] = []
    unpacker = _unpacker(refusals)
    try:
        unpacker.feed(data)
        value = unpacker.unpack()
        whole = unpacker.tell() == len(data)
    except Exception as error:
        raise DecodeError(f"not msgpack: {error}", field=field) from error
    if refusals or not whole:
        raise DecodeError(refusals[0] if refusals else "bytes after the end of the msgpack object", field=field)
    return value


def _unpack_map(value: Any) -> Any:
    if b"nd" in value:
        return _unpack_array(value)
    if value.keys() == {b"complex", b"data"}:
        return complex(value[b"data"])
    return value


def _unpack_array(value: dict[Any, Any]) -> np.ndarray | np.generic:
    import numpy as np

    if value.get(b"kind") == b"O":
        raise ValueError("an array of pickled objects, which could run code")
    dtype = _dtype(value[b"type"])
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    array = np.frombuffer(value[b"data"], dtype).copy() if dtype.itemsize else np.empty(0, dtype)
    if value[b"nd"] is not True:
        if array.size != 1:
            raise ValueError(f"{array.size} values for one number")
        number: np.generic = array[0]
        return number
    shape = tuple(value[b"shape"])
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"an array of the shape {shape}")
    return array.reshape(shape)


def _dtype(described: Any) -> np.dtype[Any]:
    """Return the dtype that text or, for structures, a list of names, types and shapes describes."""
    import numpy as np

    if isinstance(described, list):
        fields = []
        for name, inner, *shape in described:
            name = name.decode() if isinstance(name, bytes) else name
            fields.append((name, _dtype(inner), *(tuple(size) for size in shape)))
        return np.dtype(fields)
    text = described.decode() if isinstance(described, bytes) else described
    if not isinstance(text, str) or not re.fullmatch(r"[<>|=]?[a-zA-Z]\d*(\[\w+\])?", text):
        raise ValueError(f"{shortened(text)} is not a type of numbers")
    return np.dtype(text)


def packer() -> Any:
    """Return a Packer that encodes arrays as Squirrel does; it raises TypeError for other objects."""
    import msgpack

    return msgpack.Packer(default=_pack_array, strict_types=True, use_bin_type=True, unicode_errors="surrogateescape")


def packed(packer: Any, value: Any) -> bytes:
    """Return a packed value; raise TypeError for a value that unpacking would change."""
    data: bytes = packer.pack(value)
    check_types(value, _is_number)
    return data


def _is_number(value: Any) -> bool:
    """Return whether a value is a numpy or torch value, or a complex number."""
    return isinstance(value, complex) or hasattr(value, "dtype")


def _pack_array(value: Any) -> Any:
    import numpy as np

    from tarshards.samples.codecs.array import to_array

    if type(value) is tuple:
        return list(value)
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return {b"complex": True, b"data": repr(value)}
    array = to_array(value)
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": array.dtype.str, b"data": array.tobytes()}
    is_structure = array.dtype.kind == "V"
    return {
        b"nd": True,
        b"type": array.dtype.descr if is_structure else array.dtype.str,
        b"kind": b"V" if is_structure else b"",
        b"shape": array.shape,
        b"data": array.tobytes(),
    }


def write_msgpack(
    samples: Iterable[Sample],
    target: str | Location,
    *,
    sync: bool = True,
    reject: Callable[[Sample, TarshardsError], object] | None = None,
) -> tuple[int, int]:
    """Write *samples* to a msgpack shard, and return their number and the bytes before compression.

    Values are msgpack values and numpy arrays; ``__url__`` is left out. The suffix selects the compression; the shard
    appears under its name when it is complete; Squirrel reads names that end in ``.gz``. A sample that cannot be
    encoded is passed to *reject* with the error and left out; by default the EncodeError is raised.
    """
    location = Location.of(target, sync=sync)
    location.make_folder()
    pack = packer()
    count = size = 0
    with open_shard(location, "wb") as stream:
        for sample in samples:
            try:
                data = packed(pack, {name: value for name, value in sample.items() if name != "__url__"})
            except (TypeError, ValueError, OverflowError) as error:
                pack = packer()
                failure = EncodeError(str(error), url=sample.get("__url__"), key=sample.get("__key__"))
                if reject is None:
                    raise failure from error
                reject(sample, failure)
                continue
            stream.write(data)
            count, size = count + 1, size + len(data)
    return count, size
