"""The inputs of an import: a *piece* of an input is enough of it to fill a shard, cut where cutting is free.

A piece is some row groups of a parquet file, some lines or rows of text, some rows of a Hugging Face dataset, some
files of a folder, or a msgpack file.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, repeat
from math import isfinite
from typing import Any, ClassVar, NamedTuple, Protocol

from tarshards.errors import DecodeError, EncodeError, OpenError, SampleError, TarshardsError, UrlError
from tarshards.formats.arrow import Batches, arrow
from tarshards.formats.msgpack_shards import read_msgpack_shard
from tarshards.formats.naming import (
    Naming,
    batch_of,
    batches_of,
    decode_value,
    encode_value,
    from_json,
    is_integer_field,
    key_of,
    sample_of,
)
from tarshards.index.cells import ExactTypes, arrow_type, parse_cell
from tarshards.samples.batch import FieldColumn, SampleBatch
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import Template
from tarshards.samples.keys import NO_FIELDS, Sample
from tarshards.samples.ledger import Ledger
from tarshards.samples.lines import Utf8, open_text
from tarshards.samples.rows import csv_rows, json_rows
from tarshards.samples.tree import class_of, list_classes, read_files, walk_tree
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.storage.ranges import RangedFile
from tarshards.storage.streams import failure

BATCH = 1 << 21  # bytes of rows that are converted together
MOST_ROWS = 4096  # converted together
FEW_ROWS = 256  # converted together, in formats without columns
PART = 1 << 26  # bytes of a piece of rows that are streamed, where cutting needs no reading
BLOCK = 1 << 20  # bytes of text read at once, to cut it
KEY = "{file}/{record:09d}"  # the keys of rows
AS_JSON: dict[str, Callable[[Any], bytes]] = {
    "int": lambda number: b"%d" % number,
    "float": lambda number: repr(number).encode(),
    "bool": lambda value: b"true" if value else b"false",
    "date": lambda text: b'"%b"' % text.encode(),
    "timestamp": lambda text: b'"%b"' % text.encode(),
}
NULLS = ["", "NA", "N/A", "NULL", "null", "NaN", "nan", "#N/A"]  # in CSV columns that are not text


@dataclass(frozen=True)
class Keys:
    """The keys of the rows of a file: a template over ``file``, ``record`` (counted from 0) and *columns*."""

    template: str
    file: str
    columns: tuple[str, ...]

    @classmethod
    def of(cls, template: str, file: str) -> Keys:
        """Return the keys of *template*; raise ValueError for a malformed one."""
        from string import Formatter

        try:
            names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"{template!r}: {error}") from error
        columns = tuple(sorted(names - {"file", "record"}))
        _parsed(template, columns)
        return cls(template, file, columns)

    def __call__(self, record: int, values: Mapping[str, Any]) -> str:
        filled = {"file": self.file, "record": record}
        for column in self.columns:
            if column not in values:
                raise SampleError(f"no column {column!r} for the key {self.template!r}")
            filled[column] = values[column]
        try:
            return _parsed(self.template, self.columns).fill(filled)
        except (ValueError, TypeError) as error:
            raise SampleError(f"the key {self.template!r}: {error}") from error

    def of_rows(self, records: Sequence[int], values: Mapping[str, Sequence[Any]]) -> list[str | TarshardsError]:
        """Return the keys of rows with these numbers, whose *values* has all columns; an error for one without."""
        given = {"file": repeat(self.file, len(records)), "record": records, **values}
        with suppress(ValueError, TypeError):
            return [*_parsed(self.template, self.columns).fill_rows(given)]
        keys: list[str | TarshardsError] = []
        for number, record in enumerate(records):
            try:
                keys.append(self(record, {column: values[column][number] for column in self.columns}))
            except SampleError as error:
                keys.append(error)
        return keys


@lru_cache(10)
def _parsed(template: str, columns: tuple[str, ...]) -> Template:
    return Template(template, {"file": "", "record": 0, **dict.fromkeys(columns, 0)})


class Piece(Protocol):
    """A part of an input, which becomes one shard; it is sent to other processes."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> list[Any]: ...

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample | SampleBatch]:
        """Yield the samples of the rows, as they are stored in shards."""

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        """Yield the rows: the values of their columns, with ``__key__`` and ``__url__``."""


