"""Columns of other formats <-> fields of samples: their names, their values, and the record of the columns.

A column becomes the field ``COLUMN.EXT``, whose extension selects the encoding: ``txt`` for text, ``cls`` for a class,
``npy`` for an array, ``json`` for other values, ``mp`` for values that JSON cannot hold (NaN, infinity, bytes in a
dict), and for bytes the format of their first bytes (``jpg``, ``png``, ``wav``, ...) or ``bin``. A column whose name
ends in such an extension keeps it: ``jpg``, ``cls``, ``meta.json``. Names are in lower case, like all field names.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tarshards.errors import EncodeError, SampleError, TarshardsError, UrlError
from tarshards.samples.batch import SampleBatch
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.samples.codecs.basic import INTEGERS, TEXTS
from tarshards.samples.codecs.registry import FAMILY_OF_EXTENSION
from tarshards.samples.keys import NO_FIELDS, Sample, is_reserved, split_name
from tarshards.samples.payloads import Payloads
from tarshards.storage.expressions import common_name
from tarshards.storage.location import Location

_ALIKE = {"txt": frozenset(TEXTS), "json": frozenset(["json", "jsn"]), "cls": frozenset(INTEGERS)}
_ALIKE["npy"] = frozenset(["npy"])
_ALIKE["mp"] = frozenset(["mp", "msg", "msgpack"])
_MEDIA = FAMILY_OF_EXTENSION.keys() | {"pdf"}
_BYTES = _MEDIA | {"bin", "gz", "npz", "cbor", "ten", "tb", "tenbin", "pth", "pkl", "pickle", "pyd", "null"}
MAGICS = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n": "png",
    b"GIF8": "gif",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
    b"%PDF-": "pdf",
}
_FIRST = frozenset(magic[:1] for magic in (*MAGICS, b"RIFF"))
HEAD = 12  # bytes that identify a format
SUFFIX = ".columns.json"
MOST_BYTES = 1 << 24  # most bytes of a record
NULL = "null"  # the extension of a field that marks a row of nulls


class Naming:
    """Assigns fields to the columns of one input; ``fields`` has the column of each assigned field."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}

    def field(self, column: str, extension: str) -> str:
        """Return the field of *column* for values with this *extension*.

        Raises SampleError for a second column that would become the same field.

        >>> naming = Naming()
        >>> naming.field("Caption", "txt"), naming.field("jpg", "jpg"), naming.field("meta.json", "json")
        ('caption.txt', 'jpg', 'meta.json')
        """
        name = _field_of(column, extension)
        if self.fields.setdefault(name, column) != column:
            reason = f"the columns {self.fields[name]!r} and {column!r} would both become {name}; rename one of them"
            raise SampleError(reason)
        return name


@lru_cache(10_000)
def _field_of(column: str, extension: str) -> str:
    base = re.sub(r"[/\0]", "_", column).lower()
    if is_reserved(base):
        base = base.strip("_")
    if split_name(f"k.{base}") != ("k", base):
        base = base.encode("utf-8", "surrogateescape").hex() or "column"
    last = base.rpartition(".")[2]
    if extension in _ALIKE:
        keeps = last in _ALIKE[extension]
    else:
        keeps = last in _BYTES or ("." in base and all(last not in alike for alike in _ALIKE.values()))
    return base if keeps else f"{base}.{extension}"


