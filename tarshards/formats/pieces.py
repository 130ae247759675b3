"""Inputs in other formats, cut into *pieces*: each piece becomes one shard of an import, or is read by one worker.

Each format has a function ``plan_...``, which cuts its inputs, and a class whose ``samples`` reads one piece, usually
in another process; ``rows_of`` gives the values of its columns. A piece is a number of row groups of a parquet file, of
lines or rows of a text, of rows of a Hugging Face dataset or of files in a folder, or it is a msgpack shard. The pieces
of other formats are in ``tfrecord``, ``mds`` and ``zarr_``.
"""

from __future__ import annotations

import errno
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache, partial
from itertools import islice, pairwise, repeat
from math import isfinite
from typing import Any, ClassVar, NamedTuple, Protocol

from tarshards.errors import DecodeError, EncodeError, OpenError, SampleError, TarshardsError, UrlError
from tarshards.formats.arrow import Batches, arrow
from tarshards.formats.msgpack_shards import PIECE, read_msgpack_shard
from tarshards.formats.naming import (
    Naming,
    batch_of,
    batches_of,
    decode_value,
    encode_value,
    from_json,
    is_integer_field,
    key_of,
    rows_batch,
    sample_of,
)
from tarshards.index.cells import ExactTypes
from tarshards.samples.batch import SampleBatch
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import Template
from tarshards.samples.keys import NO_FIELDS, Sample
from tarshards.samples.ledger import Ledger
from tarshards.samples.lines import open_text
from tarshards.samples.payloads import Payloads
from tarshards.samples.rows import csv_rows, json_rows
from tarshards.samples.tree import FileTree
from tarshards.storage.location import Location

BATCH = 1 << 21  # approximate bytes of rows that are converted together, or in a table for an engine
MOST_ROWS = 4096  # most rows that are converted together
FEW_ROWS = 256  # the same in formats without columns
PART = 1 << 26  # approximate bytes of a piece if the caller sets no size (texts are then not cut), and of a row group
KEY = "{file}/{record:09d}"  # the default template of keys
#: Functions that write the values of ``parse_cell`` as JSON, by type.
AS_JSON: dict[str, Callable[[Any], bytes]] = {
    "int": lambda number: b"%d" % number,
    "float": lambda number: repr(number).encode(),
    "bool": lambda value: b"true" if value else b"false",
    "date": lambda text: b'"%b"' % text.encode(),
    "timestamp": lambda text: b'"%b"' % text.encode(),
}
TYPES = ("text", *AS_JSON)  # of csv columns
_INTEGER = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?(inf|infinity|nan)", re.IGNORECASE)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
NULLS = ["", "NA", "N/A", "NULL", "null", "NaN", "nan", "#N/A"]  # nulls in CSV columns of other types than text


@dataclass(frozen=True)
class Keys:
    """Makes the keys of the rows of a *file* from a *template* over ``file``, ``record`` (from 0) and *columns*."""

    template: str
    file: str
    columns: tuple[str, ...]

    @classmethod
    def of(cls, template: str, file: str) -> Keys:
        """Return the keys by *template* for the rows of *file*; raise ValueError for a malformed template."""
        from string import Formatter

        try:
            names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"{template!r}: {error}") from error
        columns = tuple(sorted(names - {"file", "record"}))
        _parsed(template, columns)  # raises ValueError
        return cls(template, file, columns)

    def __call__(self, record: int, values: Mapping[str, Any]) -> str:
        """Return the key of the row with this number; raise SampleError if its *values* do not give one."""
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
        """Return the keys of the rows numbered *records*, or their errors; *values* has the cells of each column."""
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
    """A part of an input; it becomes one shard or is streamed, usually in another process."""

    @property
    def name(self) -> str:
        """The name of the input, for errors."""

    @property
    def identity(self) -> list[Any]:
        """A value that changes with the input and the part; the shard is made again if it has changed."""

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample | SampleBatch]:
        """Yield the samples, with keys by *template*; *naming* learns the columns, *ledger* gets the errors of rows."""


