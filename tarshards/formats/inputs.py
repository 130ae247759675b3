"""The input of an import or of a stream of rows: its format, its files, and its plan of pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tarshards.errors import SampleError, UrlError, shortened
from tarshards.formats.mds import INDEX, plan_mds
from tarshards.formats.msgpack_shards import FILE_NUMBER, in_store, stem_of
from tarshards.formats.pieces import (
    TYPES,
    CsvPiece,
    Keys,
    Plan,
    is_saved_dataset,
    open_dataset,
    plan_csv,
    plan_dataset,
    plan_folder,
    plan_lines,
    plan_msgpack,
    plan_parquet,
)
from tarshards.formats.tfrecord import plan_tfrecord
from tarshards.formats.zarr_ import is_zarr, plan_zarr
from tarshards.samples.fields import check_mapping
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.manifest import SUFFIX

#: Formats that Squirrel stores as folders of files KEY.gz.
STORES = ("msgpack", "jsonl")
#: For each file format, the function that plans files, from their URLs, their names in keys, and the bytes of a piece.
FILES: dict[str, Callable[[list[str], list[str], int | None], Plan]] = {
    "parquet": plan_parquet,
    "csv": plan_csv,
    "jsonl": plan_lines,
    "msgpack": plan_msgpack,
    "tfrecord": plan_tfrecord,
    "mds": plan_mds,
    "zarr": plan_zarr,
}
FORMATS = (*FILES, "folder", "huggingface")
_SUFFIXES = {"parquet": "parquet", "pq": "parquet", "csv": "csv", "tsv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}
_SUFFIXES |= {"json": "jsonl", "tfrecord": "tfrecord", "tfrecords": "tfrecord", "tfrec": "tfrecord", "zarr": "zarr"}


def plan_input(
    source: Any,
    format: str | None,
    split: str | None,
    key: str | None,
    types: Mapping[str, str] | None,
    max_bytes: int | None,
) -> Plan:
    """Return the plan of an input; *key* replaces the template of keys, and *types* are the types of csv columns.

    Pieces have about *max_bytes* (None: about ``PART``, and files that must be read to be cut stay whole). Raises
    UrlError for an unknown format, SampleError for an input without rows, ValueError for wrong arguments.
    """
    plan = _plan(source, format, split, key, types or {}, max_bytes)
    plan = plan._replace(key=key or plan.key)
    Keys.of(plan.key, "")  # raises ValueError
    if types and not all(isinstance(piece, CsvPiece) for piece in plan.pieces):
        raise ValueError("types= applies to csv only; other formats define the types of their values")
    if not plan.pieces:
        raise SampleError("no samples: there are no rows", url=name_of(source))
    return plan


def name_of(source: Any) -> str:
    """Return the name of an input, for errors."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else shortened(source)


def _plan(
    source: Any, format: str | None, split: str | None, key: str | None, types: Mapping[str, str], max_bytes: int | None
) -> Plan:
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, not {shortened(format)}")
    for kind in check_mapping(types, "types=", "of columns and types").values():
        if kind not in TYPES:
            raise ValueError(f"the type of a column is one of {', '.join(TYPES)}, not {shortened(kind)}")
    if hasattr(source, "features") and hasattr(source, "with_format"):
        return plan_dataset(source, "dataset", max_bytes)
    if format == "huggingface":
        return plan_dataset(open_dataset(os.fspath(source), split), os.fspath(source), max_bytes)
    if isinstance(source, str | os.PathLike) and os.path.basename(source) == INDEX:
        source, format = os.path.dirname(source) or ".", format or "mds"
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        folder = os.fspath(source)
        found = format or _format_of_folder(folder)
        if found == "folder":
            return plan_folder(folder, max_bytes)
        if found == "huggingface":
            return plan_dataset(open_dataset(folder, split), folder, max_bytes)
        source, format = _files_in(folder, found), found
    elif format in STORES:
        source = in_store(source)
    if split is not None:
        raise ValueError("split= applies to Hugging Face datasets only; name the files of one split")
    urls = _expand(source) if format in (None, "jsonl") else expand_urls(source)
    for location in map(Location.of, urls):
        if location.is_stream:
            raise UrlError("an import reads its files more than once; save this as a file first", url=location.name)
    format = format or _format_of(urls)
    if format not in FILES:
        raise UrlError(f"a file; the format {format} requires a folder", url=Location.of(urls[0]).name)
    plan = partial(plan_csv, types=types, key=key) if format == "csv" else FILES[format]
    return plan(urls, _file_names(urls), max_bytes)


