"""Columns beside the index: values taken from each sample, such as its width or score, in one parquet file a shard.

``SHARD.columns.parquet`` has a row for each sample, in the order of the index: ``__key__``, and a column for each name.
Its metadata identify the shard, by the digest of its index, and have for each column its source and the checksums of
the fields that it was made from; docs/index-format.md describes them. Columns are read instead of samples if a
condition names only columns. If the shard may be another file than the one that the columns were made from, since they
lack its mark (see ``mark_of``), or its server sends another ETag, these fields are read and compared.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from os import PathLike, fspath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from tarshards.errors import (
    DecodeError,
    OpenError,
    OpError,
    SampleError,
    ShardIndexError,
    TarshardsError,
    check_function,
)
from tarshards.index.access import SampleSequence
from tarshards.index.cells import read_csv, read_parquet
from tarshards.index.inventory import for_each_shard, read_head
from tarshards.index.sidecar import NO_DIGEST, Index, index_location
from tarshards.kernels._sidecars_py import SidecarHead
from tarshards.parallel.calls import TASKS, bounded_map, check_sent
from tarshards.samples.codecs import decode_field, registry
from tarshards.samples.codecs.image import read_size
from tarshards.samples.codecs.registry import require
from tarshards.samples.fields import check_mapping, find_field, value_at, value_path
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import ErrorPolicy, error_handler
from tarshards.storage.derived import COLUMNS, is_marked, mark_of, set_mark
from tarshards.storage.expressions import Shard, find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shards

if TYPE_CHECKING:
    import pyarrow as pa

log: logging.Logger = logging.getLogger("tarshards")

FORMAT = b"tarshards-columns"  # the entry of the metadata, a JSON object
VERSION = 1
KEY = "__key__"
MAX_BYTES = 1 << 32  # most bytes of a file of columns
Function = Callable[[Sample], Any]
Columns = str | Mapping[str, "str | Function"]


@dataclass(frozen=True)
class Measure:
    """A column that is a *measure* of a field: its width, height, length, size, duration, or a value in it.

    *fields* are alternatives: the first that a sample has is measured; *path* leads to the value in a JSON object.
    """

    measure: str
    fields: tuple[str, ...]
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.measure == "value":
            return ";".join(".".join([field, *self.path]) for field in self.fields)
        return f"{self.measure}:{';'.join(self.fields)}"

    def __call__(self, sample: Sample) -> Any:
        """Return the value, None if the sample has none; raise DecodeError if it cannot be determined."""
        field = find_field(sample, self.fields)
        if field is None:
            return None
        data = sample[field]
        try:
            return MEASURES[self.measure](field, data) if self.measure != "value" else self._value(field, data)
        except DecodeError as error:
            raise DecodeError(error.reason, field=field).at(sample) from error

    def _value(self, field: str, data: bytes) -> Any:
        value = value_at(decode_field(field, data), self.path)
        if value is not None and not isinstance(value, bool | int | float | str | list | dict):
            raise DecodeError(f"a column cannot hold a value of the type {type(value).__name__}")
        return value


@dataclass(frozen=True)
class Computed:
    """A column that a *function* of a sample computes."""

    function: Function

    def __str__(self) -> str:
        function = self.function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"python:{getattr(function, '__module__', '')}.{name}"

    def __call__(self, sample: Sample) -> Any:
        try:
            return self.function(sample)
        except TarshardsError:
            raise
        except Exception as error:
            raise OpError(f"{self} fails: {type(error).__name__}: {error}").at(sample) from error


Source = Measure | Computed


def _side(name: str, field: str, data: bytes) -> int:
    try:
        return int(getattr(read_size(data), name))
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"cannot read the size of this image: {type(error).__name__}") from error


def _length(field: str, data: bytes) -> int:
    value = decode_field(field, data)
    try:
        return len(value)
    except TypeError:
        raise DecodeError(f"{type(value).__name__} has no length") from None


MEASURES: dict[str, Callable[[str, bytes], Any]] = {
    "width": partial(_side, "width"),
    "height": partial(_side, "height"),
    "length": _length,
    "size": lambda field, data: len(data),
    **registry.MEASURES,
}


def parse_columns(columns: Columns) -> dict[str, Source]:
    """Return the columns that an expression, or a mapping of names to expressions and functions, stands for.

    Raises ValueError for a malformed expression and for names that occur twice.

    >>> {name: str(source) for name, source in parse_columns("width height:jpg;png, long=length:txt, json.a.b").items()}
    {'width': 'width:jpg;png', 'height': 'height:jpg;png', 'long': 'length:txt', 'b': 'json.a.b'}
    """
    if not isinstance(columns, str):
        named = check_mapping(columns, "columns=", "an expression or {name: function}")
        made = [(name, _source(name, value)) for name, value in named.items()]
    else:
        made = [column for group in columns.split(",") for column in _parse(group)]
    names = [name for name, _ in made]
    for name in names:
        if not name.isidentifier() or name in (KEY, "key", "shard", "fields"):
            raise ValueError(f"{name!r} cannot be the name of a column; write NAME=... with another one")
        if names.count(name) > 1:
            raise ValueError(f"two columns have the name {name}; write NAME=... for one of them")
    return dict(made)


def _source(name: str, value: str | Function) -> Source:
    if not isinstance(value, str):
        check_function(value, f"the column {name}")
        return Computed(value)
    (found,) = _parse(value)
    return found[1]


def _parse(group: str) -> list[tuple[str, Source]]:
    words, colon, fields = (part.strip() for part in group.partition(":"))
    columns: list[tuple[str, Source]] = []
    for word in words.split():
        name, _, what = word.rpartition("=")
        if colon:
            source = Measure(what, tuple(fields.split(";")))
            is_known = what in MEASURES and " " not in fields and "" not in source.fields
        else:
            values = [value_path(each) for each in what.split(";")]
            source = Measure("value", tuple(field for field, _ in values), values[0][1])
            is_known = "" not in what.replace(";", ".").split(".") and len({path for _, path in values}) == 1
        if not is_known:
            break
        columns.append((name or what.rpartition(".")[2], source))
    else:
        if columns:
            return columns
    raise ValueError(
        f"{group.strip()!r} is no column: write MEASURE:FIELD with {', '.join(MEASURES)}, or a field or value such as "
        "cls or json.score"
    )


def columns_location(shard_url: str | Location) -> Location:
    """Return the location of a shard's columns."""
    location = Location.of(shard_url)
    if location.is_stream:
        raise ShardIndexError("streams have no columns", url=location.name)
    return location.described.sibling(COLUMNS)


