"""Shards -> other formats: each shard becomes one file, or files in a folder, in parallel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tarshards.errors import EncodeError, OpenError, SampleError, TarshardsError, UrlError, shortened
from tarshards.formats.arrow import Tables
from tarshards.formats.msgpack_shards import write_msgpack
from tarshards.formats.naming import Columns, decode_value, record_url, to_json
from tarshards.formats.pieces import PART, fail_rows, file_identity
from tarshards.samples.codecs.basic import check_types
from tarshards.samples.codecs.registry import require
from tarshards.samples.grouping import read_samples, read_shard
from tarshards.samples.keys import Sample, is_reserved
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.samples.seen_keys import SeenKeys
from tarshards.storage.expressions import find_shards, spec_name
from tarshards.storage.location import Location
from tarshards.storage.manifest import ArchiveEnd, Shard
from tarshards.storage.opening import open_shard
from tarshards.write.once import Outputs

FORMATS = ("parquet", "jsonl", "msgpack", "folder")
MOST_ROWS = 1 << 16  # most rows of a row group
LOOKED_AT = 100  # samples that determine the columns, or the fields of a split, without a record

_to_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

Reject = Callable[[Sample, TarshardsError], object]


def export_dataset(
    shards: Any,
    output: str | os.PathLike[str] | Location,
    *,
    format: str | None = None,
    executor: Executor | None = None,
    on_error: ErrorPolicy = None,
    concatenated: bool = False,
    end: ArchiveEnd = "required",
    overwrite: bool = False,
    progress: bool = False,
    sync: bool = True,
) -> list[str]:
    """Write each of *shards*, a shard expression, to a file named by *output*, or its members to files in a folder.

    *output* is a pattern with the number of the shard, such as ``out-{shard:06d}.parquet``, whose suffix selects the
    format: ``parquet``, ``jsonl``, and ``gz`` for Squirrel's msgpack shards; or it is a folder. *format*, one of
    FORMATS, selects it for other names. The columns are ``__key__`` and the fields; their names, types and order come
    from the record of an import, if there is one beside the shards. Otherwise the first 100 samples determine the
    columns of parquet. Returns the names of the files, or of the folder.

    It works in parallel, resumes, and handles errors like ``import_dataset``; errors name shard and key.
    """
    sources = find_shards(shards, concatenated=concatenated, end=end)
    ledger = Ledger.of(on_error)
    target = Location.of(output, sync=sync)
    output = target.url
    kind = format or _format_of(output)
    if kind not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, not {shortened(format)}")
    columns = Columns.load(record_url([shard.url for shard in sources]))
    if kind == "parquet":
        looked_at = islice(read_samples(sources, on_error=on_error and "skip"), LOOKED_AT)
        schema = Tables(columns, looked_at).schema
        columns = columns._replace(schema=schema.serialize().to_pybytes())
    if kind == "folder":
        hidden = [target.at(os.path.join(output, f".{number:06d}")) for number in range(len(sources))]
        outputs = Outputs(hidden)
    else:
        outputs = Outputs.named(target, len(sources))
    if kind in ("jsonl", "msgpack"):
        outputs.targets[0].compression()  # raises UrlError for a name of another format
    repeated = _repeated_files(sources, columns) if kind == "folder" else [{}] * len(sources)
    units = [_ExportedShard(*each[:2], kind, columns, each[2]) for each in zip(sources, outputs.targets, repeated)]
    if kind == "folder" and not overwrite and not outputs.is_begun and os.path.isdir(output) and os.listdir(output):
        raise OpenError("the folder has files; --overwrite writes into it", url=target.name)
    with outputs.claimed(overwrite=overwrite):
        made = outputs.make(units, ledger, executor=executor, progress=progress)
        samples = sum(each["samples"] for each in made)
        ledger.count(shards=len(made), samples=samples, streamed=samples)
        if not samples:
            outputs.discard()
            raise SampleError("no samples, so nothing is written", url=spec_name(shards))
        outputs.finish()
    return [output] if kind == "folder" else [each["output"] for each in made]


def _format_of(output: str) -> str:
    base = Location.of(output).base.lower()
    if base.endswith(".parquet"):
        return "parquet"
    if re.search(r"\.(jsonl|ndjson)(\.\w+)?$", base):
        return "jsonl"
    if base.endswith(".gz") and not base.endswith(".tar.gz"):
        return "msgpack"
    if os.path.isdir(output) or not re.search(r"\.\w+$", base):
        return "folder"
    raise UrlError(
        f"cannot tell the format from the name; name one of {', '.join(FORMATS)}", url=Location.of(output).name
    )


def _repeated_files(sources: Iterable[Shard], columns: Columns) -> list[dict[int, str]]:
    """Return for each shard the samples that share a file with an earlier sample: the numbers, with the reasons."""
    seen = SeenKeys()
    repeated: list[dict[int, str]] = []
    for shard in sources:
        repeated.append({})
        samples = read_shard(shard, ledger=Ledger(max_errors=float("inf")), copies="fields")
        for number, sample in enumerate(samples):
            paths = [os.path.normpath(f"{sample['__key__']}.{field}") for field in _exported(sample, columns)]
            if (path := next((path for path in paths if path in seen), None)) is not None:
                reason = f"the file {path} is of another sample, in {seen.shard_of(path) or 'a shard before'}"
                repeated[-1][number] = f"{reason}; export the shards to folders of their own"
            else:
                seen.update(paths, shard.url)
    return repeated


def _exported(sample: Sample, columns: Columns) -> Iterator[str]:
    """Yield the names of the exported fields."""
    return (field for field in sample if not is_reserved(field) and field not in columns.omit)


@dataclass(frozen=True)
class _ExportedShard:
    """A file made from a shard, or its files in a folder, without the samples whose numbers are in *repeated*."""

    shard: Shard
    output: Location
    format: str
    columns: Columns
    repeated: dict[int, str]

    @property
    def is_file(self) -> bool:
        return self.format != "folder"

    @property
    def identity(self) -> list[Any]:
        schema = None if self.columns.schema is None else self.columns.schema.hex()
        about = [self.format, *file_identity(self.shard.url), self.columns.fields, self.columns.omit, schema]
        return [*about, *self.repeated]

    @property
    def inputs(self) -> list[str]:
        return [self.shard.url]

    def make(self, ledger: Ledger) -> dict[str, Any]:
        def reject(sample: Sample, error: TarshardsError) -> None:
            fail_rows(ledger, error.at(sample))

        samples = read_shard(self.shard, ledger=ledger)
        if self.format == "parquet":
            count = _write_parquet(samples, self.output, self.columns, reject)
        elif self.format == "jsonl":
            count = _write_lines(samples, self.output, self.columns, reject)
        elif self.format == "msgpack":
            count, _ = write_msgpack(_rows(samples, self.columns, reject), self.output, reject=reject)
        else:
            count = _write_files(samples, self.output, self.columns, self.repeated, reject)
        return {"file": self.output.recorded, "samples": count}


def _write_parquet(samples: Iterable[Sample], output: Location, columns: Columns, reject: Reject) -> int:
    parquet = require("pyarrow.parquet", extra="arrow")
    tables = Tables(columns, ())
    output.make_folder()
    count = 0
    with (
        output.open("wb") as stream,
        parquet.ParquetWriter(stream, tables.schema, write_page_checksum=True) as writer,
    ):
        for rows in _groups(tables.rows(samples, reject)):
            try:
                table = tables.table(rows)
            except EncodeError:  # the error of one row or several
                rows = [row for row in rows if _fits(tables, row, reject)]
                table = tables.table(rows)
            if rows:
                writer.write_table(table)
            count += len(rows)
    return count


def _groups(rows: Iterable[tuple[dict[str, Any], int]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each row group."""
    group: list[dict[str, Any]] = []
    total = 0
    for row, size in rows:
        group.append(row)
        total += size
        if total >= PART or len(group) == MOST_ROWS:
            yield group
            group, total = [], 0
    if group:
        yield group


