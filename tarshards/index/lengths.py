"""The lengths of a field in all samples, from indexes and headers or from a column, without reading the samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tarshards.errors import DecodeError
from tarshards.index import memory
from tarshards.index.access import SampleReader, SampleSequence
from tarshards.index.columns import load_columns
from tarshards.index.memory import Buffers, Payloads
from tarshards.index.npy_column import members_of
from tarshards.index.open import OpenShard
from tarshards.samples.codecs.npy import parse_header, rows_in_header
from tarshards.storage.streams import failure

HEAD = 128  # bytes of the header that numpy writes before an array with few axes


def lengths_of(shards: SampleReader, name: str) -> NDArray[np.int64]:
    """Return the length of each sample of *shards*, by the column or the field of that *name*.

    A column holds the lengths themselves. The length of a ``.npy`` field is its number of rows, of any other field its
    number of bytes. In local shards each ``.npy`` header is read; in remote ones, all arrays are assumed to have the
    dtype and the other dimensions of the first. Raises SampleError for a sample without the field, and DecodeError,
    which names it, for a field that is not an array.
    """
    return np.concatenate([_lengths(each, name) for each in shards.sequences])


def _lengths(samples: SampleSequence, name: str) -> NDArray[np.int64]:
    if (table := load_columns(samples, [name])) is not None:
        lengths: NDArray[np.int64] = table.column(name).to_numpy()
        return lengths
    is_array = name.rpartition(".")[2].lower() == "npy"
    found = [np.zeros(0, np.int64)]
    for number in range(len(samples.urls)):
        shard, members = members_of(samples.shards, number, name)
        order = np.argsort(shard.index.sample[members], kind="stable")
        members = members[order]
        found.append(_rows(shard, members) if is_array and len(members) else shard.index.size[members].astype(np.int64))
    return np.concatenate(found)


def _rows(shard: OpenShard, members: np.ndarray) -> NDArray[np.int64]:
    """Return the rows of the arrays that are *members* of a shard."""
    offsets, sizes = (array[members].astype(np.int64) for array in (shard.index.offset, shard.index.size))
    if shard.buffer is None:
        header = parse_header(shard.take(int(members[0])))
        row = header.dtype.itemsize * int(np.prod(header.shape[1:], dtype=np.int64))
        rows: NDArray[np.int64] = (sizes - len(header.prefix)) // row
        return rows
    heads = np.empty((len(members), HEAD), np.uint8)
    buffers = Buffers([shard.buffer])
    try:
        memory.gather(heads, Payloads(buffers, 0 * offsets, offsets, np.full(len(offsets), HEAD)).addresses, b"")
    except OSError as error:
        raise failure(error, shard.name) from error
    kinds, which = np.unique(heads.view(f"V{HEAD}").ravel(), return_inverse=True)
    extents = []
    for kind, first in zip(kinds, np.unique(which, return_index=True)[1].tolist()):
        try:
            extents.append(_rows_in(bytes(kind), shard, int(members[first])))
        except DecodeError as error:
            key = shard.index.key(int(shard.index.sample[members[first]]))
            raise DecodeError(error.reason, url=shard.name, key=key) from error.__cause__
    return np.array(extents, np.int64)[which]


def _rows_in(head: bytes, shard: OpenShard, member: int) -> int:
    try:
        return rows_in_header(head)
    except DecodeError:  # a longer header
        return rows_in_header(shard.take(member))