def _expand(source: Any) -> list[str]:
    """Return the URLs of an input; the name of a ``.json`` is that of rows, unless it is that of a manifest."""
    each = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(each, list | tuple) or not any(map(_is_rows, each)):
        return expand_urls(source)
    return [url for name in each for url in ([os.path.expanduser(name)] if _is_rows(name) else expand_urls(name))]


def _is_rows(name: Any) -> bool:
    if not isinstance(name, str | os.PathLike):
        return False
    text = os.fspath(name)
    return text.endswith(".json") and not f".{text}".endswith(SUFFIX) and not set(text) & set("*?[{,#@")


def _format_of_folder(folder: str) -> str:
    """Return the format of the files in a folder; the default is ``folder``, a folder for each class."""
    if is_saved_dataset(folder):
        return "huggingface"
    if is_zarr(folder):
        return "zarr"
    if os.path.isfile(os.path.join(folder, INDEX)):
        return "mds"
    kinds = {named_format(each.name) if each.is_file() else None for each in os.scandir(folder) if each.name[0] != "."}
    return kinds.pop() or "folder" if len(kinds) == 1 else "folder"


def _files_in(folder: str, format: str) -> list[str]:
    """Return the files of a *format* in a folder; raise UrlError if there are none."""
    if format in ("zarr", "mds"):
        return [folder]
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    files = [name for name in names if named_format(name) == format]
    if format in STORES:
        files = files or [name for name in names if name.endswith(".gz") and named_format(name) is None]
    if not files:
        raise UrlError(f"a folder without files of {format}; name these files", url=folder)
    return [os.path.join(folder, name) for name in files]


def named_format(name: str) -> str | None:
    """Return the format that the name of a file says, None if it says none.

    >>> named_format("c4-train.00000-of-01024.json.gz"), named_format("a.tfrecord-0-of-2"), named_format("0.gz")
    ('jsonl', 'tfrecord', None)
    """
    return _SUFFIXES.get(FILE_NUMBER.sub("", Location(name.lower()).stem).rpartition(".")[2])


def _format_of(urls: Sequence[str]) -> str:
    """Return the format that the names of files indicate; raise UrlError if it is unknown."""
    location = Location.of(urls[0])
    format = named_format(location.base)
    if format is None:
        known = ", ".join(f".{suffix}" for suffix in _SUFFIXES)
        raise UrlError(
            f"cannot tell the format from the name ({known}); name one of {', '.join(FORMATS)}", url=location.name
        )
    return format


def _file_names(urls: Sequence[str]) -> list[str]:
    """Return a name of each file for keys: its base name, with folders if base names are not unique.

    >>> _file_names(["d/a.parquet", "d/b.parquet"]), _file_names(["d/x/a.csv", "d/y/a.csv"])
    (['a', 'b'], ['x/a', 'y/a'])
    """
    locations = list(map(Location.of, urls))
    stems = [stem_of(location) for location in locations]
    if len(set(stems)) < len(stems):
        folders = [location.folder for location in locations]
        shared = os.path.commonpath(folders)
        stems = [f"{folder[len(shared) :].lstrip('/')}{stem}" for folder, stem in zip(folders, stems)]
    if len(set(stems)) < len(stems):
        stem = max(stems, key=stems.count)
        reason = f"two files would have the keys {stem}/...; import them separately"
        raise UrlError(reason, url=locations[stems.index(stem)].name)
    return stems
