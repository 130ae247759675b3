"""Batches of Arrow <-> samples, a column at a time: used for parquet, CSV and Hugging Face datasets.

Images and audio, which Hugging Face stores as structures of ``bytes`` and ``path``, stay encoded bytes. Text is
``txt``; classes, named in Hugging Face's metadata, are ``cls``; lists of numbers, tensors and Hugging Face arrays are
``npy``; times and decimals are text in JSON; everything else is JSON or, if JSON cannot hold it, msgpack. A null has no
field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import EncodeError, SampleError, TarshardsError
from tarshards.formats.naming import (
    HEAD,
    MAGICS,
    NULL,
    Columns,
    Naming,
    batches_of,
    decode_value,
    encode_value,
    is_integer_field,
    key_of,
    kind_of,
    rows_batch,
)
from tarshards.samples.batch import SampleBatch
from tarshards.samples.codecs.registry import require
from tarshards.samples.keys import NO_FIELDS, Sample, is_reserved
from tarshards.samples.payloads import Payloads
from tarshards.storage.location import Location

if TYPE_CHECKING:
    import pyarrow as pa

#: A function that returns the keys of rows, or their errors, from the numbers and the cells by column.
RowKeys = Callable[[Sequence[int], Mapping[str, Sequence[Any]]], list[str | TarshardsError]]
MOST_FILE = 1 << 34  # most bytes of a file whose path is in a row


def arrow() -> Any:
    """Return pyarrow; raise ModuleNotFoundError, which names the extra, if it is not installed."""
    return require("pyarrow", extra="arrow")


class Batches:
    """Turns record batches of one schema into samples.

    *features* come from Hugging Face's metadata of the schema; *naming* receives the columns; *keys* makes the key of a
    row from its number and the columns in ``uses``, if there is no ``__key__``. A row may contain the path of a file
    instead of its bytes; such files are read only with *reads_files*, since an untrusted row could name any file.
    """

    def __init__(
        self, schema: pa.Schema, naming: Naming, keys: RowKeys, uses: Iterable[str] = (), *, reads_files: bool = False
    ):
        self.naming = naming
        self.keys = keys
        self.uses: list[str] = list(uses)
        self.reads_files = reads_files
        self.features: dict[str, dict[str, Any]] = features_of(schema)
        self.columns: list[Any] = [name for name in schema.names if name not in NO_FIELDS]
        self.has_keys: bool = "__key__" in schema.names
        if len(set(schema.names)) < len(schema.names):
            raise SampleError(f"two columns have the same name: {', '.join(schema.names)}")

    def samples(
        self, batch: pa.RecordBatch, numbers: Sequence[int], name: str, reject: Callable[[TarshardsError], object]
    ) -> Iterator[SampleBatch]:
        """Yield the samples of *batch*, whose rows have these *numbers* in the file *name*; *reject* gets errors."""
        broken: dict[int, TarshardsError] = {}
        columns: dict[str, Payloads] = {}
        for column in self.columns:
            columns |= self._encode(column, batch.column(batch.schema.get_field_index(column)), broken)
        rows = rows_batch(self._keys(batch, numbers), columns, broken, numbers, name)
        yield from batches_of(self.naming, self.columns, rows, reject)

    def _keys(self, batch: pa.RecordBatch, numbers: Sequence[int]) -> list[str | TarshardsError]:
        """Return the keys of rows, or their errors."""
        found: Any
        if self.has_keys:
            found = batch.column(batch.schema.get_field_index("__key__")).to_pylist()
            if not is_text(batch.schema.field("__key__").type) or None in found:
                found = [_key_or_error(key) for key in found]
            return list(found)
        named = {use: batch.column(batch.schema.get_field_index(use)).to_pylist() for use in self.uses}
        return self.keys(numbers, named)

    def _encode(self, column: str, array: Any, broken: dict[int, TarshardsError]) -> dict[str, Payloads]:
        """Return the fields of a column; *broken* gets the errors of rows."""
        pa = arrow()
        types, naming = pa.types, self.naming
        kind = self.features.get(column, {}).get("_type")
        if isinstance(array.type, pa.FixedShapeTensorType) and _is_in_order(array.type):
            shape = tuple(array.type.shape)
            return {naming.field(column, "npy"): Payloads.joined(_arrays(array.storage, shape))}
        if isinstance(array.type, pa.JsonType):
            return {naming.field(column, "json"): _column(array.storage)}
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        data_type = array.type
        if is_text(data_type):
            return {naming.field(column, "txt"): _column(array)}
        if is_bytes(data_type):
            return self._by_kind(column, _kinds(array), array)
        if _is_file(data_type):
            return self._files(column, array, broken)
        if types.is_integer(data_type):
            is_class = kind == "ClassLabel" or is_integer_field(column)
            return {naming.field(column, "cls" if is_class else "json"): _column(array.cast(pa.string()))}
        if types.is_boolean(data_type):
            return {naming.field(column, "json"): _column(array.cast(pa.string()))}
        if types.is_null(data_type):
            return {}
        values: list[Any]
        if (kind or "").startswith("Array") and kind in ("Array2D", "Array3D", "Array4D", "Array5D"):
            dtype = self.features[column]["dtype"]
            values = [None if value is None else np.array(value, dtype) for value in array.to_pylist()]
        elif _is_numbers(data_type):
            lists = _lists(array)
            if lists is not None:
                return {naming.field(column, "npy"): Payloads.joined(lists)}
            values = array.to_pylist()
        else:
            stored = storage_of(data_type)
            values = (array if stored == data_type else array.cast(stored)).to_pylist()
        if types.is_floating(data_type) and all(value is None or math.isfinite(value) for value in values):
            texts = [None if value is None else repr(value).encode() for value in values]
            return {naming.field(column, "json"): Payloads.joined(texts)}
        return self._values(column, values, broken, text=not is_text(data_type) and is_text(storage_of(data_type)))

    def _by_kind(self, column: str, kinds: str | list[str], array: Any) -> dict[str, Payloads]:
        """Return the fields of a column of bytes, of one kind or one kind per row."""
        if type(kinds) is str:
            return {self.naming.field(column, kinds): _column(array)}
        fields = {kind: self.naming.field(column, kind) for kind in dict.fromkeys(kinds)}
        by_field: dict[str, set[str]] = {}
        for kind, field in fields.items():
            by_field.setdefault(field, set()).add(kind)
        whole = _column(array)
        return {field: whole.where([kind in own for kind in kinds]) for field, own in by_field.items()}

    def _files(self, column: str, array: Any, broken: dict[int, TarshardsError]) -> dict[str, Payloads]:
        """Return the bytes of images or audio; files of rows that have only a path are read."""
        pa = arrow()
        paths, held = array.field("path").to_pylist(), array.field("bytes").cast(pa.large_binary())
        if array.null_count:
            compute = require("pyarrow.compute", extra="arrow")
            held = compute.if_else(array.is_valid(), held, None)
        are_valid = array.is_valid().to_pylist()
        if held.null_count:
            values = held.to_pylist()
            for row, (path, value, valid) in enumerate(zip(paths, values, are_valid)):
                if valid and value is None and path is not None and not self.reads_files:
                    reason = "no bytes, only a path; import it through Hugging Face's datasets to read such files"
                    broken[row] = EncodeError(reason, field=column)
                elif valid and value is None and path is not None:
                    try:
                        values[row] = Location.of(path).read(MOST_FILE)
                    except TarshardsError as error:
                        broken[row] = EncodeError(str(error), field=column)
            held = pa.array(values, pa.large_binary())
        by_bytes = _kinds(held)
        kinds: list[str] = []
        for row, path in enumerate(paths):
            by_name = None if path is None else kind_of(b"", path)
            known = by_bytes if type(by_bytes) is str else by_bytes[row]
            kinds.append(known if by_name is None or by_name == "bin" else by_name)
        return self._by_kind(column, kinds, held) if kinds else {}

    def _values(
        self, column: str, values: list[Any], broken: dict[int, TarshardsError], *, text: bool
    ) -> dict[str, Payloads]:
        """Encode each value separately; with *text*, a str is JSON."""
        found: dict[str, list[bytes | None]] = {}
        for row, value in enumerate(values):
            if value is not None:
                try:
                    if text:
                        name, encoded = self.naming.field(column, "json"), json.dumps(value).encode()
                    else:
                        name, encoded = encode_value(self.naming, column, value)
                except EncodeError as error:
                    broken[row] = error
                    continue
                if name not in found:
                    found[name] = [None] * len(values)
                found[name][row] = encoded
        return {name: Payloads.joined(data) for name, data in found.items()}


def _key_or_error(value: Any) -> str | TarshardsError:
    try:
        return key_of(value)
    except SampleError as error:
        return error


def _column(array: Any) -> Payloads:
    """Return the bytes of an array of bytes or text, without copying them."""
    if not len(array):
        return Payloads.joined([])
    array = array.cast(arrow().large_binary())
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64, len(array) + 1, 8 * array.offset)
    payloads = Payloads.within(b"" if data is None else data, ends[:-1], np.diff(ends))
    return payloads.where(array.is_valid().to_numpy(zero_copy_only=False)) if array.null_count else payloads


def _kinds(array: Any) -> str | list[str]:
    """Return the extension of each value by its first bytes, or one if all have the same; a null is ``bin``."""
    pa, compute = arrow(), require("pyarrow.compute", extra="arrow")
    heads = compute.binary_slice(array.cast(pa.large_binary()), 0, HEAD)
    for magic in (*MAGICS, b"RIFF"):
        if (count := compute.starts_with(heads, magic).true_count) == len(array) > 0 and magic in MAGICS:
            return MAGICS[magic]
        if count:
            return ["bin" if head is None else kind_of(head) for head in heads.to_pylist()]
    return "bin"


def features_of(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the features by column that Hugging Face's metadata of a schema describe, if it has them."""
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = found.get("info", {}).get("features", {})
    except (ValueError, AttributeError):
        return {}
    return {name: each for name, each in features.items() if isinstance(each, dict)}