def _fits(tables: Tables, row: dict[str, Any], reject: Reject) -> bool:
    try:
        tables.table([row])
    except EncodeError as error:
        reject(row, error)
        return False
    return True


def _write_lines(samples: Iterable[Sample], output: Location, columns: Columns, reject: Reject) -> int:
    count = 0
    output.make_folder()
    with open_shard(output, "wb") as stream:
        for row in _rows(samples, columns, reject):
            try:
                items = [
                    f"{_to_text(name)}: {_json_of(name, value)}" for name, value in row.items() if name != "__url__"
                ]
            except EncodeError as error:
                reject(row, error)
                continue
            # Bytes of names that are not UTF-8 are surrogates in a str; JSON has the same escapes for them.
            stream.write(f"{{{', '.join(items)}}}\n".encode(errors="backslashreplace"))
            count += 1
    return count


def _json_of(column: str, value: Any) -> str:
    """Return a value as JSON; raise EncodeError, which names the *column*, if JSON would change it."""
    try:
        text = _to_text(held := to_json(value))
        check_types(held)
    except (ValueError, TypeError, RecursionError) as error:
        raise EncodeError(str(error), field=column) from error
    return text


def _rows(samples: Iterable[Sample], columns: Columns, reject: Reject) -> Iterator[dict[str, Any]]:
    """Yield the key, the shard and the values of each sample by column, in the order of the columns."""
    ranks = {name: number for number, name in enumerate(columns.order)}
    for sample in samples:
        row: dict[str, Any] = {}
        try:
            for field, data in sample.items():
                if not is_reserved(field) and field not in columns.omit:
                    name = columns.column(field)
                    if name in row:
                        raise SampleError(f"a second field for the column {name!r}", field=field)
                    row[name] = decode_value(field, data)
        except TarshardsError as error:
            reject(sample, error)
            continue
        ordered = sorted(row.items(), key=lambda item: ranks.get(item[0], len(ranks)))
        yield {"__key__": sample["__key__"], "__url__": sample["__url__"], **dict(ordered)}


def _write_files(
    samples: Iterable[Sample], output: Location, columns: Columns, repeated: Mapping[int, str], reject: Reject
) -> int:
    folder = os.path.dirname(output.url)
    count = 0
    for number, sample in enumerate(samples):
        key = sample["__key__"]
        if os.path.isabs(key) or ".." in key.split("/"):
            reject(sample, SampleError("a file of this name would lie outside of the folder"))
            continue
        if number in repeated:
            reject(sample, SampleError(repeated[number]))
            continue
        for field in _exported(sample, columns):
            location = output.at(os.path.join(folder, f"{key}.{field}"))
            location.make_folder()
            with location.open("wb") as stream:
                stream.write(sample[field])
        count += 1
    return count