def decoded_rows(piece: Piece, template: str, ledger: Ledger) -> Iterator[Sample]:
    """Yield the rows of a piece whose samples are made column by column, decoded from these."""
    naming = Naming()
    for found in piece.samples(naming, template, ledger):
        samples = [found] if isinstance(found, dict) else map(found.sample, range(len(found.keys)))
        for sample in samples:
            try:
                yield {
                    naming.fields.get(name, name): value if name in NO_FIELDS else decode_value(name, value)
                    for name, value in sample.items()
                }
            except TarshardsError as error:
                lose(ledger, _at(f"{piece.name}: {sample['__key__']}", error))


@dataclass(frozen=True)
class FilePiece:
    """Attributes common to the pieces of one file: its *url*, and the *file* in keys."""

    url: str
    file: str

    @property
    def name(self) -> str:
        return Location.of(self.url).name


class RecordPiece(FilePiece, ABC):
    """A piece whose records are read one by one, each a row of Python values."""

    unit: ClassVar[str] = "record"

    @abstractmethod
    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the records with their numbers in the file; *ledger* gets the errors."""

    def at(self, number: int) -> str:
        """Return the file and the record of a number, for errors."""
        return f"{self.name}: {self.unit} {number}"

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        for _, row in self._numbered(template, ledger):
            yield row

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample]:
        for number, row in self._numbered(template, ledger):
            try:
                yield sample_of(naming, row, "", self.name)
            except (ValueError, RecursionError) as error:
                lose(ledger, _at(self.at(number), error))

    def _numbered(self, template: str, ledger: Ledger) -> Iterator[tuple[int, Sample]]:
        name, keys = self.name, Keys.of(template, self.file)
        for number, record in self.records(ledger):
            try:
                key = key_of(record["__key__"]) if "__key__" in record else keys(number, record)
            except ValueError as error:
                lose(ledger, _at(self.at(number), error))
            else:
                yield number, {"__key__": key, **record, "__url__": name}


class Plan(NamedTuple):
    """The pieces of an input, in order, with the schema or the order of its columns, if known, and the added fields."""

    pieces: list[Any]
    schema: Any = None
    omit: tuple[str, ...] = ()
    key: str = KEY
    order: Sequence[str] | None = None


def file_identity(url: str) -> list[Any]:
    """Return an identity that distinguishes a file from another, or an earlier, file of its name."""
    location = Location.of(url)
    if location.path is None:
        return [location.identity, location.size()]
    try:
        status = os.stat(location.path)
    except OSError as error:
        raise failure(error, location.name) from error
    return [os.path.abspath(location.path), status.st_size, status.st_mtime_ns]


# Parquet: https://parquet.apache.org/docs/file-format/


@dataclass(frozen=True)
class ParquetPiece(FilePiece):
    """Row groups of a parquet file; *first* is the number of their first row in the file."""

    groups: tuple[int, ...]
    first: int
    identity: list[Any]

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        return decoded_rows(self, template, ledger)

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa, name = arrow(), self.name
        with _parquet(self.url) as parquet:
            keys = Keys.of(template, self.file)
            uses = _among(keys, parquet.schema_arrow.names, name)
            batches = Batches(parquet.schema_arrow, naming, keys.of_rows, uses)
            row = self.first
            for group in self.groups:
                about = parquet.metadata.row_group(group)
                end = row + about.num_rows
                size = max(1, min(MOST_ROWS, about.num_rows * BATCH // max(1, about.total_byte_size)))
                try:
                    for batch in parquet.iter_batches(size, row_groups=[group], use_threads=False):
                        yield from batches.samples(batch, range(row, row + len(batch)), name, refusing(ledger))
                        row += len(batch)
                except (pa.ArrowException, OSError) as error:
                    reason = f"rows {row} to {end - 1} cannot be read: {error}"
                    lose(ledger, DecodeError(reason, url=f"{name}: row {row}"), end - row)
                row = end


def plan_parquet(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Cut parquet files into pieces of whole row groups; raise SampleError if their columns differ."""
    max_bytes = max_bytes or PART
    pieces: list[ParquetPiece] = []
    schema: Any = None
    for url, file in zip(urls, names):
        with _parquet(url) as parquet:
            if schema is None:
                schema = parquet.schema_arrow
            elif not schema.equals(parquet.schema_arrow):
                reason = f"its columns are not those of {Location.of(urls[0]).name}; import it for itself"
                raise SampleError(reason, url=Location.of(url).name)
            rows, sizes = zip(*_row_groups(parquet.metadata)) if parquet.metadata.num_row_groups else ((), ())
        identity = file_identity(url)
        first = size = 0
        groups: list[int] = []
        for group, count in enumerate(rows):
            if groups and size + sizes[group] > max_bytes:
                pieces.append(ParquetPiece(url, file, tuple(groups), first, identity))
                first, size, groups = sum(rows[:group]), 0, []
            if count:
                groups.append(group)
                size += sizes[group]
        if groups:
            pieces.append(ParquetPiece(url, file, tuple(groups), first, identity))
    return Plan(pieces, schema)