class Plan(NamedTuple):
    """The pieces of an input, in order.

    *schema* is the Arrow schema of the columns, None if the format has none or pyarrow is not installed; *order* has
    the names of the columns, if they are known before reading. *omit* are fields that the import adds and an export
    leaves out. *key* is the template of keys if the user gives none.
    """

    pieces: list[Any]
    schema: Any = None
    omit: tuple[str, ...] = ()
    key: str = KEY
    order: Sequence[str] | None = None


def file_identity(url: str) -> list[Any]:
    """Return a value that identifies a file, and changes when the file is written to."""
    location = Location.of(url)
    if location.path is None:
        return [location.identity, location.size()]
    return [os.path.abspath(location.path), location.size(), os.stat(location.path).st_mtime_ns]


def fail_rows(ledger: Ledger, error: Exception, rows: int = 1) -> None:
    """Pass *ledger* the error of *rows* that are left out, and count them as failed; it may raise the error."""
    ledger.fail(error)
    ledger.count(samples=rows, streamed=rows, failed=rows)


def _of_row(origin: str, error: Exception) -> TarshardsError:
    """Return *error* with the origin of its row; an error that is not ours becomes a SampleError."""
    if isinstance(error, OpenError):
        return OpenError(error.reason, url=origin, errno=error.errno)
    kind = type(error) if isinstance(error, EncodeError | SampleError | DecodeError) else SampleError
    reason = error.reason if isinstance(error, TarshardsError) else str(error) or type(error).__name__
    return kind(reason, url=origin, field=getattr(error, "field", None))


def _fail_row(ledger: Ledger, error: TarshardsError, origin: str) -> None:
    """Pass *ledger* the error of the row at *origin*, or of the file, whose remaining rows cannot be counted."""
    if isinstance(error, OpenError):  # the error of the file
        ledger(error)
    else:
        fail_rows(ledger, _of_row(origin, error))


@dataclass(frozen=True)
class FilePiece:
    """A piece of the file at *url*; *file* is its name in keys, and *version* its ``file_identity``."""

    url: str
    file: str
    version: list[Any]

    @property
    def name(self) -> str:
        return Location.of(self.url).name

    @property
    def identity(self) -> list[Any]:
        """The identity of the whole file; classes whose pieces are parts of a file add the part."""
        return [*self.version, self.file]


