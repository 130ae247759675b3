"""Plans, folders and lines of text -> samples; every error names the line or the folder it comes from."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tarshards.errors import OpenError, SampleError
from tarshards.expressions import Template
from tarshards.fields import split_fields
from tarshards.keys import is_reserved, split_name
from tarshards.lines import checked, located, numbered_lines
from tarshards.openers import open_url, public
from tarshards.openers.local import local_path
from tarshards.openers.streams import SCHEME
from tarshards.samples import Sample
from tarshards.tabulate import unescape
from tarshards.urls import expand_urls

Row = tuple[str, list[bytes]]  # its place, and its cells

MISSING = "fail", "skip", "ignore"


def read_plan(
    plan: str, *, key: str | None = None, delimiter: str | None = None, folder: str = "", allow_pipe: bool = False
) -> Iterator[Sample]:
    """Yield a sample for each row of *plan*, a table whose first row names the fields; it is read once, row by row.

    Cells are the bytes of their fields; those of a column ``@jpg`` are paths (relative to *folder*) or URLs whose
    content is the field jpg. Keys come from the template *key* over ``record`` (counted from 0) and the columns, or
    else from the column ``__key__``. *delimiter* is a tab, unless the plan is named .csv; cells between tabs have the
    escapes of ``tarshards.tabulate``, others are quoted as in CSV.

    Raises a TarshardsError with the line for a row, key or file that is not as it must be.
    """
    if delimiter is None:
        delimiter = "," if re.search(r"\.csv(\.\w+)?$", plan, re.IGNORECASE) else "\t"
    lines = numbered_lines(plan, allow_pipe=allow_pipe)
    rows = _split_tabs(lines) if delimiter == "\t" else _split_quoted(lines, delimiter)
    return checked(_read_rows(rows, public(plan), key, folder, allow_pipe))


def _read_rows(rows: Iterator[Row], name: str, key: str | None, folder: str, allow_pipe: bool) -> Iterator[Sample]:
    place, header = next(rows, ("", []))
    if not header:
        raise SampleError("an empty plan: its first line names the columns", url=name)
    columns = [_text(cell) for cell in header]
    columns[0] = columns[0].removeprefix("\ufeff")
    fields = [column.removeprefix("@") for column in columns]
    _check_columns(fields, place)
    with located(place):
        if key is None and "__key__" not in columns:
            raise ValueError("no column __key__, and no template for keys")
        template = Template("{__key__}" if key is None else key, {"record": 0, **dict.fromkeys(fields, "")})
    for record, (place, cells) in enumerate(rows):
        with located(place):
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells for {len(columns)} columns")
            texts = {field: _text(cell) for field, cell in zip(fields, cells)}
            sample: Sample = {"__key__": template.fill({**texts, "record": record}), "__url__": place}
            for column, field, cell in zip(columns, fields, cells):
                if column.startswith("@"):
                    sample[field] = _content(texts[field], folder, allow_pipe)
                elif field != "__key__":
                    sample[field] = cell
        yield sample


def _check_columns(fields: list[str], place: str) -> None:
    with located(place):
        for field, count in Counter(fields).items():
            if count > 1:
                raise ValueError(f"two columns for {field}")
            if field == "record":
                raise ValueError("a column cannot be named record, which counts the rows")
            if field != "__key__" and not is_field(field):
                raise ValueError(f"{field!r} cannot name a field")


def is_field(name: str) -> bool:
    """Say whether *name* can name a field that reads back.

    >>> is_field("seg.png"), is_field("PNG"), is_field("__url__")
    (True, False, False)
    """
    return bool(name) and not is_reserved(name) and split_name(f"key.{name}") == ("key", name)


def _split_tabs(lines: Iterable[tuple[str, str]]) -> Iterator[Row]:
    for place, line in lines:
        with located(place):
            cells = [unescape(cell) for cell in line.removesuffix("\r").split("\t")]
        yield place, cells


def _split_quoted(lines: Iterable[tuple[str, str]], delimiter: str) -> Iterator[Row]:
    places: list[str] = []  # of the lines of one row

    def texts() -> Iterator[str]:
        for place, line in lines:
            places.append(place)
            yield line + "\n"

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        places.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise SampleError(str(error), url=places[0]) from error
        if row is None:
            return
        yield places[0], [cell.encode() for cell in row]


def read_sources(lines: str, *, folder: str = "", allow_pipe: bool = False) -> Iterator[Sample]:
    r"""Yield the samples that *lines*, a URL of lines ``NAME SOURCE``, makes of adjacent names with one key.

    NAME is a member's name; a tab, or else the first space, ends it. SOURCE is a path (relative to *folder*), a URL,
    ``file:path``, ``text:`` and the text itself with ``\t \n \\`` escaped, or with *allow_pipe* ``pipe:command``.
    """
    return checked(_read_sources(lines, folder, allow_pipe))


def _read_sources(lines: str, folder: str, allow_pipe: bool) -> Iterator[Sample]:
    sample: Sample = {}
    for place, line in numbered_lines(lines, allow_pipe=allow_pipe):
        if not line.strip():
            continue
        with located(place):
            name, _, source = line.partition("\t" if "\t" in line else " ")
            parts = split_name(name)
            if not source.strip():
                raise ValueError(f"a line is NAME SOURCE, not {line!r}")
            if parts is None or not is_field(parts[1]):
                raise ValueError(f"{name!r} has no key and field")
            key, field = parts
            if sample and sample["__key__"] == key and field in sample:
                raise SampleError("this field comes twice", key=key, field=field)
            text = source.lstrip().startswith("text:")
            data = unescape(source.partition(":")[2]) if text else _content(source.strip(), folder, allow_pipe)
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        sample = {**(sample or {"__key__": key, "__url__": place}), field: data}
    if sample:
        yield sample


def read_text(
    urls: Any, *, field: str = "txt", key: str = "{record:09d}", allow_pipe: bool = False
) -> Iterator[Sample]:
    """Yield a sample with one *field* for each line of the texts *urls*, a shard expression; without its newline.

    *key* is a template over ``record``, which counts all lines from 0. Raises DecodeError for a line that is not UTF-8.
    """
    template = Template(key, {"record": 0})
    lines = (line for url in expand_urls(urls) for line in numbered_lines(url, allow_pipe=allow_pipe))
    return checked(
        {"__key__": template.fill({"record": record}), "__url__": place, field: text.encode()}
        for record, (place, text) in enumerate(lines)
    )


class Found(NamedTuple):
    """What one entry of a folder begins: a sample with the paths of its fields, or a folder."""

    key: str
    paths: dict[str, str]
    folder: str | None = None


def read_tree(
    folder: str,
    *,
    fields: str | None = None,
    missing: str = "fail",
    class_field: str | None = None,
    skipped: Counter[str] | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the files below *folder*, in the order of `tar --sort=name`; keys are relative to it.

    Of the *fields* ("jpg;png cls": words, each maybe with alternatives; by default all) one that a sample lacks is an
    error, or *missing* says to "skip" the sample or to "ignore" it. *class_field* is added: the number of the
    sample's first folder, as ``list_classes`` has it. *skipped* counts what is left out: files without an extension,
    hidden ones, links to folders, samples. The names of one folder at a time, and of those around it, are in memory.
    """
    if missing not in MISSING:
        raise ValueError(f"missing is {', '.join(MISSING)}, not {missing!r}")
    left_out: Counter[str] = Counter() if skipped is None else skipped
    classes = {} if class_field is None else list_classes(folder)
    wanted = None if fields is None else [names for names in split_fields((fields,)) if class_field not in names]
    return checked(_read_tree(folder, wanted, missing, class_field, classes, left_out))


