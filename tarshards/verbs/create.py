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
    """The sources of fields that a plan or lines name.

    Paths are relative to *folder*; with *allow_pipe* a source may be ``pipe:command``.
    """

    folder: str = ""
    allow_pipe: bool = False

    def read(self, name: str) -> bytes:
        """Return the bytes of a path or URL."""
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

    Cells are the bytes of their fields; those of a column ``@jpg`` are paths or URLs, read as *sources* says, whose
    content is the field jpg. Keys come from the template *key* over ``record`` (counted from 0) and the columns, or
    from the column ``__key__``. *delimiter* is a comma if the name of the plan ends in .csv, else a tab. Cells between
    tabs use the escapes of ``tarshards.verbs.table``, others are quoted as in CSV.

    Raises a TarshardsError, which names the line, for an invalid row or key and a file that cannot be read.
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
    """Return whether *name* can name a field that reads back.

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
    r"""Yield the samples of *lines*, a URL of lines ``NAME SOURCE``; adjacent names with one key form a sample.

    NAME is a member's name; it ends at a tab, or at the first space if there is no tab. SOURCE is a path or URL, read
    as *sources* says, ``file:path``, or ``text:`` and the text itself with ``\t \n \\`` escaped.
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
    """Yield a sample with one *field* for each line, without its newline, of the texts *urls*, a shard expression.

    *key* is a template over ``record``, which counts all lines from 0. Raises ValueError for a bad *field* or *key*,
    DecodeError for a line that is not UTF-8.
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