class RecordPiece(FilePiece, ABC):
    """A piece of a format that is read record by record; each record is a row of Python values."""

    unit: ClassVar[str] = "record"  # the word for a record in errors

    @abstractmethod
    def records(self, ledger: Ledger) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Yield each record with its number in the file, or what else names it; *ledger* gets the errors."""

    def origin(self, number: Any) -> str:
        """Return the file and the record with this number, for errors."""
        return f"{self.name}: {self.unit} {number}"

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample | SampleBatch]:
        for number, row in self.numbered_rows(template, ledger):
            try:
                yield sample_of(naming, row, "", self.name)
            except (ValueError, RecursionError) as error:
                fail_rows(ledger, _of_row(self.origin(number), error))

    def numbered_rows(self, template: str, ledger: Ledger) -> Iterator[tuple[Any, Sample]]:
        """Yield the rows with the numbers of their records; ``__key__`` comes from the record, or from *template*."""
        name, keys = self.name, Keys.of(template, self.file)
        for number, record in self.records(ledger):
            try:
                key = key_of(record["__key__"]) if "__key__" in record else keys(number, record)
            except ValueError as error:
                fail_rows(ledger, _of_row(self.origin(number), error))
            else:
                yield number, {"__key__": key, **record, "__url__": name}


def rows_of(piece: Piece, template: str, ledger: Ledger) -> Iterator[Sample]:
    """Yield the rows of a piece: the values of their columns, with ``__key__`` by *template* and ``__url__``.

    Records are rows; of a piece that is read column by column, they are its samples with decoded fields.
    """
    if isinstance(piece, RecordPiece):
        yield from (row for _, row in piece.numbered_rows(template, ledger))
        return
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
                fail_rows(ledger, _of_row(f"{piece.name}: {sample['__key__']}", error))


# Parquet: https://parquet.apache.org/docs/file-format/


@dataclass(frozen=True)
class ParquetPiece(FilePiece):
    """Row groups of a parquet file; *first* is the number of their first row in the file."""

    groups: tuple[int, ...]
    first: int

    @property
    def identity(self) -> list[Any]:
        return [*self.version, self.groups, self.first, self.file]

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa, name = arrow(), self.name
        with _parquet(self.url) as parquet:
            keys = Keys.of(template, self.file)
            uses = _columns_in_keys(keys, parquet.schema_arrow.names, name)
            batches = Batches(parquet.schema_arrow, naming, keys.of_rows, uses)
            row = self.first
            for group in self.groups:
                metadata = parquet.metadata.row_group(group)
                end = row + metadata.num_rows
                rows_at_once = max(1, min(MOST_ROWS, metadata.num_rows * BATCH // max(1, metadata.total_byte_size)))
                try:
                    for batch in parquet.iter_batches(rows_at_once, row_groups=[group], use_threads=False):
                        yield from batches.samples(
                            batch, range(row, row + len(batch)), name, partial(fail_rows, ledger)
                        )
                        row += len(batch)
                except (pa.ArrowException, OSError) as error:
                    reason = f"rows {row} to {end - 1} cannot be read: {error}"
                    fail_rows(ledger, DecodeError(reason, url=f"{name}: row {row}"), end - row)
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
                reason = f"its columns differ from those of {Location.of(urls[0]).name}; import it separately"
                raise SampleError(reason, url=Location.of(url).name)
            row_groups = list(map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups)))
        version = file_identity(url)
        row = first = size = 0
        groups: list[int] = []
        for number, group in enumerate(row_groups):
            if groups and size + group.total_byte_size > max_bytes:
                pieces.append(ParquetPiece(url, file, version, tuple(groups), first))
                first, size, groups = row, 0, []
            if group.num_rows:
                groups.append(number)
                size += group.total_byte_size
            row += group.num_rows
        if groups:
            pieces.append(ParquetPiece(url, file, version, tuple(groups), first))
    return Plan(pieces, schema)


@contextmanager
def _parquet(url: str) -> Iterator[Any]:
    """Open a parquet file and verify its checksums; raise OpenError for any other file."""
    pa = arrow()
    parquet = require("pyarrow.parquet", extra="arrow")
    location = Location.of(url)
    if location.path is not None and not os.path.isfile(location.path):
        raise OpenError(os.strerror(errno.ENOENT), url=location.name, errno=errno.ENOENT)
    source = location.path if location.path is not None else location.ranges().file()
    try:
        file = parquet.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise OpenError(f"not a parquet file: {error}", url=location.name) from error
    with file:
        yield file


def _columns_in_keys(keys: Keys, columns: Sequence[str], name: str) -> tuple[str, ...]:
    """Return those of *columns* that keys use; raise SampleError, with the *name* of the file, if one is missing."""
    for column in keys.columns:
        if column not in columns:
            reason = f"no column {column!r} for the key {keys.template!r}; there are {', '.join(columns)}"
            raise SampleError(reason, url=name)
    return keys.columns


# Text: lines of JSON, and CSV (RFC 4180).


@dataclass(frozen=True)
class LinesPiece(RecordPiece):
    """Lines of JSON, each an object, from byte *begin* to byte *end* (None: the end of the file).

    *first* is the number of the first line.
    """

    begin: int
    end: int | None
    first: int

    @property
    def identity(self) -> list[Any]:
        return [*self.version, self.begin, self.end, self.first, self.file]

    def origin(self, number: int) -> str:
        return f"{self.name}: line {number + 1}"

    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with open_text(self.url, self.begin, self.end) as text:
            for line, row in json_rows(text, allow_nan=True):
                number = self.first + line - 1
                if isinstance(row, dict) and row:
                    yield number, {column: from_json(value) for column, value in row.items()}
                else:
                    error = row if isinstance(row, TarshardsError) else SampleError("not an object with names")
                    _fail_row(ledger, error, self.origin(number))


@dataclass(frozen=True)
class CsvPiece(FilePiece):
    """Rows of CSV, from byte *begin* to byte *end* (None: the end of the file); *first* is the number of the first row.

    *types* has each column with its type. *typed_columns* are the columns whose types the user gave; in these, NA and
    similar words are also null.
    """

    begin: int
    end: int | None
    first: int
    delimiter: str
    types: tuple[tuple[str, str], ...]
    typed_columns: tuple[str, ...]

    @property
    def identity(self) -> list[Any]:
        rows = [self.begin, self.end, self.first, self.file]
        return [*self.version, *rows, self.delimiter, self.types, self.typed_columns]

    def origin(self, number: int) -> str:
        """Return the file and the row with this number, for errors."""
        return f"{self.name}: row {number}"

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        keys, types = Keys.of(template, self.file), dict(self.types)
        names = list(types)
        uses = _columns_in_keys(keys, names, self.name)
        for numbers, cells in _column_batches(self._rows_of_width(len(names), ledger)):
            broken: dict[int, TarshardsError] = {}
            columns: dict[str, Payloads] = {}
            for (name, kind), column in zip(self.types, cells):
                if name not in NO_FIELDS:
                    columns |= self._encoded(naming, name, kind, column, broken)
            made: list[str | TarshardsError] = []
            if "__key__" in names:
                made += cells[names.index("__key__")]
            else:
                values: dict[str, Sequence[Any]] = {use: cells[names.index(use)] for use in uses}
                for use in uses:
                    if types[use] == "int":
                        values[use] = [int(cell) if cell else cell for cell in values[use]]
                made += keys.of_rows(numbers, values)
            batch = rows_batch(made, columns, broken, numbers, self.name)
            yield from batches_of(naming, names, batch, partial(fail_rows, ledger))

    def _rows_of_width(self, width: int, ledger: Ledger) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows with this number of cells, and their numbers, up to the first damage of the file."""
        with open_text(self.url, self.begin, self.end) as text:
            rows = (row for _, row in csv_rows(text, self.delimiter) if row != [])
            for number, row in enumerate(rows, self.first):
                if isinstance(row, TarshardsError):
                    _fail_row(ledger, row, self.origin(number))
                elif len(row) == width:
                    yield number, row
                else:
                    fail_rows(ledger, SampleError(f"{len(row)} cells for {width} columns", url=self.origin(number)))

    def _encoded(
        self, naming: Naming, name: str, kind: str, cells: list[str], broken: dict[int, TarshardsError]
    ) -> dict[str, Payloads]:
        """Return the fields of a column of the type *kind*; *broken* gets the errors of its invalid *cells* by row.

        This is one field, and a second one for infinity and NaN, which JSON cannot represent.
        """
        if kind == "text":
            return {naming.field(name, "txt"): Payloads.joined([cell.encode() for cell in cells])}
        nulls = NULLS if name in self.typed_columns else [""]
        as_json = AS_JSON[kind]
        usual = naming.field(name, "cls" if kind == "int" and is_integer_field(name) else "json")
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
                field, data = usual, as_json(value)
            if field not in fields:
                fields[field] = [None] * len(cells)
            fields[field][row] = data
        return {field: Payloads.joined(data) for field, data in fields.items()}


