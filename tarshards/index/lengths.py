"""The lengths of a field in all samples, from indexes and headers or from a column, without reading the samples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import DecodeError, SampleError
from tarshards.index.access import SampleReader, SampleSequence
from tarshards.index.columns import MEASURES, load_columns
from tarshards.index.open import OpenShard, OpenShards
from tarshards.samples.codecs.npy import HEAD, UsualHeaders, is_npy, parse_header, rows_in_header
from tarshards.samples.fields import find_field, no_field, value_path
from tarshards.samples.payloads import Payloads
from tarshards.storage.streams import failure


def lengths_of(shards: SampleReader, name: str, unit: Callable[[str], int] = lambda field: 1) -> NDArray[Any]:
    """Return the length of each sample of *shards*, by the column or the field of that *name*, or of alternatives.

    A column, named as for conditions, holds the lengths themselves, unless it has other values than numbers and there
    is a field of that name. The length of a ``.npy`` field is its number of rows, of any other field the number of its
    elements, which have ``unit(field)`` bytes. In local shards each ``.npy`` header is read; in remote ones, all arrays
    are assumed to have the dtype and the other dimensions of the first. Raises SampleError for a sample without the
    field, and for a column without a number for each sample, and DecodeError, which names the sample, for a field that
    is not an array.
    """
    return np.concatenate([_lengths(each, name, unit) for each in shards.sequences])


def _lengths(samples: SampleSequence, name: str, unit: Callable[[str], int]) -> NDArray[Any]:
    if (table := load_columns(samples, [name])) is not None:
        column = table.column(name)
        is_number = column.to_numpy().dtype.kind in "iuf"
        if is_number or find_field(samples.shards.index(0).fields, name.split(";")) is None:
            return _in_column(samples, name, column)
    found = [np.zeros(0, np.int64)]
    for number in range(len(samples.urls)):
        shard, members = _members_of(samples.shards, number, name.split(";"), _column_hint(name))
        lengths = np.empty(len(members), np.int64)
        for i in np.unique(shard.index.field[members]).tolist():
            field, here = shard.index.fields[i], np.flatnonzero(shard.index.field[members] == i)
            if is_npy(field):
                lengths[here] = _rows(shard, members[here])
            else:
                lengths[here] = shard.index.size[members[here]].astype(np.int64) // unit(field)
        found.append(lengths)
    return np.concatenate(found)


def _members_of(shards: OpenShards, number: int, fields: list[str], hint: str) -> tuple[OpenShard, np.ndarray]:
    """Return a shard, and the member of each of its samples that is of the first of *fields* that the sample has.

    Raises SampleError, which ends in *hint*, for a sample that has none of them.
    """
    shard = shards.open(number)
    index = shard.index
    members = index.members_of(fields[0])
    for field in fields[1:]:
        others = index.members_of(field)
        members = np.concatenate([members, others[~np.isin(index.sample[others], index.sample[members])]])
    members = members[np.argsort(index.sample[members], kind="stable")]
    if elsewhere := index.elsewhere and index.elsewhere.keys() & set(members.tolist()):
        raise index.not_plain(min(elsewhere), shard.name)
    if len(members) < len(index):
        missing = int(np.setdiff1d(np.arange(len(index)), index.sample[members])[0])
        if missing in index.faults:
            raise index.fault(missing, shard.name)
        reason = no_field(fields, index.fields_of(missing)) + hint
        raise SampleError(reason, url=shard.name, key=index.key(missing))
    return shard, members


def _in_column(samples: SampleSequence, name: str, column: Any) -> NDArray[Any]:
    """Return the numbers in a column; raise SampleError for a column of another type, and for a null."""
    values: NDArray[Any] = column.to_numpy()
    reason, faulty = f"column {name} is no length: it has ", 0
    if column.null_count:
        faulty = int(column.is_null().index(True).as_py())
        reason += "no value for this sample"
    elif values.dtype.kind not in "iuf":
        reason += f"values of the type {column.type}"
    elif not np.isfinite(values).all():
        faulty = int(np.flatnonzero(~np.isfinite(values))[0])
        reason += f"{values[faulty]} for this sample"
    else:
        return values
    number, sample = map(int, samples.shards.in_shards(faulty))
    raise SampleError(reason, url=samples.shards.names[number], key=samples.shards.index(number).key(sample))


def _column_hint(name: str) -> str:
    """Return what makes the column that *name* seems to be of, "" if it is the name of a field.

    >>> _column_hint("json.a"), _column_hint("txt")
    ("; a column is created by `tarindex --columns 'json.a'`", '')
    """
    expression = f"{name}:FIELD" if name in MEASURES else name
    is_column = ":" in expression or any(value_path(each)[1] for each in name.split(";"))
    return f"; a column is created by `tarindex --columns '{expression}'`" if is_column else ""


def _rows(shard: OpenShard, members: np.ndarray) -> NDArray[np.int64]:
    """Return the rows of the arrays that are *members* of a shard."""
    offsets, sizes = (array[members].astype(np.int64) for array in (shard.index.offset, shard.index.size))
    if shard.buffer is None:
        header = parse_header(shard.take(int(members[0])))
        row = header.dtype.itemsize * int(np.prod(header.shape[1:], dtype=np.int64))
        rows: NDArray[np.int64] = (sizes - len(header.prefix)) // row
        return rows
    try:
        heads = Payloads.within(shard.buffer, offsets, sizes).beginnings(HEAD)
    except OSError as error:
        raise failure(error, shard.name) from error
    shard.ranges.check(int((offsets + np.minimum(sizes, HEAD)).max()))
    usual = UsualHeaders.like(heads[0])
    counts = map(usual.rows, heads, sizes.tolist()) if usual else repeat(None)
    found = zip(counts, heads, members.tolist())
    return np.array([_rows_in(head, shard, member) if rows is None else rows for rows, head, member in found], np.int64)


def _rows_in(head: bytes, shard: OpenShard, member: int) -> int:
    try:
        return rows_in_header(head)
    except DecodeError:
        pass
    try:
        return rows_in_header(shard.take(member))  # with a longer header
    except DecodeError as error:
        key = shard.index.key(int(shard.index.sample[member]))
        raise DecodeError(error.reason, url=shard.name, key=key) from error.__cause__