class ShardColumns(NamedTuple):
    """The columns of one shard: a table with ``__key__``, and the source of each column.

    *checksums* has for each column the CRC-32 of each field that it was made from, over all samples; none for a column
    that an earlier version wrote. *version* is that of the file on a server that they were made from; *is_cut* says
    that stale columns were left out.
    """

    table: pa.Table | None
    sources: dict[str, str]
    checksums: Mapping[str, dict[str, int]] = MappingProxyType({})
    version: list[str] | None = None
    is_cut: bool = False

    @classmethod
    def load(cls, shard: Location) -> ShardColumns | None:
        """Return the columns of *shard*, None if it has none; raise ShardIndexError if they are damaged or stale."""
        packed = _read_columns(shard)
        return None if packed is None else cls.parse(shard, *packed)

    @classmethod
    def parse(cls, shard: Location, packed: bytes, head: SidecarHead) -> ShardColumns:
        """Return the columns of *shard* of the bytes of their file; raise ShardIndexError for damaged or stale ones."""
        pa, location = require("pyarrow", extra="arrow"), columns_location(shard)
        try:
            table = read_parquet(pa.BufferReader(packed))
            about = json.loads(table.schema.metadata[FORMAT])
            version, sources, digest = about["version"], dict(about["columns"]), bytes.fromhex(about.get("digest", ""))
            checksums = {name: dict(each) for name, each in about.get("crc32", {}).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ShardIndexError(f"damaged: {type(error).__name__}: {error}", url=location.name) from error
        if version != VERSION:
            raise ShardIndexError(f"columns of version {version!r}; only {VERSION} is known", url=location.name)
        if head.digest is None:
            raise ShardIndexError(NO_DIGEST, url=index_location(shard).name)
        if (digest, len(table)) != (head.digest, head.samples):
            reason = "the shard has changed" if digest else "written by an earlier version, without a digest"
            raise ShardIndexError(f"stale: {reason}; rebuild it with {_cure(sources)}", url=location.name)
        return cls(table, sources, checksums, about.get("version_read"))

    def column(self, name: str) -> str | None:
        """Return the column of a *name*, or made from what it says, such as ``json.a`` or ``duration:wav``."""
        if name in self.sources or name == KEY:
            return name
        said = name.replace(" ", "")
        return next((column for column, source in self.sources.items() if source == said), None)

    def fields(self, names: Collection[str]) -> set[str]:
        """Return the fields that the columns *names* were made from, as far as it is known."""
        return {field for name in names for field in self.checksums.get(name, ())}

    def changed(self, names: Collection[str], found: Mapping[str, int]) -> list[str]:
        """Return which of the columns *names* were made from fields with other checksums than those *found*."""
        return [
            name
            for name in names
            if any(found[field] != checksum for field, checksum in self.checksums.get(name, {}).items())
        ]

    def without(self, names: Collection[str]) -> ShardColumns:
        """Return these columns except *names*."""
        if not names or self.table is None:
            return self
        sources = {name: source for name, source in self.sources.items() if name not in names}
        return self._replace(table=self.table.drop_columns(list(names)), sources=sources, is_cut=True)

    def added(self, values: Mapping[str, Any], made: ShardColumns, shard: Location, index: Index, state: Any) -> str:
        """Write these and other columns of *shard*, whole or not at all; return the name of the file.

        *made* has the sources and checksums of the *values*; all columns are of the shard in this *state*.
        """
        pa, parquet = require("pyarrow", extra="arrow"), require("pyarrow.parquet", extra="arrow")
        table = self.table
        if table is None:
            table = pa.table(
                {KEY: [key.encode(errors="surrogateescape").decode(errors="replace") for key in index.keys]}
            )
        for name, column in values.items():
            if (
                not isinstance(column, pa.Array)
                and bool in (kinds := {*map(type, column)} - {type(None)})
                and len(kinds) > 1
            ):
                kind = next(kind.__name__ for kind in kinds if kind is not bool)
                raise SampleError(f"column {name}: bool and {kind} make no column", url=shard.name)
            try:
                array = column if isinstance(column, pa.Array) else pa.array(column)
            except (ValueError, TypeError, OverflowError) as error:
                raise SampleError(f"column {name}: {error}", url=shard.name) from error
            at = table.schema.get_field_index(name)
            table = table.append_column(name, array) if at < 0 else table.set_column(at, name, array)
        digest = index.known_digest(shard).hex()
        about = {"size": index.shard_size, "fingerprint": index.fingerprint, "digest": digest}
        if shard.path is None and state is not None:
            about["version_read"] = state
        sources, checksums = self.sources | made.sources, {**self.checksums, **made.checksums}
        about |= {"columns": sources, "crc32": {name: checksums[name] for name in sources if name in checksums}}
        packed, location = io.BytesIO(), columns_location(shard)
        metadata = {FORMAT: json.dumps({"version": VERSION, **about})}
        parquet.write_table(table.replace_schema_metadata(metadata), packed, compression="zstd")
        location.make_folder()
        with location.open("wb") as stream:
            stream.write(packed.getvalue())
        if shard.path is not None:
            set_mark(location, state)
        return location.name


def _cure(sources: Mapping[str, str]) -> str:
    """Return the commands that rebuild columns made from *sources*.

    >>> _cure({"width": "width:jpg", "score": "table:scores.csv"}), _cure({"rank": "python:ranking.rank"})
    ('`tarindex --columns` and `tarindex --attach`', '`build_columns`')
    """
    cures = {"table": "`tarindex --attach`", "python": "`build_columns`"}
    kinds = [str(source).partition(":")[0] for source in sources.values()]
    return " and ".join(dict.fromkeys(cures.get(kind, "`tarindex --columns`") for kind in kinds or [""]))


def build_columns(
    urls: Any,
    columns: Columns,
    *,
    executor: Executor | None = None,
    on_error: ErrorPolicy = None,
    overwrite: bool = False,
    sync: bool = True,
) -> list[str]:
    """Write *columns* of the samples of indexed shards into ``SHARD.columns.parquet``; return the names written.

    *columns* is an expression, such as ``"width height:jpg;png, length:txt, duration:flac, size:jpg, json.score"``, or
    a mapping of names to such expressions or functions of a sample. The length of a text is in characters, the duration
    of audio in seconds, a size in bytes. Missing values are null, and so are values that cannot be decoded, if
    *on_error* allows that. Existing columns are kept, and computed again only if their source differs, the shard has
    changed, an earlier version wrote them without checksums, or with *overwrite*; so an interrupted run can be
    continued.

    Needs ``tarshards[arrow]``. Raises ValueError for a malformed expression, and ShardIndexError for shards without
    index.
    """
    sources, handle = parse_columns(columns), error_handler(on_error)
    tasks = [
        (shard, Location.of(shard.location(), sync=sync), sources, handle is not None, overwrite)
        for shard in find_shards(urls)
    ]
    for column, source in sources.items():
        if isinstance(source, Computed):
            check_sent(source.function, executor, f"build_columns: {column}")
    built = map(_build, tasks) if executor is None else bounded_map(_build, tasks, executor=executor, window=TASKS)
    written = []
    for name, errors in built:
        for error in errors:
            if handle is None:
                raise error
            handle(error)
        if name is not None:
            written.append(name)
    return written


def _build(
    task: tuple[Shard, Location, dict[str, Source], bool, bool],
) -> tuple[str | None, list[TarshardsError]]:
    """Write the columns of one shard that are due; return the name of the file, None if there is none to write."""
    shard, location, sources, goes_on, overwrite = task
    index = Index.load(location)
    state, kept = _state_of(location), _current(location)
    due = {
        name: source
        for name, source in sources.items()
        if overwrite or kept.sources.get(name) != str(source) or name not in kept.checksums
    }
    if not due and kept.table is not None and not kept.is_cut and (location.path is not None or kept.version == state):
        return None, []
    values, errors, found = _values(shard, index, due, goes_on)
    if errors and not goes_on:
        return None, errors
    checksums = {
        name: {field: found.get(field, 0) for field in _made_from(source, index)} for name, source in due.items()
    }
    made = ShardColumns(None, {name: str(source) for name, source in due.items()}, checksums)
    return kept.added(values, made, location, index, state), errors


def _current(location: Location) -> ShardColumns:
    """Return the columns of a shard that can be kept."""
    try:
        found = ShardColumns.load(location)
    except ShardIndexError:
        found = None
    if found is None:
        return ShardColumns(None, {})
    (changed,) = _changed([location], [found], [list(found.sources)])
    return found.without(changed)


def _state_of(shard: Location) -> Any:
    """Return what shows that a shard is still the same: its mark, or its version on a server; None if nothing does."""
    if shard.path is not None:
        return mark_of(shard)
    with shard.ranges() as ranges:
        version = ranges.version
    return list(map(str, version)) if version and any(version[1:3]) else None


def _is_same(shard: Location, state: Any, columns: ShardColumns) -> bool:
    """Return whether *columns* are known to be of a shard in this *state*."""
    if shard.path is not None:
        return is_marked(columns_location(shard), state)
    return state is not None and state == columns.version


def _changed(
    locations: Sequence[Location], columns: Sequence[ShardColumns], names: Sequence[Collection[str]]
) -> list[list[str]]:
    """Return for each shard those of its columns *names* that are of other contents than the shard has now.

    The fields of a shard are read only if it may be another file than when the columns were made. If all columns are
    compared, and right, the file of a local shard is marked.
    """
    each_fields = [each.fields(own) for each, own in zip(columns, names)]
    fields = {location: own for location, own in zip(locations, each_fields) if own}
    states = dict(zip(fields, for_each_shard(_state_of, list(fields))))
    doubtful = [
        location
        for location, each in zip(locations, columns)
        if location in fields and not _is_same(location, states[location], each)
    ]
    if doubtful:
        words = "%s: comparing the fields of %d shards with their columns; `tarindex --columns` makes this once"
        log.info(words, columns_location(doubtful[0]).name, len(doubtful))
    found = dict(zip(doubtful, for_each_shard(lambda location: _checksums(location, fields[location]), doubtful)))
    results = []
    for location, each, own in zip(locations, columns, names):
        changed = each.changed(own, found[location]) if location in found else []
        is_whole = fields.get(location) == each.fields(each.sources)
        if location in found and location.path is not None and is_whole and not changed:
            set_mark(columns_location(location), states[location])
        results.append(changed)
    return results


def _checksums(location: Location, fields: Collection[str]) -> dict[str, int]:
    """Return the checksum of each of *fields* over the samples of a shard."""
    there = sorted({*fields} & {*Index.load(location).fields})
    found = dict.fromkeys(fields, 0)
    if there:
        samples = SampleSequence(Shards.of([Shard.of(location)]), fields=there)
        numbers = np.arange(len(samples))
        for result in samples.read_all(np.zeros_like(numbers), numbers):
            if isinstance(result, OpenError | ShardIndexError):
                raise result
            if isinstance(result, dict):
                _add_checksums(found, result)
    return found


def _add_checksums(found: dict[str, int], sample: Sample) -> None:
    for field, data in sample.items():
        if not is_reserved(field):
            found[field] = crc32(data, found.get(field, 0))


def _made_from(source: Source, index: Index) -> Iterator[str]:
    """Yield the fields of the shard whose contents decide about the values of *source*."""
    if isinstance(source, Computed):
        yield from index.fields
    elif source.measure != "size":  # the digest of the index has all sizes
        yield from _known(index, source.fields)


def _values(
    shard: Shard, index: Index, due: dict[str, Source], goes_on: bool
) -> tuple[dict[str, list[Any]], list[TarshardsError], dict[str, int]]:
    """Return the values of the columns that are *due*, and the errors of samples, which have null there.

    The last are the checksums of the fields that were read.
    """
    values: dict[str, list[Any]] = {name: [None] * len(index) for name in due}
    errors: list[TarshardsError] = []
    found: dict[str, int] = {}
    read: dict[str, Source] = {}
    for name, source in due.items():
        if isinstance(source, Measure) and source.measure == "size":
            for field in reversed(source.fields):
                for member in index.members_of(field).tolist():
                    values[name][index.sample[member]] = index.content_size(member)
        else:
            read[name] = source
    fields: list[str] | None = None
    if all(isinstance(source, Measure) for source in read.values()):
        fields = sorted({field for source in read.values() for field in _made_from(source, index)})
        if not fields:
            return values, errors, found
    numbers = np.arange(len(index))
    samples = SampleSequence(Shards.of([shard]), fields=fields)
    for number, result in enumerate(samples.read_all(np.zeros_like(numbers), numbers)):
        if not isinstance(result, dict):
            errors.append(result)
        else:
            _add_checksums(found, result)
            for name, source in read.items():
                try:
                    values[name][number] = source(result)
                except TarshardsError as error:
                    errors.append(error)
        if errors and not goes_on:
            break
    return values, errors, found


def _known(index: Index, fields: Collection[str]) -> Iterator[str]:
    """Yield the fields of the shard that are among *fields*."""
    for field in fields:
        if (name := find_field(index.fields, [field])) is not None:
            yield name


class Attached(NamedTuple):
    """What ``attach_columns`` did: the files *written*, samples without a row, and rows without a sample."""

    written: list[str]
    samples_without: int
    rows_without: int


def attach_columns(urls: Any, table: Any, *, key: str = KEY, sync: bool = True) -> Attached:
    """Write the columns of *table*, whose column *key* has the keys of samples, beside indexed shards.

    *table* is the name of a parquet or csv file, or an Arrow table. A column of csv is text, unless another type
    reproduces all its cells, as for ``import_dataset``. A sample without a row has nulls. Columns of the same names are
    replaced, others stay. Needs ``tarshards[arrow]``. Raises ShardIndexError for shards without index, and SampleError
    for a table without that column, with a key twice, or with no key of a sample.
    """
    pa, compute = require("pyarrow", extra="arrow"), require("pyarrow.compute", extra="arrow")
    rows, origin = _read_table(table, key)
    if key not in rows.column_names:
        raise SampleError(f"no column {key!r} of keys; there are {', '.join(rows.column_names)}", url=origin)
    names = [name for name in rows.column_names if name != key]
    parse_columns(dict.fromkeys(names, "table"))
    keys = rows.column(key).cast(pa.string())
    counts = compute.value_counts(keys)
    repeated = counts.filter(compute.greater(compute.struct_field(counts, "counts"), 1))
    if len(repeated):
        raise SampleError("several rows have this key", url=origin, key=str(repeated[0]["values"]))
    shards = find_shards(urls)
    samples = SampleSequence(shards)
    own = [key.encode(errors="surrogateescape") for key in samples.keys]  # some may be no Unicode
    found = compute.index_in(pa.array(own, pa.binary()), value_set=keys.cast(pa.binary()).combine_chunks())
    if len(own) and found.null_count == len(own):
        raise SampleError(f"no row has the key of a sample, such as {samples.shards.key(0)}", url=origin)
    wanted, begin, written = rows.select(names).take(found), 0, []
    for shard, count in zip(shards, samples.counts.tolist()):
        location, part = Location.of(shard.location(), sync=sync), wanted.slice(begin, count)
        values = {name: part.column(name).combine_chunks() for name in names}
        state, kept = _state_of(location), _current(location)
        made = ShardColumns(None, dict.fromkeys(names, f"table:{origin}"), {name: {} for name in names})
        written.append(kept.added(values, made, location, Index.load(location), state))
        begin += count
    return Attached(written, found.null_count, len(keys) - len(compute.unique(found.drop_null())))


def _read_table(table: Any, key: str) -> tuple[pa.Table, str]:
    """Return a table, whose keys are text, as Arrow's, and a name for it."""
    if not isinstance(table, str | PathLike):
        return table, "a table"
    location = Location(fspath(table))
    if location.base.lower().endswith(".parquet"):
        read = read_parquet
    elif location.base.lower().endswith(".csv"):
        read = partial(read_csv, name=location.name, texts=(key,))
    else:
        raise SampleError("a table of columns is a .parquet or .csv file", url=location.name)
    try:
        return read(io.BytesIO(location.read(MAX_BYTES))), location.name
    except (OSError, ValueError) as error:
        if isinstance(error, TarshardsError):
            raise
        raise SampleError(f"cannot read this table: {error}", url=location.name) from error


def _read_columns(shard: Location) -> tuple[bytes, SidecarHead] | None:
    """Return the bytes of a shard's columns, and the head of its index; None if there are no columns."""
    location = columns_location(shard)
    return (location.read(MAX_BYTES), read_head(shard)) if location.is_taken() else None


def load_columns(shards: SampleSequence, names: Collection[str]) -> pa.Table | None:
    """Return the columns *names* of all samples, in the order of *shards*; None if the first shard has none of them.

    The errors are those of ``load_tables``.
    """
    tables = load_tables(shards, names)
    if tables is None:
        return None
    return require("pyarrow", extra="arrow").concat_tables(tables, promote_options="permissive")


def load_tables(shards: SampleSequence, names: Collection[str]) -> list[pa.Table] | None:
    """Return the columns *names* of the samples of each of *shards*; None if the first shard has none of them.

    A name is also that of what a column was made from: see ``ShardColumns.column``. Raises ShardIndexError if some of
    them are missing, in this or another shard, or the columns are stale. A shard that has been copied or changed since
    they were made is compared with them by the fields that they were made from.
    """
    if not shards.urls:
        return None
    locations = shards.shards.named.locations()
    first = ShardColumns.load(locations[0])
    if first is None or not any(first.column(name) for name in names if name != KEY):
        return None

    loaded: list[ShardColumns] = []
    taken: list[list[str]] = []

    def wanted(location: Location, columns: ShardColumns | None) -> Any:
        found = {name: None if columns is None else columns.column(name) for name in names}
        missing = [name for name, column in found.items() if column is None]
        if columns is None or missing:
            known = "" if columns is None else f"; there are {', '.join(columns.sources)}"
            reason = f"no column {missing[0]}{known}; add it with `tarindex --columns`, or give fields= to read samples"
            raise ShardIndexError(reason, url=columns_location(location).name)
        assert columns is not None
        assert columns.table is not None
        loaded.append(columns._replace(table=None))
        taken.append([str(column) for column in found.values() if column != KEY])
        return columns.table.select([str(column) for column in found.values()]).rename_columns([*found])

    # Threads only read: one in a library in C++ when the process ends would abort it.
    packed = for_each_shard(_read_columns, locations[1:])
    others = (each and ShardColumns.parse(location, *each) for location, each in zip(locations[1:], packed))
    tables = list(map(wanted, locations, chain([first], others)))
    for location, columns, changed in zip(locations, loaded, _changed(locations, loaded, taken)):
        if changed:
            fields = ", ".join(sorted(columns.fields(changed)))
            cure = _cure({name: columns.sources[name] for name in changed})
            raise ShardIndexError(
                f"stale: the contents of {fields} have changed; rebuild it with {cure}",
                url=columns_location(location).name,
            )
    return tables