def plan_lines(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Cut files of JSON lines into pieces of about *max_bytes*; compressed or remote files stay whole."""
    pieces = []
    for url, file in zip(urls, names):
        version = file_identity(url)
        pieces += [LinesPiece(url, file, version, *cut) for cut in _cuts(url, max_bytes, is_quoted=False)]
    return Plan(pieces)


def parse_cell(kind: str, cell: str) -> Any:
    """Return the value of a cell of one of TYPES, times as text; raise ValueError for another cell.

    >>> parse_cell("int", "007"), parse_cell("bool", "True"), parse_cell("timestamp", "2026-01-02T03:04:05")
    (7, True, '2026-01-02 03:04:05')
    """
    if kind == "int":
        if not _INTEGER.fullmatch(cell) or not -(1 << 63) <= (number := int(cell)) < 1 << 63:
            raise ValueError
        return number
    if kind == "float":
        if not _FLOAT.fullmatch(cell):
            raise ValueError
        return float(cell)
    if kind == "bool":
        if cell.lower() not in _BOOLEANS:
            raise ValueError
        return _BOOLEANS[cell.lower()]
    if kind == "date":
        if len(cell) != len("2026-01-02"):
            raise ValueError
        return date.fromisoformat(cell).isoformat()
    time = datetime.fromisoformat(cell)
    if time.tzinfo is not None or time.microsecond:
        raise ValueError
    return time.strftime("%Y-%m-%d %H:%M:%S")


def plan_csv(
    urls: list[str],
    names: list[str],
    max_bytes: int | None,
    types: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Plan:
    """Cut CSV files into pieces; columns have the given *types*, else those that reproduce the text of all cells.

    Finding the types requires one more pass over all files. Columns in the template *key* stay text, so that keys
    contain the text of the cells. Raises SampleError if the columns of files differ.
    """
    types = types or {}
    pieces: list[CsvPiece] = []
    heads = [_csv_head(url) for url in urls]
    (columns, _), name = heads[0], Location.of(urls[0]).name
    for url, (found, _) in zip(urls, heads):
        if found != columns:
            raise SampleError(
                f"its columns differ from those of {name}; import it separately", url=Location.of(url).name
            )
    for column in types:
        if column not in columns:
            raise SampleError(f"no column {column!r} to give a type; there are {', '.join(columns)}", url=name)
    exact = ExactTypes(columns, {"__key__": "text", **types})
    for url, (_, begin) in zip(urls, heads):
        _find_types(exact, url, columns, begin)
    in_keys = set(Keys.of(key or "", "").columns).difference(types)
    texts = {column for column, kind in exact.found.items() if column in in_keys and kind != "int"}
    exact = exact.settled(dict.fromkeys(texts, "text"))  # the text of an int equals its cell
    for url, file, (_, begin) in zip(urls, names, heads):
        version = file_identity(url)
        for cut in _cuts(url, max_bytes, is_quoted=True, begin=begin):
            pieces.append(CsvPiece(url, file, version, *cut, _delimiter(url), tuple(exact.found.items()), tuple(types)))
    schema = None
    with suppress(ModuleNotFoundError):  # without pyarrow the record of the import has no types
        schema = exact.schema()
    return Plan(pieces, schema, order=columns)


def _delimiter(url: str) -> str:
    return "\t" if ".tsv" in Location.of(url).base.lower() else ","


def _csv_head(url: str) -> tuple[list[str], int]:
    """Return the column names in the first row of a CSV file, and the offset of the next row."""
    name, lines, quotes = Location.of(url).name, list[bytes](), 0
    with open_text(url) as text:
        for line in text:
            lines.append(line)
            quotes += line.count(b'"')
            if quotes % 2 == 0:
                break
    head = b"".join(lines)
    if not head.strip():
        raise SampleError("the file is empty; its first row must name the columns", url=name)
    _, columns = next(csv_rows(io.BytesIO(head), _delimiter(url)))
    if isinstance(columns, TarshardsError):
        raise type(columns)(f"not CSV: {columns.reason}", url=name)
    if len(set(columns)) < len(columns):
        raise SampleError(f"two columns have the same name: {', '.join(columns)}", url=name)
    return columns, len(head)


def _find_types(exact: ExactTypes, url: str, columns: list[str], begin: int) -> None:
    """Pass the rows of a file to *exact* until further rows cannot change its result.

    Rows that reading will refuse are skipped, and damage ends the pass; reading reports both.
    """
    with suppress(OpenError), open_text(url, begin) as text:
        rows = csv_rows(text, _delimiter(url))
        sound = ((line, row) for line, row in rows if isinstance(row, list) and len(row) == len(columns))
        for _, cells in _column_batches(sound):
            if not (unsettled := exact.unsettled):
                return
            found = dict(zip(columns, cells))
            exact.see({column: found[column] for column in unsettled})


def _column_batches(rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Yield groups of rows that are converted together: their numbers, and the cells of each column.

    Rows are moved into the columns a few at a time, since many lists at once would keep the garbage collector busy.
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
    """Yield the begin, the end and the number of the first row of each piece of a text, starting at its byte *begin*.

    The last end is None. A text stays in one piece if *max_bytes* is None, and if it is compressed, remote, or in
    another encoding than UTF-8. Other texts are cut between two rows, after about *max_bytes*. With *is_quoted*, a row
    may span several lines, because quotes may contain line breaks. A quote within quotes is doubled, so a line break
    ends a row if an even number of quotes precedes it. Blank lines between such rows are skipped.
    """
    rows = first = 0  # the number of rows before *position*, and before *begin*
    if max_bytes is None:
        yield begin, None, 0
        return
    with open_text(url, begin) as text:
        size = text.raw.size_in_file()
        if size is None or size - begin <= max_bytes:
            yield begin, None, 0
            return
        position = begin
        quotes, is_blank = 0, True  # state of the incomplete row
        while line := text.readline(PIECE):
            position += len(line)
            is_blank = is_blank and not line.strip(b"\r\n")
            quotes += line.count(b'"') if is_quoted else 0
            if not line.endswith(b"\n") or quotes % 2:
                continue
            rows += not (is_quoted and is_blank)
            is_blank = True
            if position - begin >= max_bytes and position < size:
                yield begin, position, first
                begin, first = position, rows
    yield begin, None, first


# Hugging Face's datasets.


@dataclass(frozen=True)
class DatasetPiece:
    """Rows of a ``datasets.Dataset``, starting with number *first*, or of a shard of an ``IterableDataset``."""

    dataset: Any
    name: str
    file: str
    first: int
    version: list[Any]

    @property
    def identity(self) -> list[Any]:
        return [*self.version, self.first, self.file]

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa = arrow()
        row, keys = self.first, Keys.of(template, self.file)
        schema = self.dataset.features.arrow_schema if self.dataset.features else None
        batches: Batches | None = None
        try:
            for table in self.dataset.with_format("arrow").iter(_rows_at_once(self.dataset)):
                for batch in table.combine_chunks().to_batches():
                    if batches is None:
                        schema = schema or batch.schema
                        uses = _columns_in_keys(keys, schema.names, self.name)
                        batches = Batches(schema, naming, keys.of_rows, uses, reads_files=True)
                    yield from batches.samples(
                        batch, range(row, row + len(batch)), self.name, partial(fail_rows, ledger)
                    )
                    row += len(batch)
        except (pa.ArrowException, OSError) as error:
            fail_rows(ledger, _of_row(f"{self.name}: row {row}", error))


def _rows_at_once(dataset: Any) -> int:
    """Return how many rows of a dataset are converted together."""
    table = getattr(dataset, "data", None)  # an ``IterableDataset`` has none
    if table is None or not dataset.num_rows:
        return FEW_ROWS
    return int(max(1, min(MOST_ROWS, BATCH * table.num_rows // max(1, table.nbytes))))


def plan_dataset(dataset: Any, name: str, max_bytes: int | None) -> Plan:
    """Cut a ``datasets.Dataset`` into pieces of rows, or use the shards of an ``IterableDataset``."""
    max_bytes = max_bytes or PART
    version = [getattr(dataset, "_fingerprint", None)]
    if not hasattr(dataset, "num_rows"):  # an IterableDataset
        count = dataset.num_shards
        shards = [dataset.shard(num_shards=count, index=index) for index in range(count)]
        version = [[*version, *map(str, dataset.features or ())], count]
        pieces = [DatasetPiece(shard, name, f"{index:05d}", 0, [*version, index]) for index, shard in enumerate(shards)]
        schema = dataset.features.arrow_schema if dataset.features else None
        return Plan(pieces, schema)
    rows, table = dataset.num_rows, dataset.data  # the table may have more rows than the dataset selects
    count = max(1, -(-table.nbytes * rows // (max(1, table.num_rows) * max_bytes)))
    cuts = [rows * number // count for number in range(count + 1)]
    pieces = [
        DatasetPiece(dataset.select(range(begin, end)), name, name, begin, [*version, begin, end])
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
            raise UrlError(f"the dataset has several splits; name one: {splits}", url=name)
        found = found[split]
    return found


def is_saved_dataset(folder: str) -> bool:
    """Return whether ``save_to_disk`` of Hugging Face's datasets wrote a folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


# Folders of files, with a folder for each class.


@dataclass(frozen=True)
class FolderPiece:
    """Some samples of a folder: for each, its key, the number of its class, and the paths of its fields."""

    folder: str
    entries: tuple[tuple[str, int, dict[str, str]], ...]
    identity: list[Any]

    @property
    def name(self) -> str:
        return self.folder

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample]:
        keys = Keys.of(template, "")
        for key, number, paths in self.entries:
            try:
                sample = FileTree(self.folder).sample(key, paths, {"cls": number})
            except TarshardsError as error:
                fail_rows(ledger, type(error)(error.reason, url=error.url, key=key, field=error.field))
            else:
                yield {**sample, "__key__": keys(0, {"path": key})}