def is_text(data_type: pa.DataType) -> bool:
    """Return whether a type is text."""
    types = arrow().types
    return bool(types.is_string(data_type) or types.is_large_string(data_type) or types.is_string_view(data_type))


def is_bytes(data_type: pa.DataType) -> bool:
    """Return whether a type is bytes."""
    types = arrow().types
    return bool(
        types.is_binary(data_type)
        or types.is_large_binary(data_type)
        or types.is_binary_view(data_type)
        or types.is_fixed_size_binary(data_type)
    )


def _is_file(data_type: pa.DataType) -> bool:
    """Return whether a type is Hugging Face's for images and audio: the bytes of a file, or its path."""
    return (
        arrow().types.is_struct(data_type)
        and {field.name for field in data_type} == {"bytes", "path"}
        and is_bytes(data_type.field("bytes").type)
    )


def _is_in_order(tensor: Any) -> bool:
    """Return whether the elements of a tensor type are stored in the order of its dimensions."""
    return tensor.permutation is None or list(tensor.permutation) == sorted(tensor.permutation)


def _is_list(data_type: pa.DataType) -> bool:
    types = arrow().types
    return bool(types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type))


def _is_numbers(data_type: pa.DataType) -> bool:
    types = arrow().types
    return _is_list(data_type) and bool(
        types.is_integer(data_type.value_type)
        or types.is_floating(data_type.value_type)
        or types.is_boolean(data_type.value_type)
    )


