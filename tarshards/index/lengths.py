"""The lengths of a field in all samples, from indexes and headers or from a column, without reading the samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import DecodeError
from tarshards.index.access import SampleReader, SampleSequence
from tarshards.index.columns import load_columns
from tarshards.index.memory import Buffers, Payloads
from tarshards.index.npy_column import members_of
from tarshards.index.open import OpenShard
from tarshards.samples.codecs.npy import HEAD, is_npy, parse_header, rows_in_header
from tarshards.storage.streams import failure


def lengths_of(shards: SampleReader, name: str, unit: int = 1) -> NDArray[np.int64]:
    """Return the length of each sample of *shards*, by the column or the field of that *name*.

    A column holds the lengths themselves. The length of a ``.npy`` field is its number of rows, of any other field the
    number of its elements, which have *unit* bytes. In local shards each ``.npy`` header is read; in remote ones, all
    arrays are assumed to have the dtype and the other dimensions of the first. Raises SampleError for a sample without
    the field, and DecodeError, which names it, for a field that is not an array.
    """
    return np.concatenate([_lengths(each, name, unit) for each in shards.sequences])


def _lengths(samples: SampleSequence, name: str, unit: int) -> NDArray[np.int64]:
    if (table := load_columns(samples, [name])) is not None:
        lengths: NDArray[np.int64] = table.column(name).to_numpy()
        return lengths
    found = [np.zeros(0, np.int64)]
    for number in range(len(samples.urls)):
        shard, members = members_of(samples.shards, number, name)
        order = np.argsort(shard.index.sample[members], kind="stable")
        members = members[order]
        if is_npy(name):
            found.append(_rows(shard, members) if len(members) else found[0])
        else:
            found.append(shard.index.size[members].astype(np.int64) // unit)
    return np.concatenate(found)


def _rows(shard: OpenShard, members: np.ndarray) -> NDArray[np.int64]:
    """Return the rows of the arrays that are *members* of a shard."""
    offsets, sizes = (array[members].astype(np.int64) for array in (shard.index.offset, shard.index.size))
    if shard.buffer is None:
        header = parse_header(shard.take(int(members[0])))
        row = header.dtype.itemsize * int(np.prod(header.shape[1:], dtype=np.int64))
        rows: NDArray[np.int64] = (sizes - len(header.prefix)) // row
        return rows
    try:
        heads = Payloads(Buffers([shard.buffer]), 0 * offsets, offsets, sizes).beginnings(HEAD)
    except OSError as error:
        raise failure(error, shard.name) from error
    shard.ranges.check(int((offsets + np.minimum(sizes, HEAD)).max()))
    return np.array([_rows_in(head, shard, member) for head, member in zip(heads, members.tolist())], np.int64)


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