def kind_of(data: bytes, path: str | None = None) -> str:
    r"""Return the extension for bytes: that of *path* if it names a media format, else by their first bytes.

    >>> kind_of(b"\xff\xd8\xff\xe0"), kind_of(b"?", "a/b.PNG"), kind_of(b"?", "a.opus"), kind_of(b"?")
    ('jpg', 'png', 'opus', 'bin')
    """
    if path is not None and (suffix := path.rpartition(".")[2].lower()) in _MEDIA:
        return suffix
    if data[:1] not in _FIRST:
        return "bin"
    for magic, extension in MAGICS.items():
        if data.startswith(magic):
            return extension
    if data[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(data[8:12], "bin")
    return "bin"


def encode_value(naming: Naming, column: str, value: Any) -> tuple[str, bytes]:
    """Return the field and the bytes of a Python value, which may be or contain numpy arrays; raise EncodeError.

    >>> encode_value(Naming(), "n", 7), encode_value(Naming(), "cls", 7), encode_value(Naming(), "x", float("inf"))
    (('n.json', b'7'), ('cls', b'7'), ('x.mp', b'\\xcb\\x7f\\xf0\\x00\\x00\\x00\\x00\\x00\\x00'))
    """
    if isinstance(value, str):
        try:
            return naming.field(column, "txt"), value.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(str(error), field=column) from error
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return naming.field(column, kind_of(data)), data
    if type(value) is int and is_integer_field(column):
        return naming.field(column, "cls"), b"%d" % value
    if is_json(value):
        field = naming.field(column, "json")
        return field, encode_field(field, value)
    if hasattr(value, "dtype") or hasattr(value, "numpy"):
        field = naming.field(column, "npy")
        return field, encode_field(field, value)
    if hasattr(value, "getbands"):  # an image of Pillow
        field = naming.field(column, "png")
        return field, encode_field(field, value)
    try:
        return naming.field(column, "mp"), pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(str(error), field=column) from error


def is_integer_field(column: str) -> bool:
    """Return whether integers in a column of this name are stored as ``cls`` or a similar field."""
    return column.rpartition(".")[2].lower() in INTEGERS


def is_json(value: Any) -> bool:
    """Return whether JSON preserves this value: text, finite numbers, lists, tuples as lists, and dicts with str keys.

    >>> is_json({"a": [1, None]}), is_json({1: "a"}), is_json(float("nan"))
    (True, False, False)
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is list or kind is tuple:
        return all(map(is_json, value))
    return kind is dict and all(type(name) is str for name in value) and all(map(is_json, value.values()))


def pack(value: Any) -> bytes:
    """Encode a value as msgpack, arrays as ``msgpack_shards`` does."""
    from tarshards.formats.msgpack_shards import packed, packer

    return packed(packer(), value)


def decode_value(field: str, data: bytes) -> Any:
    """Return the value of a field: text, a number, an array, a JSON or msgpack value; else the bytes.

    Raises DecodeError for bytes that do not decode.
    """
    extension = field.rpartition(".")[2]
    if extension == NULL:
        return None
    if extension in _ALIKE["mp"]:
        from tarshards.formats.msgpack_shards import unpack

        return unpack(field, data)
    return decode_field(field, data) if any(extension in alike for alike in _ALIKE.values()) else data


def to_json(value: Any) -> Any:
    """Return a value in the form for JSON: arrays as lists, bytes as ``{"base64": "..."}``."""
    if isinstance(value, bytes):
        return {"base64": b64encode(value).decode()}
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if type(value) in (list, tuple):
        return [to_json(each) for each in value]
    if isinstance(value, dict):
        return {name: to_json(each) for name, each in value.items()}
    return value


def from_json(value: Any) -> Any:
    """Return the bytes of ``{"base64": "..."}``, and any other value unchanged."""
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(text := value["base64"], str):
        try:
            data = b64decode(text, validate=True)
        except ValueError:
            return value
        return data if b64encode(data).decode() == text else value
    return value


def sample_of(naming: Naming, row: Mapping[str, Any], key: str, origin: str) -> Sample:
    """Return the sample of a row of Python values; its own ``__key__`` takes precedence over *key*.

    A value None is JSON's null. Raises SampleError or EncodeError, which names the column.
    """
    sample: Sample = {"__key__": key_of(row["__key__"]) if "__key__" in row else key, "__url__": origin}
    for column, value in row.items():
        if column not in NO_FIELDS:
            field, data = encode_value(naming, column, value)
            sample[field] = data
    return sample


def batch_of(naming: Naming, rows: Sequence[Mapping[str, Any]], keys: list[str], origin: str) -> SampleBatch | None:
    """Return the samples that ``sample_of`` would make of *rows*, as a batch; None unless the columns are uniform.

    They are uniform if all rows have the same columns, and each column has only text, bytes of one kind, or integers.
    """
    if not rows:
        return None
    columns = rows[0].keys()
    if any(row.keys() != columns for row in rows):
        return None
    found: list[tuple[str, str, list[bytes]]] = []
    for column in columns:
        if column in NO_FIELDS:
            continue
        values: list[Any] = [row[column] for row in rows]
        types = set(map(type, values))
        if types == {str}:
            try:
                found.append((column, "txt", list(map(str.encode, values))))
            except UnicodeEncodeError:
                return None
        elif types == {int}:
            found.append((column, "cls" if is_integer_field(column) else "json", [b"%d" % value for value in values]))
        elif types == {bytes} and len(kinds := list(set(map(kind_of, values)))) == 1:
            found.append((column, kinds[0], values))
        else:
            return None
    fields = {naming.field(name, kind): Payloads.joined(data) for name, kind, data in found}
    return rows_batch(keys, fields, {}, range(len(keys)), origin)


def rows_batch(
    keys: Sequence[str | TarshardsError],
    columns: dict[str, Payloads],
    broken: dict[int, TarshardsError],
    numbers: Sequence[int],
    origin: str,
) -> SampleBatch:
    """Return the samples of the rows *numbers* of the file *origin*; those without a key are also *broken*."""
    if {*map(type, keys)} - {str}:
        broken = {row: key for row, key in enumerate(keys) if not isinstance(key, str)} | broken
    return SampleBatch(keys, columns, broken, numbers, np.zeros(len(keys), np.int64), [origin])


def batches_of(
    naming: Naming, names: Sequence[str], batch: SampleBatch, reject: Callable[[TarshardsError], object]
) -> Iterator[SampleBatch]:
    """Yield the samples of a *batch* of a file with the columns *names* that have not failed; *reject* gets the others.

    A row of nulls gets a field that marks it.
    """
    named = next((name for name in names if name not in NO_FIELDS), None)
    if named is not None and (nulls := _nulls(batch)).any():
        sizes = np.where(nulls, 0, -1)
        batch.columns[naming.field(named, NULL)] = Payloads(None, np.zeros(len(sizes), np.uint64), sizes)
    begin = 0
    for row, error in sorted(batch.failures.items()):
        if begin < row:
            yield batch.part(begin, row)
        url = f"{batch.names[0]}: row {batch.numbers[row]}"
        reject(type(error)(error.reason, url=url, field=error.field))
        begin = row + 1
    if begin < len(batch):
        yield batch.part(begin, len(batch))


def _nulls(batch: SampleBatch) -> np.ndarray:
    """Return which samples have not failed and have no field."""
    nulls = np.ones(len(batch), np.bool_)
    for payloads in batch.columns.values():
        nulls &= payloads.sizes < 0
    nulls[list(batch.failures)] = False
    return nulls


def key_of(value: Any) -> str:
    """Return the value of a column ``__key__``; raise SampleError unless it is text."""
    if not isinstance(value, str):
        raise SampleError(f"__key__ is a str, not {value!r}")
    return value


class Columns(NamedTuple):
    """The record of an import: the column of each field, and the order and schema of the columns.

    *schema* is the serialized Arrow schema, None if the format has none; *omit* are fields that the import added.
    """

    fields: dict[str, str]
    order: list[str]
    schema: bytes | None = None
    omit: tuple[str, ...] = ()

    def column(self, field: str) -> str:
        """Return the column of a field; a field added after the import has a column of the same name."""
        return self.fields.get(field, field)

    def save(self, location: Location) -> None:
        """Write the record, whole or not at all."""
        schema = None if self.schema is None else b64encode(self.schema).decode()
        text = {"version": 1, "fields": self.fields, "order": self.order, "schema": schema, "omit": self.omit}
        with location.open("wb") as stream:
            stream.write(json.dumps(text, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, url: str) -> Columns:
        """Read the record at *url*; return an empty one if there is none. Raises UrlError for a damaged one."""
        location = Location.of(url)
        if not location.exists():
            return cls({}, [])
        try:
            found = json.loads(location.read(MOST_BYTES))
            if found["version"] != 1:
                raise ValueError(f"version {found['version']!r}; only version 1 is supported")
            schema = None if found["schema"] is None else b64decode(found["schema"])
            return cls(dict(found["fields"]), list(found["order"]), schema, tuple(found["omit"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UrlError(f"not a record of columns: {error}", url=location.name) from error


def record_url(urls: list[str]) -> str:
    """Return the URL of the record beside shards.

    >>> record_url(["d/train-000000.tar", "d/train-000001.tar"]), record_url(["d/train-000007.tar"])
    ('d/train.columns.json', 'd/train.columns.json')
    """
    name = common_name(urls)
    folder, slash, base = name.rpartition("/")
    return folder + slash + (base.rstrip("0123456789-_.") or "shards") + SUFFIX