def _lists(array: Any) -> Sequence[bytes | None] | None:
    """Return lists of numbers as arrays; None if a list has nulls in it."""
    return None if array.flatten().null_count else _arrays(array, None)


def _arrays(array: Any, shape: tuple[int, ...] | None) -> list[bytes | None]:
    """Return each list of numbers in numpy's format, with this *shape* or as it is."""
    pa = arrow()
    numbers = array.values
    if numbers.null_count and not array.flatten().null_count:  # null numbers, not null lists
        compute = require("pyarrow.compute", extra="arrow")
        numbers = compute.fill_null(numbers, pa.scalar(0).cast(numbers.type))
    numbers = numbers.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        ends = [(array.offset + row) * size for row in range(len(array) + 1)]
    else:
        ends = array.offsets.to_pylist()
    found: list[bytes | None] = []
    for row, is_valid in enumerate(array.is_valid().to_pylist()):
        if is_valid:
            values = numbers[ends[row] : ends[row + 1]]
            found.append(_npy_header(values.dtype, shape or values.shape) + values.tobytes())
        else:
            found.append(None)
    return found


@lru_cache(10_000)
def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    from io import BytesIO

    from numpy.lib import format

    stream = BytesIO()
    format.write_array_header_1_0(stream, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return stream.getvalue()


@lru_cache(1000)
def storage_of(data_type: pa.DataType) -> Any:
    """Return the type that represents the values of a type in JSON.

    That is text for dates, times of a date and decimals, and integers for durations and times of a day.
    """
    pa = arrow()
    types = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return storage_of(data_type.storage_type)
    if types.is_decimal(data_type) or types.is_timestamp(data_type) or types.is_date(data_type):
        return pa.string()
    if types.is_duration(data_type) or types.is_time64(data_type):
        return pa.int64()
    if types.is_time32(data_type):
        return pa.int32()
    if types.is_float16(data_type):
        return pa.float32()
    if types.is_dictionary(data_type):
        return storage_of(data_type.value_type)
    if types.is_struct(data_type):
        return pa.struct([pa.field(field.name, storage_of(field.type)) for field in data_type])
    if types.is_map(data_type):
        return pa.map_(storage_of(data_type.key_type), storage_of(data_type.item_type))
    if _is_list(data_type):
        return pa.list_(storage_of(data_type.value_type))
    return data_type


class Tables:
    """Turns samples into tables of one schema: that of the record of an import, or one inferred from the fields."""

    def __init__(self, columns: Columns, looked_at: Iterable[Sample]):
        pa = arrow()
        self.columns = columns
        if columns.schema is not None:
            self.schema: Any = pa.ipc.read_schema(pa.py_buffer(columns.schema))
            if "__key__" not in self.schema.names:
                self.schema = self.schema.insert(0, pa.field("__key__", pa.string()))
            return
        found: dict[str, Any] = {"__key__": pa.string()}
        for sample in looked_at:
            for field, data in sample.items():
                if not is_reserved(field) and field not in columns.omit:
                    name = columns.column(field)
                    found[name] = _wider(found.get(name), _type_of(field, data))
        if not columns.order:
            self.schema = pa.schema(list(found.items()))
        else:
            order = ["__key__", *columns.order]
            self.schema = pa.schema([(name, found[name]) for name in sorted(found, key=_place_in(order))])

    def rows(
        self, samples: Iterable[Sample], reject: Callable[[Sample, TarshardsError], object]
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the values of each sample by column, and the size of its data in bytes."""
        known = set(self.schema.names)
        plain = {
            field.name for field in self.schema if is_bytes(field.type) or isinstance(field.type, arrow().JsonType)
        }
        for sample in samples:
            try:
                row: dict[str, Any] = {"__key__": sample["__key__"], "__url__": sample["__url__"]}
                size = 0
                for field, data in sample.items():
                    if is_reserved(field) or field in self.columns.omit:
                        continue
                    name = self.columns.column(field)
                    if name not in known:
                        raise SampleError("no column for this field; the first samples have none", field=field)
                    if name in row:
                        raise SampleError(f"a second field for the column {name!r}", field=field)
                    if name in plain and not field.endswith(f".{NULL}"):
                        row[name] = data
                    else:
                        row[name] = decode_value(field, data)
                    size += len(data)
            except TarshardsError as error:
                reject(sample, error.at(sample))
                continue
            yield row, size

    def table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """Return the table of *rows*; raise EncodeError for a value that does not fit its column."""
        pa = arrow()
        arrays = []
        for field in self.schema:
            values = [row.get(field.name) for row in rows]
            try:
                arrays.append(_array(values, field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
                raise EncodeError(f"not {field.type}: {error}", field=field.name) from error
        return pa.Table.from_arrays(arrays, schema=self.schema)


def _place_in(order: list[str]) -> Callable[[str], int]:
    ranks = {name: number for number, name in enumerate(order)}
    return lambda name: ranks.get(name, len(ranks))


def _array(values: list[Any], data_type: Any) -> Any:
    """Return values as an array of a type, converted from the type that represents them in samples."""
    pa = arrow()
    types = pa.types
    if isinstance(data_type, pa.FixedShapeTensorType):
        shape = tuple(data_type.shape)
        for value in values:
            if value is not None and value.shape not in (shape, (math.prod(shape),)):
                raise ValueError(f"an array of the shape {value.shape}, and the first of this column has {shape}")
        flat = [None if value is None else value.reshape(-1) for value in values]
        return pa.ExtensionArray.from_storage(data_type, _array(flat, data_type.storage_type))
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, _array(values, data_type.storage_type))
    if types.is_null(data_type):
        return pa.nulls(len(values))
    if is_text(data_type) or is_bytes(data_type):
        return pa.array(values, data_type)
    if _is_file(data_type):
        return pa.array([None if value is None else {"bytes": value, "path": None} for value in values], data_type)
    for value in values:
        if hasattr(value, "dtype") and not _holds(data_type, value.dtype):
            raise ValueError(f"an array of {value.dtype}")
    values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    stored = storage_of(data_type)
    if "map<" in str(data_type):
        values = [_pairs(value, data_type) for value in values]
    array = pa.array(values, stored)
    return array if stored == data_type else _cast(array, data_type)


def _holds(data_type: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether a type of numbers, or of lists of them, holds every number of a *dtype*."""
    types = arrow().types
    while _is_list(data_type):
        data_type = data_type.value_type
    is_number = types.is_integer(data_type) or types.is_floating(data_type)
    return not is_number or np.can_cast(dtype, data_type.to_pandas_dtype(), "safe")


def _pairs(value: Any, data_type: Any) -> Any:
    """Return a value with the items of maps as pairs."""
    types = arrow().types
    if value is None:
        return None
    if types.is_map(data_type):
        return [(name, _pairs(item, data_type.item_type)) for name, item in value]
    if types.is_struct(data_type):
        return {field.name: _pairs(value.get(field.name), field.type) for field in data_type}
    return [_pairs(each, data_type.value_type) for each in value] if _is_list(data_type) else value


def _cast(array: Any, data_type: Any) -> Any:
    """Return an array cast to another type; unlike Arrow's cast, ignore the content of null structures."""
    pa = arrow()
    if pa.types.is_struct(data_type):
        compute = require("pyarrow.compute", extra="arrow")
        inner = [_cast(compute.struct_field(array, number), field.type) for number, field in enumerate(data_type)]
        return pa.StructArray.from_arrays(inner, fields=list(data_type), mask=array.is_null())
    if pa.types.is_list(data_type):
        return pa.ListArray.from_arrays(
            array.offsets, _cast(array.values, data_type.value_type), data_type, mask=array.is_null()
        )
    return array.cast(data_type)


def _type_of(field: str, data: bytes) -> Any:
    """Return the column type for a field, by its first value."""
    pa = arrow()
    extension = field.rpartition(".")[2]
    if extension in ("txt", "text", "transcript"):
        return pa.string()
    if is_integer_field(field):
        return pa.int64()
    if extension in ("json", "jsn"):
        return pa.json_()
    if extension == "npy":
        array = decode_value(field, data)
        try:
            data_type = pa.from_numpy_dtype(array.dtype)
        except pa.ArrowException:
            return pa.binary()
        if array.ndim == 0:
            return data_type
        return pa.list_(data_type) if array.ndim == 1 else pa.fixed_shape_tensor(data_type, array.shape)
    return pa.binary()


def _wider(known: Any, other: Any) -> Any:
    """Return the type for two values of a column: the same, else bytes."""
    return other if known is None or known == other else arrow().binary()