def list_classes(folder: str) -> dict[str, int]:
    """Return the numbers of the folders in *folder*: 0, 1, ... by their sorted names; hidden ones have none."""
    return {entry.name: number for number, entry in enumerate(filter(_is_open_folder, _scan(folder)))}


def _read_tree(
    folder: str,
    wanted: list[list[str]] | None,
    missing: str,
    class_field: str | None,
    classes: dict[str, int],
    skipped: Counter[str],
) -> Iterator[Sample]:
    for key, paths, _ in _walk(folder, "", skipped):
        if wanted is not None:
            kept = {field: paths[field] for names in wanted for field in [n for n in names if n in paths][:1]}
            lacking = [" or ".join(names) for names in wanted if not any(name in paths for name in names)]
            if not kept:
                skipped["samples without any of the fields"] += 1
                continue
            if lacking and missing == "fail":
                raise SampleError(f"no file for {', '.join(lacking)}", url=folder, key=key)
            if lacking and missing == "skip":
                skipped[f"samples without {', '.join(lacking)}"] += 1
                continue
            paths = kept
        sample: Sample = {"__key__": key, "__url__": folder}
        if class_field is not None:
            name, slash, _ = key.partition("/")
            if not slash:
                raise SampleError("not in a folder that could be its class", url=folder, key=key)
            if class_field in paths:
                raise SampleError("there is a file for this field too", url=folder, key=key, field=class_field)
            sample[class_field] = str(classes[name]).encode()
        for field, path in paths.items():
            sample[field] = _read_file(path)
        yield sample


def _walk(folder: str, prefix: str, skipped: Counter[str]) -> Iterator[Found]:
    """Yield the samples below *folder*, each where the first of its files stands."""
    found: dict[str, Found] = {}
    for entry in _scan(folder):
        parts = split_name(prefix + entry.name)
        if entry.is_dir(follow_symlinks=False):
            if _is_open_folder(entry):
                found[entry.name + "/"] = Found("", {}, entry.path)
            else:
                skipped["hidden folders"] += 1
        elif entry.is_dir():
            skipped["links to folders"] += 1
        elif not entry.is_file() and not entry.is_symlink():
            skipped["files that are not regular"] += 1
        elif parts is None:
            skipped["hidden files" if entry.name.startswith(".") else "files without an extension"] += 1
        else:
            key, field = parts
            paths = found.setdefault(key, Found(key, {})).paths
            if field in paths:
                raise SampleError(f"{paths[field]} and {entry.path} are one field", url=folder, key=key, field=field)
            paths[field] = entry.path
    for name, entry_found in found.items():
        if entry_found.folder is None:
            yield entry_found
        else:
            yield from _walk(entry_found.folder, prefix + name, skipped)


def _is_open_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and not is_reserved(entry.name)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise OpenError(error.strerror or str(error), url=folder) from error


def _content(source: str, folder: str, allow_pipe: bool) -> bytes:
    """Return the bytes of a path relative to *folder*, or of a URL."""
    if not source:
        raise ValueError("an empty path")
    path = os.path.join(folder, local_path(source))
    is_url = SCHEME.match(source) and not source.lower().startswith("file:")
    if not is_url or os.path.lexists(path):
        return _read_file(path)
    with open_url(source, allow_pipe=allow_pipe) as stream:
        return stream.read()


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise OpenError(getattr(error, "strerror", None) or str(error), url=path) from error


def _text(cell: bytes) -> str:
    return cell.decode(errors="surrogateescape")
