"""Zarr groups, read with the package zarr; https://zarr-specs.readthedocs.io describes the format.

A group contains arrays of equal length, the columns, with rows along the first axis; or, as Squirrel writes it, one
group per sample with its arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tarshards.errors import OpenError, SampleError
from tarshards.formats.pieces import PART, Plan, RecordPiece, fail_rows, file_identity
from tarshards.samples.codecs.registry import require
from tarshards.samples.ledger import Ledger
from tarshards.storage.location import Location

HEADS = ("zarr.json", ".zgroup")  # a folder with one of these files is a group


@dataclass(frozen=True)
class ZarrPiece(RecordPiece):
    """The rows *begin* to *end* of a group, read *step* at a time.

    *names* are the inner groups, each a row; if there are none, the rows are in the arrays.
    """

    begin: int
    end: int
    step: int
    names: tuple[str, ...]
    unit = "row"

    @property
    def identity(self) -> list[Any]:
        return [*self.version, self.begin, self.end, self.file]

    def records(self, ledger: Ledger) -> Iterator[tuple[int, Mapping[str, Any]]]:
        root = _open(self.url)
        for begin in range(self.begin, self.end, self.step):
            rows = range(begin, min(begin + self.step, self.end))
            try:
                found = [_sample(root[self.names[row]]) for row in rows] if self.names else _rows(root, rows)
            except Exception as error:  # a codec may raise any error
                reason = f"rows {begin} to {rows[-1]} cannot be read: {type(error).__name__}: {error}"
                fail_rows(ledger, SampleError(reason, url=self.origin(begin)), len(rows))
                continue
            yield from zip(rows, found)


def plan_zarr(urls: list[str], names: list[str], max_bytes: int | None) -> Plan:
    """Cut groups into pieces of about *max_bytes*, between chunks; raise SampleError for arrays of unequal length."""
    pieces: list[ZarrPiece] = []
    for url, file in zip(urls, names):
        root, location = _open(url), Location.of(url)
        version = [location.identity] if location.path is None else file_identity(url)
        arrays = dict(root.arrays())
        if not arrays:
            groups = tuple(sorted(root.group_keys()))
            row_size = sum(array.nbytes for array in dict(root[groups[0]].arrays()).values()) if groups else 0
            total, step = len(groups), 1
        else:
            lengths = {array.shape[:1] for array in arrays.values()}
            if len(lengths) > 1 or () in lengths:
                raise SampleError("its arrays have different lengths", url=location.name)
            ((total,),) = lengths
            groups, step = (), max(array.chunks[0] for array in arrays.values())
            row_size = sum(array.nbytes for array in arrays.values()) // max(1, total)
        rows = max(1, (max_bytes or PART) // max(1, row_size) // step) * step
        cuts = [*range(0, total, rows), total]
        pieces += [ZarrPiece(url, file, version, *cut, step, groups) for cut in pairwise(cuts)]
    return Plan(pieces)


def is_zarr(folder: str) -> bool:
    """Return whether a local folder is a group of Zarr."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in HEADS)


def _open(url: str) -> Any:
    """Open a group; raise OpenError for anything else."""
    location = Location.of(url)
    zarr = require("zarr", extra="zarr")
    try:
        return zarr.open_group(location.url if location.path is None else str(location.path), mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise OpenError(f"not a group of Zarr: {error}", url=location.name) from error


def _sample(group: Any) -> dict[str, Any]:
    """Return the sample in a group: its arrays and attributes; the key is the name of the group."""
    arrays = {name: _value(array[...]) for name, array in group.arrays()}
    return {"__key__": group.basename, **dict(group.attrs), **arrays}


def _rows(root: Any, rows: range) -> list[dict[str, Any]]:
    """Return the rows in the arrays of a group; each array is read in one call."""
    blocks = {name: array[rows.start : rows.stop] for name, array in root.arrays()}
    return [{name: _value(block[row]) for name, block in blocks.items()} for row in range(len(rows))]


def _value(value: Any) -> Any:
    """Return an array unchanged, or the number or text in an array without dimensions."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