def plan_folder(folder: str, max_bytes: int | None) -> Plan:
    """Cut a folder with a folder for each class into pieces; keys are paths, and ``cls`` is the number of the class."""
    max_bytes = max_bytes or PART
    tree = FileTree(folder)
    classes = tree.classes()
    pieces: list[FolderPiece] = []
    entries: list[Any] = []
    identity: list[Any] = []
    size = 0
    for key, paths, _ in tree.entries():
        number = tree.class_of(key, classes)
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
class MsgpackPiece(RecordPiece):
    """A msgpack shard of Squirrel's; errors name a sample by its key in the shard, or the one that the reader gives it.

    Without a template, the sample keeps this key.
    """

    def records(self, ledger: Ledger) -> Iterator[tuple[str, Sample]]:
        reader = Ledger(max_errors=float("inf"), on_error=partial(fail_rows, ledger))
        return ((row["__key__"], row) for row in read_msgpack_shard(self.url, ledger=reader))

    def origin(self, number: str) -> str:
        return f"{self.name}: {number}"

    def numbered_rows(self, template: str, ledger: Ledger) -> Iterator[tuple[str, Sample]]:
        keys = None if template == KEY else Keys.of(template, self.file)
        for number, (own_key, row) in enumerate(self.records(ledger)):
            try:
                yield own_key, row if keys is None else {**row, "__key__": keys(number, row)}
            except (TarshardsError, ValueError) as error:
                fail_rows(ledger, _of_row(self.origin(own_key), error))

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample | SampleBatch]:
        errors: list[Exception] = []  # before the next row
        rows: list[tuple[str, Sample]] = []  # to convert together
        size = 0
        for own_key, row in self.numbered_rows(template, Ledger(max_errors=float("inf"), on_error=errors.append)):
            if errors or len(rows) == FEW_ROWS or size >= BATCH:
                yield from self._converted(rows, errors, naming, ledger)
                rows, size = [], 0
            rows.append((own_key, row))
            for value in row.values():
                if type(value) is bytes:
                    size += len(value)
        yield from self._converted(rows, errors, naming, ledger)

    def _converted(
        self, rows: list[tuple[str, Sample]], errors: list[Exception], naming: Naming, ledger: Ledger
    ) -> Iterator[Sample | SampleBatch]:
        """Yield the samples of rows, as one batch if ``batch_of`` can make it; then pass *ledger* the *errors*."""
        batch: SampleBatch | None = None
        with suppress(TarshardsError, ValueError):  # the loop below finds the row of the error
            batch = batch_of(naming, [row for _, row in rows], [row["__key__"] for _, row in rows], self.name)
        if batch is not None:
            yield batch
        for own_key, row in rows if batch is None else ():
            try:
                yield sample_of(naming, row, "", self.name)
            except (TarshardsError, ValueError) as error:
                fail_rows(ledger, _of_row(self.origin(own_key), error))
        while errors:
            fail_rows(ledger, errors.pop(0))


def plan_msgpack(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Make a piece of each msgpack shard."""
    return Plan([MsgpackPiece(url, file, file_identity(url)) for url, file in zip(urls, names)])
