"""Plans and lines of text -> samples; every error names its line."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from tarshards.errors import SampleError, TarshardsError
from tarshards.samples.conditions import Template
from tarshards.samples.keys import DUPLICATE_FIELD, Sample, is_reserved, split_name
from tarshards.samples.lines import checked, located, numbered_lines, open_text, unescape
from tarshards.samples.rows import csv_rows, raised
from tarshards.samples.tree import read_file
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.tar.read import MEMBER_LIMIT

Row = tuple[str, list[bytes]]  # origin and cells


class FieldSources(NamedTuple):
    """Reads the paths and URLs from which a plan or lines take the data of fields.

    Paths are relative to *folder*; with *allow_pipe*, ``pipe:command`` is also accepted.
    """

    folder: str = ""
    allow_pipe: bool = False

    def read(self, name: str) -> bytes:
        """Return the content of the path or URL *name*."""
        if not name:
            raise ValueError("an empty path")
        location = Location.of(name, allow_pipe=self.allow_pipe)
        path = os.path.join(self.folder, str(location.path) if location.scheme == "file" else name)
        if location.scheme in ("", "-", "file") or os.path.lexists(path):
            return read_file(path)
        return location.read(MEMBER_LIMIT)


HERE = FieldSources()


def read_plan(
    plan: str | Location,
    *,
    key: str | None = None,
    delimiter: str | None = None,
    sources: FieldSources = HERE,
) -> Iterator[Sample]:
    """Yield a sample for each row of *plan*, a table whose first row names the fields; it is read once, row by row.

    A cell is the data of its field. In a column named ``@jpg``, each cell is a path or URL, read by *sources*, whose
    content is the data of the field jpg. The key is made by the template *key* from ``record`` (the number of the row,
    from 0) and the columns; without *key* it is the column ``__key__``. *delimiter* is by default a comma if the name
    of the plan ends in .csv, else a tab. Cells separated by tabs use the escapes of ``tarshards.verbs.table``; with any
    other delimiter, cells are quoted as in CSV.

    Raises a TarshardsError that names the line for an invalid row or key, or for a file that cannot be read.
    """
    location = Location.of(plan)
    if delimiter is None:
        delimiter = "," if re.search(r"\.csv(\.\w+)?$", location.url, re.IGNORECASE) else "\t"
    rows = _split_tabs(location) if delimiter == "\t" else _split_quoted(location, delimiter)
    return checked(_read_rows(rows, location.name, key, sources))


def _read_rows(rows: Iterator[Row], name: str, key: str | None, sources: FieldSources) -> Iterator[Sample]:
    origin, header = next(rows, ("", []))
    if not header:
        raise SampleError("the plan is empty; its first line must name the columns", url=name)
    columns = [_text(cell) for cell in header]
    fields = [column.removeprefix("@") for column in columns]
    _check_columns(fields, origin)
    with located(origin):
        if key is None and "__key__" not in columns:
            raise ValueError("no column __key__, and no key template")
        template = Template("{__key__}" if key is None else key, {"record": 0, **dict.fromkeys(fields, "")})
    for record, (origin, cells) in enumerate(rows):
        with located(origin):
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells for {len(columns)} columns")
            texts = {field: _text(cell) for field, cell in zip(fields, cells)}
            sample: Sample = {"__key__": template.fill({**texts, "record": record}), "__url__": origin}
            for column, field, cell in zip(columns, fields, cells):
                if column.startswith("@"):
                    sample[field] = sources.read(texts[field])
                elif field != "__key__":
                    sample[field] = cell
        yield sample


def _check_columns(fields: list[str], origin: str) -> None:
    with located(origin):
        for field, count in Counter(fields).items():
            if count > 1:
                raise ValueError(f"two columns are named {field}")
            if field == "record":
                raise ValueError("a column cannot be named record, which counts the rows")
            if field != "__key__" and not is_field(field):
                raise ValueError(f"{field!r} cannot name a field")


def is_field(name: str) -> bool:
    """Return whether a field of this *name*, written to a shard, is read back under the same name.

    >>> is_field("seg.png"), is_field("PNG"), is_field("__url__")
    (True, False, False)
    """
    return bool(name) and not is_reserved(name) and split_name(f"key.{name}") == ("key", name)


def _split_tabs(plan: Location) -> Iterator[Row]:
    for origin, line in numbered_lines(plan):
        with located(origin):
            cells = [unescape(cell) for cell in line.removesuffix("\r").split("\t")]
        yield origin, cells


def _split_quoted(plan: Location, delimiter: str) -> Iterator[Row]:
    name = plan.name
    with open_text(plan) as text:
        for line, cells in csv_rows(text, delimiter):
            origin = f"{name}: line {line}"
            if isinstance(cells, TarshardsError):
                raise raised(cells, origin)
            yield origin, [cell.encode() for cell in cells]


def read_member_lines(lines: str | Location, *, sources: FieldSources = HERE) -> Iterator[Sample]:
    r"""Yield the samples that *lines*, a path or URL, lists as lines ``NAME SOURCE``, one for each member.

    Adjacent names that share a key form a sample. NAME ends at the first tab, or at the first space if the line has no
    tab. SOURCE is a path or URL, read by *sources*, ``file:path``, or ``text:`` followed by the data itself, in which
    ``\t``, ``\n`` and ``\\`` are escapes.

    Raises a TarshardsError that names the line for a malformed line, or for a file that cannot be read.
    """
    return checked(_read_member_lines(Location.of(lines), sources))


def _read_member_lines(lines: Location, sources: FieldSources) -> Iterator[Sample]:
    sample: Sample = {}
    for origin, line in numbered_lines(lines):
        if not line.strip():
            continue
        with located(origin):
            name, _, source = line.partition("\t" if "\t" in line else " ")
            parts = split_name(name)
            if not source.strip():
                raise ValueError(f"a line must be NAME SOURCE, not {line!r}")
            if parts is None or not is_field(parts[1]):
                raise ValueError(f"{name!r} has no key and field")
            key, field = parts
            if sample and sample["__key__"] == key and field in sample:
                raise SampleError(DUPLICATE_FIELD, key=key, field=field)
            text = source.lstrip().startswith("text:")
            data = unescape(source.partition(":")[2]) if text else sources.read(source.strip())
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        sample = {**(sample or {"__key__": key, "__url__": origin}), field: data}
    if sample:
        yield sample


def read_text(urls: Any, *, field: str = "txt", key: str = "{record:09d}") -> Iterator[Sample]:
    """Yield a sample for each line of the text files *urls*, a shard expression: *field* is the line without newline.

    *key* is a template with ``record``, the number of the line over all files, from 0. Raises ValueError for an invalid
    *field* or *key*, and DecodeError for a line that is not UTF-8.
    """
    if not is_field(field):
        raise ValueError(f"{field!r} cannot name a field")
    template = Template(key, {"record": 0})
    lines = (line for shard in find_shards(urls) for line in numbered_lines(shard.location()))
    return checked(
        {"__key__": template.fill({"record": record}), "__url__": origin, field: text.encode()}
        for record, (origin, text) in enumerate(lines)
    )


def _text(cell: bytes) -> str:
    return cell.decode(errors="surrogateescape")