def _row_groups(metadata: Any) -> Iterator[tuple[int, int]]:
    for group in range(metadata.num_row_groups):
        about = metadata.row_group(group)
        yield about.num_rows, about.total_byte_size


@contextmanager
def _parquet(url: str) -> Iterator[Any]:
    """Open a parquet file and verify its checksums; raise OpenError for any other file."""
    pa = arrow()
    parquet = require("pyarrow.parquet", extra="arrow")
    location = Location.of(url)
    if location.path is not None and not os.path.isfile(location.path):
        raise failure(FileNotFoundError(), location.name)
    source = location.path if location.path is not None else RangedFile(location.ranges())
    try:
        file = parquet.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise OpenError(f"not a parquet file: {error}", url=location.name) from error
    with file:
        yield file


def _among(keys: Keys, columns: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the columns used in keys; raise SampleError, with the *name* of the file, if one is missing."""
    for column in keys.columns:
        if column not in columns:
            reason = f"no column {column!r} for the key {keys.template!r}; there are {', '.join(columns)}"
            raise SampleError(reason, url=name)
    return keys.columns


# Text: lines of JSON, and CSV (RFC 4180).


@dataclass(frozen=True)
class LinesPiece(RecordPiece):
    """Lines of JSON, each an object, from *begin* to *end* in bytes; *first* is the number of the first one."""

    begin: int
    end: int | None
    first: int
    identity: list[Any]

    def at(self, number: int) -> str:
        return f"{self.name}: line {number + 1}"

    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with open_text(self.url, self.begin, self.end) as text:
            for line, found in json_rows(text, allow_nan=True):
                number = self.first + line - 1
                if not isinstance(found, dict | TarshardsError) or found == {}:
                    found = SampleError("not an object with names")
                if isinstance(found, dict):
                    yield number, {column: from_json(value) for column, value in found.items()}
                else:
                    _lose_record(ledger, found, self.at(number))


@dataclass(frozen=True)
class CsvPiece(FilePiece):
    """Rows of CSV without their header; *types* are those of the columns.

    In the columns in *asked*, whose type was given, NA and the like are also null.
    """

    begin: int
    end: int | None
    first: int
    identity: list[Any]
    delimiter: str
    types: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        return decoded_rows(self, template, ledger)

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        keys = Keys.of(template, self.file)
        names = [name for name, _ in self.types]
        uses = _among(keys, names, self.name)
        for numbers, cells in _columns(self._whole(ledger)):
            broken: dict[int, TarshardsError] = {}
            columns: list[FieldColumn] = []
            for (name, kind), column in zip(self.types, cells):
                if name not in NO_FIELDS:
                    columns += self._encoded(naming, name, kind, column, broken)
            found: list[str | TarshardsError] = [*cells[names.index("__key__")]] if "__key__" in names else []
            if not found:
                values: dict[str, Sequence[Any]] = {use: cells[names.index(use)] for use in uses}
                for use in uses:
                    if dict(self.types)[use] == "int":
                        values[use] = [int(cell) if cell else cell for cell in values[use]]
                found = keys.of_rows(numbers, values)
            yield from batches_of(naming, names, columns, found, broken, numbers, self.name, refusing(ledger))

    def _whole(self, ledger: Ledger) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows with the right number of cells, with their numbers, up to any damage."""
        width = len(self.types)
        with open_text(self.url, self.begin, self.end) as text:
            rows = (row for _, row in csv_rows(text, self.delimiter) if row != [])
            for number, row in enumerate(rows, self.first):
                if isinstance(row, TarshardsError):
                    _lose_record(ledger, row, f"{self.name}: row {number}")
                elif len(row) == width:
                    yield number, row
                else:
                    reason = f"{len(row)} cells for {width} columns"
                    lose(ledger, SampleError(reason, url=f"{self.name}: row {number}"))

    def _encoded(
        self, naming: Naming, name: str, kind: str, cells: list[str], broken: dict[int, TarshardsError]
    ) -> list[FieldColumn]:
        """Return the fields of a column of cells; those that are not of the type *kind* go to *broken*."""
        if kind == "text":
            return [FieldColumn.of(naming.field(name, "txt"), [cell.encode() for cell in cells])]
        nulls = NULLS if name in self.asked else [""]
        as_json = AS_JSON[kind]
        plain = naming.field(name, "cls" if kind == "int" and is_integer_field(name) else "json")
        fields: dict[str, list[bytes | None]] = {}
        for row, cell in enumerate(cells):
            if cell in nulls:
                continue
            try:
                value = parse_cell(kind, cell)
            except ValueError:
                broken[row] = SampleError(f"{cell!r} is not {kind}", field=name)
                continue
            if kind == "float" and not isfinite(value):
                field, data = encode_value(naming, name, value)
            else:
                field, data = plain, as_json(value)
            if field not in fields:
                fields[field] = [None] * len(cells)
            fields[field][row] = data
        return [FieldColumn.of(field, data) for field, data in fields.items()]


def plan_lines(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Cut files of JSON lines into pieces of about *max_bytes*; compressed or remote files stay whole."""
    pieces = []
    for url, file in zip(urls, names):
        identity = file_identity(url)
        pieces += [LinesPiece(url, file, *cut, identity) for cut in _cuts(url, max_bytes, is_quoted=False)]
    return Plan(pieces)


def plan_csv(
    urls: list[str],
    names: list[str],
    max_bytes: int | None,
    types: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Plan:
    """Cut CSV files into pieces; columns have the given *types*, else those that are exact for all rows.

    All files are read once more for that. In the template *key*, columns have their text. Raises SampleError if the
    columns of files differ.
    """
    types = types or {}
    pieces: list[CsvPiece] = []
    heads = [_csv_head(url) for url in urls]
    (columns, _), name = heads[0], Location.of(urls[0]).name
    for url, (found, _) in zip(urls, heads):
        if found != columns:
            raise SampleError(f"its columns are not those of {name}; import it for itself", url=Location.of(url).name)
    for column in types:
        if column not in columns:
            raise SampleError(f"no column {column!r} to give a type; there are {', '.join(columns)}", url=name)
    exact = ExactTypes(column for column in columns if column != "__key__" and column not in types)
    for url, (_, begin) in zip(urls, heads):
        _see(exact, url, columns, begin)
    kinds = exact.found
    for column in Keys.of(key or "", "").columns:
        if kinds.get(column) != "int":  # ints: the text is that of the number
            kinds[column] = "text"
    kinds |= types
    found_types = tuple((column, kinds.get(column, "text")) for column in columns)
    for url, file, (_, begin) in zip(urls, names, heads):
        identity = file_identity(url)
        for cut in _cuts(url, max_bytes, is_quoted=True, begin=begin):
            pieces.append(CsvPiece(url, file, *cut, identity, _delimiter(url), found_types, tuple(types)))
    schema = None
    with suppress(ModuleNotFoundError):  # without pyarrow the record of the import has no types
        schema = arrow().schema([(column, arrow_type(kind)) for column, kind in found_types])
    return Plan(pieces, schema, order=columns)


def _delimiter(url: str) -> str:
    return "\t" if ".tsv" in Location.of(url).base.lower() else ","


def _csv_head(url: str) -> tuple[list[str], int]:
    """Return the column names in the first row of a CSV file, and the offset of the next row."""
    name, head = Location.of(url).name, b""
    with open_text(url) as text:
        for line in text:
            head += line
            if head.count(b'"') % 2 == 0:
                break
    if not head.strip():
        raise SampleError("the file is empty; its first row must name the columns", url=name)
    _, columns = next(csv_rows(io.BytesIO(head), _delimiter(url)))
    if isinstance(columns, TarshardsError):
        raise type(columns)(f"not CSV: {columns.reason}", url=name)
    if len(set(columns)) < len(columns):
        raise SampleError(f"two columns have the same name: {', '.join(columns)}", url=name)
    return columns, len(head)


def _see(exact: ExactTypes, url: str, columns: list[str], begin: int) -> None:
    """Pass the rows of a file to *exact*, as long as they can change its result; the import reports damage."""
    with suppress(OpenError), open_text(url, begin) as text:
        rows = csv_rows(text, _delimiter(url))
        whole = ((line, row) for line, row in rows if isinstance(row, list) and len(row) == len(columns))
        for _, cells in _columns(whole):
            if not (unsettled := exact.unsettled):
                return
            exact.see({column: cells[columns.index(column)] for column in unsettled})


def _columns(rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Yield the numbers and the columns of rows that are converted together.

    Columns are filled every few rows: more lists at once would keep the garbage collector busy.
    """
    while group := list(islice(rows, FEW_ROWS)):
        numbers: list[int] = []
        columns: list[list[str]] = [[] for _ in group[0][1]]
        size = 0
        while group:
            counted, cells = zip(*group)
            numbers += counted
            for column, more in zip(columns, zip(*cells)):
                column += more
                size += sum(map(len, more))
            group = [] if size >= BATCH or len(numbers) >= MOST_ROWS else list(islice(rows, FEW_ROWS))
        yield numbers, columns


def _cuts(url: str, max_bytes: int | None, *, is_quoted: bool, begin: int = 0) -> Iterator[tuple[int, int | None, int]]:
    """Yield the begin, end and first record of each piece of text; with *is_quoted*, quotes may hold line breaks.

    A quote within quotes is doubled, so a line break ends a record if the number of quotes before it is even; a blank
    line is then not a record.
    """
    location = Location.of(url)
    if max_bytes is None:
        yield begin, None, 0
        return
    with open_shard(url) as stream:
        mark, is_file = Utf8(stream, location.name).mark, isinstance(stream, io.FileIO)
    if not is_file or mark is None or (size := os.path.getsize(str(location.path)) - mark) - begin <= max_bytes:
        yield begin, None, 0
        return
    with open(str(location.path), "rb") as file:
        file.seek(mark + begin)
        position, records, first, quotes, is_blank = begin, 0, 0, 0, True
        while line := file.readline(BLOCK):
            position += len(line)
            is_blank = is_blank and not line.strip(b"\r\n")
            quotes += line.count(b'"') if is_quoted else 0
            if not line.endswith(b"\n") or quotes % 2:
                continue
            records += not (is_quoted and is_blank)
            is_blank = True
            if position - begin >= max_bytes and position < size:
                yield begin, position, first
                begin, first = position, records
    yield begin, None, first


# Hugging Face's datasets.


@dataclass(frozen=True)
class DatasetPiece:
    """Rows of a ``datasets.Dataset``, from the number *first*, or of a shard of an ``IterableDataset``."""

    dataset: Any
    name: str
    file: str
    first: int
    identity: list[Any]

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        return decoded_rows(self, template, ledger)

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa = arrow()
        number, keys = self.first, Keys.of(template, self.file)
        schema = self.dataset.features.arrow_schema if self.dataset.features else None
        batches: Batches | None = None
        try:
            for table in self.dataset.with_format("arrow").iter(_rows_at_once(self.dataset)):
                for batch in table.combine_chunks().to_batches():
                    if batches is None:
                        schema = schema or batch.schema
                        batches = Batches(
                            schema, naming, keys.of_rows, _among(keys, schema.names, self.name), reads_files=True
                        )
                    numbers = range(number, number + len(batch))
                    yield from batches.samples(batch, numbers, self.name, refusing(ledger))
                    number += len(batch)
        except (pa.ArrowException, OSError) as error:
            lose(ledger, _at(f"{self.name}: row {number}", error))


def _rows_at_once(rows: Any) -> int:
    size, count = getattr(rows, "data", None), getattr(rows, "num_rows", 0)
    if size is None or not count:
        return 256
    return int(max(1, min(MOST_ROWS, BATCH * size.num_rows // max(1, size.nbytes))))


def plan_dataset(dataset: Any, name: str, max_bytes: int | None) -> Plan:
    """Cut a ``datasets.Dataset`` into pieces of rows, or use the shards of an ``IterableDataset``."""
    max_bytes = max_bytes or PART
    identity = [getattr(dataset, "_fingerprint", None)]
    if not hasattr(dataset, "num_rows"):
        count = dataset.num_shards
        shards = [dataset.shard(num_shards=count, index=index) for index in range(count)]
        described = [[*identity, *map(str, dataset.features or ())], count]
        pieces = [DatasetPiece(rows, name, f"{index:05d}", 0, [*described, index]) for index, rows in enumerate(shards)]
        schema = dataset.features.arrow_schema if dataset.features else None
        return Plan(pieces, schema)
    rows = dataset.num_rows
    count = max(1, -(-dataset.data.nbytes * rows // (max(1, dataset.data.num_rows) * max_bytes)))
    cuts = [rows * cut // count for cut in range(count + 1)]
    pieces = [
        DatasetPiece(dataset.select(range(begin, end)), name, name, begin, [*identity, begin, end])
        for begin, end in pairwise(cuts)
        if begin < end
    ]
    return Plan(pieces, dataset.features.arrow_schema, key="{record:09d}")


def open_dataset(name: str, split: str | None) -> Any:
    """Return a Hugging Face dataset: from a folder written by ``save_to_disk``, or *split* of the dataset *name*."""
    datasets = require("datasets", extra="datasets")
    try:
        if os.path.isdir(name) and is_saved_dataset(name):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise OpenError(f"not a dataset: {error}", url=name) from error
    if isinstance(found, dict):
        splits = ", ".join(found)
        if split not in found:
            raise UrlError(f"a dataset of the splits {splits}; name one of them", url=name)
        found = found[split]
    return found


def is_saved_dataset(folder: str) -> bool:
    """Return whether ``save_to_disk`` of Hugging Face's datasets wrote a folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


# Folders of files, with a folder for each class.


@dataclass(frozen=True)
class FolderPiece:
    """Some of the samples in a folder: for each its key, its class, and the paths of its fields."""

    folder: str
    entries: tuple[tuple[str, int, dict[str, str]], ...]
    identity: list[Any]

    @property
    def name(self) -> str:
        return self.folder

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        return decoded_rows(self, template, ledger)

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample]:
        keys = Keys.of(template, "")
        for key, number, paths in self.entries:
            try:
                sample = read_files(self.folder, key, paths, {"cls": number})
            except TarshardsError as error:
                lose(ledger, type(error)(error.reason, url=error.url, key=key, field=error.field))
            else:
                yield {**sample, "__key__": keys(0, {"path": key})}


def plan_folder(folder: str, max_bytes: int | None) -> Plan:
    """Cut a folder with a folder for each class into pieces; keys are paths, and ``cls`` is the number of the class."""
    max_bytes = max_bytes or PART
    classes = list_classes(folder)
    pieces: list[FolderPiece] = []
    entries: list[Any] = []
    identity: list[Any] = []
    size = 0
    for key, paths, _ in walk_tree(folder):
        number = class_of(folder, key, classes)
        found = [[path, *file_identity(path)[1:]] for path in paths.values()]
        needed = sum(each[1] for each in found)
        if entries and size + needed > max_bytes:
            pieces.append(FolderPiece(folder, tuple(entries), identity))
            entries, identity, size = [], [], 0
        entries.append((key, number, paths))
        identity, size = identity + found, size + needed
    if entries:
        pieces.append(FolderPiece(folder, tuple(entries), identity))
    return Plan(pieces, omit=("cls",), key="{path}")


# Msgpack shards.


@dataclass(frozen=True)
class MsgpackPiece(FilePiece):
    """A msgpack shard of Squirrel's."""

    identity: list[Any]

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample | SampleBatch]:
        keys = None if template == KEY else Keys.of(template, self.file)
        errors: list[Exception] = []  # of the reader, before the next row
        rows: list[Sample] = []
        number = size = 0
        for row in self._read(errors):
            if errors or len(rows) == FEW_ROWS or size >= BATCH:
                yield from self._samples(rows, number, keys, naming, ledger)
                _lose_all(ledger, errors)
                number, size = number + len(rows), 0
                rows = []
            rows.append(row)
            for value in row.values():
                if type(value) is bytes:
                    size += len(value)
        yield from self._samples(rows, number, keys, naming, ledger)
        _lose_all(ledger, errors)

    def rows(self, template: str, ledger: Ledger) -> Iterator[Sample]:
        keys = None if template == KEY else Keys.of(template, self.file)
        errors: list[Exception] = []
        for number, row in enumerate(self._read(errors)):
            _lose_all(ledger, errors)
            try:
                yield row if keys is None else {**row, "__key__": keys(number, row)}
            except (TarshardsError, ValueError) as error:
                lose(ledger, _at(f"{self.name}: {row['__key__']}", error))
        _lose_all(ledger, errors)

    def _read(self, errors: list[Exception]) -> Iterator[Sample]:
        """Yield the rows with the stored values; the errors before the next go to *errors*."""
        return read_msgpack_shard(self.url, ledger=Ledger(max_errors=float("inf"), on_error=errors.append))

    def _samples(
        self, rows: list[Sample], number: int, keys: Keys | None, naming: Naming, ledger: Ledger
    ) -> Iterator[Sample | SampleBatch]:
        """Yield the samples of rows, the first with this *number*; in one batch if they are alike."""
        name, own = self.name, [row.pop("__key__") for row in rows]
        batch: SampleBatch | None = None
        with suppress(TarshardsError, ValueError):  # raised again for its row
            found = own if keys is None else [keys(at, row) for at, row in enumerate(rows, number)]
            batch = batch_of(naming, rows, found, name)
        if batch is not None:
            yield batch
            return
        for at, (key, row) in enumerate(zip(own, rows), number):
            try:
                row["__key__"] = key if keys is None else keys(at, row)
                yield sample_of(naming, row, "", name)
            except (TarshardsError, ValueError) as error:
                lose(ledger, _at(f"{name}: {key}", error))


def _lose_all(ledger: Ledger, errors: list[Exception]) -> None:
    while errors:
        lose(ledger, errors.pop(0))


def plan_msgpack(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Make a piece of each msgpack shard."""
    return Plan([MsgpackPiece(url, file, file_identity(url)) for url, file in zip(urls, names)])


def _lose_record(ledger: Ledger, error: TarshardsError, origin: str) -> None:
    """Pass *ledger* the error of a record at *origin*, or of the file, which costs no more than what follows."""
    if isinstance(error, OpenError):
        ledger(error)
    else:
        lose(ledger, _at(origin, error))


def refusing(ledger: Ledger) -> Callable[[TarshardsError], object]:
    """Return a function that passes the errors of rows to *ledger*."""
    return lambda error: lose(ledger, error)


def lose(ledger: Ledger, error: Exception, rows: int = 1) -> None:
    """Pass *ledger* the error that costs some *rows*; it raises the error if it allows none."""
    ledger.fail(error)
    ledger.count(samples=rows, streamed=rows, failed=rows)


def _at(origin: str, error: Exception) -> TarshardsError:
    """Return *error* with the *origin* of its row."""
    if isinstance(error, OpenError):
        return OpenError(error.reason, url=origin, errno=error.errno)
    kind = type(error) if isinstance(error, EncodeError | SampleError | DecodeError) else SampleError
    reason = error.reason if isinstance(error, TarshardsError) else str(error) or type(error).__name__
    return kind(reason, url=origin, field=getattr(error, "field", None))
