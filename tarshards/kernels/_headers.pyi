from collections.abc import Callable
from typing import Any

from tarshards.kernels._headers_py import MappedMembers as MappedMembers
from tarshards.kernels._headers_py import MemberTable as MemberTable
from tarshards.kernels._headers_py import find_keys as find_keys
from tarshards.kernels._headers_py import find_undecided as find_undecided
from tarshards.kernels._headers_py import layout as layout
from tarshards.kernels._headers_py import read_samples as read_samples

def locate(
    tables: list[MappedMembers | None],
    rank: Callable[[tuple[bytes, ...]], bytes],
    shards: Any,
    samples: Any,
    order: Any,
    addresses: Any,
    sizes: Any,
    members: Any,
    ends: Any,
    /,
) -> bool:
    """Write the address, size and member of the best field of each term, for many samples.

    Sample ``samples[i]`` is one of ``tables[shards[i]]``. The items of all arrays have 8 bytes; *addresses*, *sizes*
    and *members* are written, and have a row for each term. *rank* takes the names of a shard's fields and returns
    int16 of shape (terms, fields): 0 for the best alternative of a term, -1 for a field that is none. The member is -1
    if the sample has no field of the term; ``tarshards.index.mapped_fields`` lists lower numbers. *ends*, an item for
    each table, are the offsets in the shards where the last of their located members end.

    Samples are looked up, and then their headers compared, in *order*, a permutation of the indices of *samples*, until
    a disk has to be waited for. Returns whether any header remains to be compared, or does not match plainly.
    """

def fetch(
    tables: list[MappedMembers | None], shards: Any, members: Any, sizes: Any, addresses: Any, arena: Any, /
) -> bool:
    """Read located members of shards that are read by calls into *arena*, and compare their headers.

    The arrays are those of ``locate``; *addresses* are changed to where the members are. Returns whether some stay
    where they are mapped: their headers remain to be compared, or their shard has shrunk.
    """

def find_shrunk(tables: list[MappedMembers | None], shards: Any, ends: Any, /) -> list[int]:
    """Return those of *shards*, numbers of tables, that no longer reach to their *ends*; both arrays are int64.

    Copies of members that were made before may be wrong then.
    """
