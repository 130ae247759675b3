"""What an import reads: a *piece* of an input is as much of it as fills a shard, cut where that costs nothing.

A piece of parquet is some row groups of a file, of text some lines or rows, of a Hugging Face dataset some rows, of a
folder some files, and of msgpack a file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tarshards.errors import DecodeError, EncodeError, OpenError, SampleError, TarshardsError, UrlError
from tarshards.formats.arrow import Batches, arrow
from tarshards.formats.msgpack_shards import read_msgpack_shard
from tarshards.formats.naming import Naming, batch_of, from_json, sample_of
from tarshards.index.cells import ExactTypes, arrow_type, typed
from tarshards.samples.batch import SampleBatch
from tarshards.samples.codecs.registry import require
from tarshards.samples.conditions import Template
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Ledger
from tarshards.samples.lines import Utf8
from tarshards.samples.tree import list_classes, read_file, walk_tree
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import failure
from tarshards.verbs.jsonl import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 1 << 21  # bytes of rows that are converted together
MOST_ROWS = 4096  # converted together
FEW_ROWS = 256  # converted together, of a format that has no columns
BLOCK = 1 << 20  # bytes of text read at once
NULLS = ["", "NA", "N/A", "NULL", "null", "NaN", "nan", "#N/A"]  # in columns of CSV that are not text


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

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample | SampleBatch]: ...


@dataclass(frozen=True)
class FilePiece:
    """What the pieces of one file have in common: its *url*, and the *file* that keys name."""

    url: str
    file: str

    @property
    def name(self) -> str:
        return Location.of(self.url).name


class Plan(NamedTuple):
    """The pieces of an input, in order; with the schema of its columns, if it has one, and what the import adds."""

    pieces: list[Any]
    schema: Any = None
    omit: tuple[str, ...] = ()
    key: str = "{file}/{record:09d}"


def file_identity(url: str) -> list[Any]:
    """Return what tells a file from another one, or an earlier one, of its name."""
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

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa, name = arrow(), self.name
        with _parquet(self.url) as parquet:
            keys = Keys.of(template, self.file)
            uses = _in_schema(keys, parquet.schema_arrow, name)
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


def plan_parquet(urls: list[str], names: list[str], max_bytes: int) -> Plan:
    """Cut parquet files into pieces of whole row groups; raise SampleError if their columns differ."""
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
    """Open a parquet file, whose checksums are verified; raise OpenError for what is none."""
    pa = arrow()
    parquet = require("pyarrow.parquet", extra="arrow")
    location = Location.of(url)
    if location.path is not None and not os.path.isfile(location.path):
        raise failure(FileNotFoundError(), location.name)
    source = location.path if location.path is not None else _RangedFile(location)
    try:
        file = parquet.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise OpenError(f"not a parquet file: {error}", url=location.name) from error
    with file:
        yield file


class _RangedFile(io.RawIOBase):
    """A remote file read in any order."""

    def __init__(self, location: Location):
        self._ranges = location.ranges()
        self._size, self._at = self._ranges.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._ranges.read(self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def close(self) -> None:
        self._ranges.close()
        super().close()


def _in_schema(keys: Keys, schema: pa.Schema, name: str) -> tuple[str, ...]:
    """Return the columns that keys are made of; raise SampleError, with the *name* of the file, if one is missing."""
    for column in keys.columns:
        if column not in schema.names:
            reason = f"no column {column!r} for the key {keys.template!r}; there are {', '.join(schema.names)}"
            raise SampleError(reason, url=name)
    return keys.columns


# Text: lines of JSON, and CSV (RFC 4180).


@dataclass(frozen=True)
class LinesPiece(FilePiece):
    """Lines of JSON, each an object, from *begin* to *end* in bytes; *first* is the number of the first line."""

    begin: int
    end: int | None
    first: int
    identity: list[Any]

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample]:
        name, keys = self.name, Keys.of(template, self.file)
        with _text(self.url, self.begin, self.end) as lines:
            for number, line in enumerate(_surviving(lines, name, ledger), self.first):
                if not line.strip():
                    continue
                place = f"{name}: line {number + 1}"
                try:
                    row = parse_json(line.strip(), allow_nan=True)
                    if not isinstance(row, dict) or not row:
                        raise SampleError("not an object with names")
                    row = {column: from_json(value) for column, value in row.items()}
                    yield sample_of(naming, row, keys(number, row) if "__key__" not in row else "", name)
                except (ValueError, RecursionError) as error:
                    lose(ledger, _at(place, error))


def _surviving(lines: Iterable[bytes], name: str, ledger: Ledger) -> Iterator[bytes]:
    """Yield lines until the file is damaged, which *ledger* is told."""
    try:
        yield from lines
    except (OpenError, DecodeError) as error:
        ledger(error)


@dataclass(frozen=True)
class CsvPiece(FilePiece):
    """Rows of CSV from *begin* to *end* in bytes; *described* has the schema of the columns, serialized, in hex.

    In the columns that *asked* names, whose type was asked for, NA and the like are nulls too.
    """

    begin: int
    end: int | None
    first: int
    delimiter: str
    described: str
    asked: tuple[str, ...]
    identity: list[Any]

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa, name = arrow(), self.name
        schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(self.described)))
        keys = Keys.of(template, self.file)
        batches = Batches(schema, naming, keys.of_rows, _in_schema(keys, schema, name))
        wrong: list[int] = []

        untold: list[SampleError] = []  # an error raised by what Arrow calls would be Arrow's

        def wrong_row(row: Any) -> str:
            wrong.append(row.number - 1)
            reason = f"{row.actual_columns} cells for {row.expected_columns} columns"
            untold.append(SampleError(reason, url=f"{name}: row {self.first + row.number - 1}"))
            return "skip"

        def tell() -> None:
            while untold:
                lose(ledger, untold.pop(0))

        number = 0
        with _text(self.url, self.begin, self.end) as text:
            try:
                for batch in _csv_batches(text, schema.names, self.delimiter, wrong_row):
                    tell()
                    known = set(wrong)
                    numbers: list[int] = []
                    while len(numbers) < len(batch):
                        if number not in known:
                            numbers.append(self.first + number)
                        number += 1
                    batch, numbers = _converted(batch, schema, self.asked, numbers, name, ledger)
                    yield from batches.samples(batch, numbers, name, refusing(ledger))
                tell()
            except (pa.ArrowException, DecodeError) as error:
                tell()
                lose(ledger, _at(f"{name}: row {self.first + number}", error))


def _csv_batches(text: Any, names: list[str], delimiter: str, wrong_row: Any) -> Iterator[Any]:
    """Yield batches of the rows of *text*, which has no header, all columns as text."""
    pa, csv = arrow(), require("pyarrow.csv", extra="arrow")
    if not text.peek(1):
        return
    yield from csv.open_csv(
        text,
        read_options=csv.ReadOptions(column_names=names, use_threads=False),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=wrong_row),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
    )


def _converted(
    batch: Any, schema: Any, asked: Collection[str], numbers: list[int], name: str, ledger: Ledger
) -> tuple[Any, list[int]]:
    """Return a batch of text with the types of *schema*, and the numbers of its rows; bad rows go to *ledger*."""
    pa = arrow()
    columns = []
    bad: dict[int, SampleError] = {}
    for field, texts in zip(schema, batch.columns):
        nulls = NULLS if field.name in asked else [""]
        try:
            columns.append(typed(texts, field.type, nulls))
        except pa.ArrowException:
            parts = []
            for row in range(len(texts)):
                try:
                    parts.append(typed(texts.slice(row, 1), field.type, nulls))
                except pa.ArrowException:
                    parts.append(pa.nulls(1, field.type))
                    bad.setdefault(row, SampleError(f"{texts[row].as_py()!r} is not {field.type}", field=field.name))
            columns.append(pa.concat_arrays(parts))
    for row, error in bad.items():
        lose(ledger, _at(f"{name}: row {numbers[row]}", error))
    converted = pa.RecordBatch.from_arrays(columns, schema=schema)
    if bad:
        kept = [row for row in range(len(batch)) if row not in bad]
        converted, numbers = converted.take(pa.array(kept, pa.int64())), [numbers[row] for row in kept]
    return converted, numbers


def plan_lines(urls: list[str], names: list[str], max_bytes: int) -> Plan:
    """Cut files of lines of JSON into pieces of about *max_bytes*; those that are compressed or remote stay whole."""
    pieces = []
    for url, file in zip(urls, names):
        identity = file_identity(url)
        pieces += [LinesPiece(url, file, *cut, identity) for cut in _cuts(url, max_bytes, is_quoted=False)]
    return Plan(pieces)


def plan_csv(
    urls: list[str], names: list[str], max_bytes: int, types: Mapping[str, str] | None = None, key: str | None = None
) -> Plan:
    """Cut files of CSV into pieces; columns have the *types* asked for, else those that are exact for all rows.

    All files are read once more for that. In the template *key*, columns have their text. Raises SampleError if the
    columns of files differ.
    """
    pa, types = arrow(), types or {}
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
        if kinds.get(column) != "int":  # whose text is that of the number
            kinds[column] = "text"
    kinds |= types
    schema = pa.schema([(column, arrow_type(kinds.get(column, "text"))) for column in columns])
    described = schema.serialize().to_pybytes().hex()
    for url, file, (_, begin) in zip(urls, names, heads):
        identity = file_identity(url)
        for cut in _cuts(url, max_bytes, is_quoted=True, begin=begin):
            pieces.append(CsvPiece(url, file, *cut, _delimiter(url), described, tuple(types), identity))
    return Plan(pieces, schema)


def _delimiter(url: str) -> str:
    return "\t" if ".tsv" in Location.of(url).base.lower() else ","


def _csv_head(url: str) -> tuple[list[str], int]:
    """Return the names of the columns in the first row of a file of CSV, and where the next row begins."""
    pa, csv = arrow(), require("pyarrow.csv", extra="arrow")
    name = Location.of(url).name
    with _text(url, 0, None) as text:
        head = text.readline()
        while head.count(b'"') % 2 and (line := text.readline()):
            head += line
    if not head.strip():
        raise SampleError("the file is empty; its first row must name the columns", url=name)
    options = csv.ParseOptions(delimiter=_delimiter(url), newlines_in_values=True)
    try:
        columns = csv.read_csv(io.BytesIO(head), parse_options=options).schema.names
    except pa.ArrowException as error:
        raise SampleError(f"not CSV: {error}", url=name) from error
    if len(set(columns)) < len(columns):
        raise SampleError(f"two columns have the same name: {', '.join(columns)}", url=name)
    return columns, len(head)


def _see(exact: ExactTypes, url: str, columns: list[str], begin: int) -> None:
    """Show the rows of a file to *exact*, as long as they can change what it finds; damage is told by who imports."""
    pa = arrow()
    with suppress(pa.ArrowException, OpenError, DecodeError), _text(url, begin, None) as text:
        for batch in _csv_batches(text, columns, _delimiter(url), lambda row: "skip"):
            if not (unsettled := exact.unsettled):
                return
            exact.see({column: batch.column(columns.index(column)).to_pylist() for column in unsettled})


def _cuts(url: str, max_bytes: int, *, is_quoted: bool, begin: int = 0) -> Iterator[tuple[int, int | None, int]]:
    """Yield the begin, end and first record of each piece of text; with *is_quoted*, quotes may hold line breaks.

    Within quotes a quote is doubled, so that a line break ends a record where the quotes before it are even.
    """
    location = Location.of(url)
    with _text(url, 0, None) as text:
        mark = text.raw.mark
        is_plain = isinstance(text.raw.stream, io.FileIO) and mark is not None
    if not is_plain or (size := os.path.getsize(str(location.path)) - mark) - begin <= max_bytes:
        yield begin, None, 0
        return
    with open(str(location.path), "rb") as file:
        file.seek(mark + begin)
        position, records, first, quotes = begin, 0, 0, 0
        while line := file.readline(BLOCK):
            position += len(line)
            quotes += line.count(b'"') if is_quoted else 0
            if not line.endswith(b"\n") or quotes % 2:
                continue
            records += 1
            if position - begin >= max_bytes and position < size:
                yield begin, position, first
                begin, first = position, records
    yield begin, None, first


@contextmanager
def _text(url: str, begin: int, end: int | None) -> Iterator[Any]:
    """Open the bytes of a text in UTF-8, decompressed, from *begin* to *end*."""
    size = None if end is None else end - begin
    with open_shard(url) as stream:
        text = Utf8(stream, Location.of(url).name)
        if begin and text.mark is not None and stream.seekable():
            text.start_at(begin)
            begin = 0
        with io.BufferedReader(text if size is None else _Part(text, size), BLOCK) as lines:
            while begin and (skipped := lines.read(min(begin, BLOCK))):
                begin -= len(skipped)
            yield lines


class _Part(io.RawIOBase):
    """The next *size* bytes of a stream."""

    def __init__(self, stream: Any, size: int):
        self._stream, self._left = stream, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


# Hugging Face's datasets.


@dataclass(frozen=True)
class DatasetPiece:
    """Rows of a ``datasets.Dataset``, from the number *first*, or of a shard of an ``IterableDataset``."""

    rows: Any
    name: str
    file: str
    first: int
    identity: list[Any]

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[SampleBatch]:
        pa = arrow()
        number, keys = self.first, Keys.of(template, self.file)
        schema = self.rows.features.arrow_schema if self.rows.features else None
        batches: Batches | None = None
        try:
            for table in self.rows.with_format("arrow").iter(_rows_at_once(self.rows)):
                for batch in table.combine_chunks().to_batches():
                    if batches is None:
                        schema = schema or batch.schema
                        batches = Batches(
                            schema, naming, keys.of_rows, _in_schema(keys, schema, self.name), reads_files=True
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


def plan_dataset(dataset: Any, name: str, max_bytes: int) -> Plan:
    """Cut a ``datasets.Dataset`` into pieces of rows, or take the shards of an ``IterableDataset``."""
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
    """Return a Hugging Face dataset: of the folder that ``save_to_disk`` wrote, or *split* of the dataset *name*."""
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
    """Say whether ``save_to_disk`` of Hugging Face's datasets wrote a folder."""
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

    def samples(self, naming: Naming, template: str, ledger: Ledger) -> Iterator[Sample]:
        keys = Keys.of(template, "")
        for key, number, paths in self.entries:
            try:
                fields = {field: read_file(path) for field, path in paths.items()}
                if "cls" in fields:
                    raise SampleError("a file for this field exists already", field="cls")
            except TarshardsError as error:
                lose(ledger, type(error)(error.reason, url=error.url or self.folder, key=key, field=error.field))
                continue
            key = keys(0, {"path": key})
            yield {"__key__": key, "__url__": self.folder, **fields, "cls": b"%d" % number}


def plan_folder(folder: str, max_bytes: int) -> Plan:
    """Cut a folder with a folder for each class into pieces; keys are paths, and ``cls`` is the number of the class."""
    classes = list_classes(folder)
    pieces: list[FolderPiece] = []
    entries: list[Any] = []
    identity: list[Any] = []
    size = 0
    for key, paths, _ in walk_tree(folder):
        name, slash, _ = key.partition("/")
        if not slash:
            raise SampleError("not in a folder named after its class", url=folder, key=key)
        found = [[path, *file_identity(path)[1:]] for path in paths.values()]
        needed = sum(each[1] for each in found)
        if entries and size + needed > max_bytes:
            pieces.append(FolderPiece(folder, tuple(entries), identity))
            entries, identity, size = [], [], 0
        entries.append((key, classes[name], paths))
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
        keys = None if template == "{file}/{record:09d}" else Keys.of(template, self.file)
        errors: list[Exception] = []  # of the reader, before the row that comes next
        rows: list[Sample] = []
        number = size = 0
        for row in read_msgpack_shard(self.url, ledger=Ledger(max_errors=float("inf"), on_error=errors.append)):
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

    def _samples(
        self, rows: list[Sample], number: int, keys: Keys | None, naming: Naming, ledger: Ledger
    ) -> Iterator[Sample | SampleBatch]:
        """Yield the samples of rows from the one with this *number*, together if they are alike."""
        name, own = self.name, [row.pop("__key__") for row in rows]
        batch: SampleBatch | None = None
        with suppress(TarshardsError, ValueError):  # which is raised again for its row
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


def plan_msgpack(urls: list[str], names: list[str], max_bytes: int) -> Plan:
    """Make a piece of each msgpack shard."""
    return Plan([MsgpackPiece(url, file, file_identity(url)) for url, file in zip(urls, names)])


def refusing(ledger: Ledger) -> Callable[[TarshardsError], object]:
    """Return what gives the errors of rows to *ledger*."""
    return lambda error: lose(ledger, error)


def lose(ledger: Ledger, error: Exception, rows: int = 1) -> None:
    """Give *ledger* the error that costs some *rows*, which raises it where it allows none."""
    ledger.fail(error)
    ledger.count(failed=rows)


def _at(place: str, error: Exception) -> TarshardsError:
    """Return *error* as one that names the *place* of its row."""
    if isinstance(error, OpenError):
        return OpenError(error.reason, url=place, errno=error.errno)
    kind = type(error) if isinstance(error, EncodeError | SampleError | DecodeError) else SampleError
    reason = error.reason if isinstance(error, TarshardsError) else str(error) or type(error).__name__
    return kind(reason, url=place, field=getattr(error, "field", None))
