from collections.abc import Callable
from typing import Any

from tarshards.index._headers_py import MappedMembers as MappedMembers
from tarshards.index._headers_py import MemberTable as MemberTable
from tarshards.index._headers_py import find_keys as find_keys
from tarshards.index._headers_py import find_undecided as find_undecided
from tarshards.index._headers_py import layout as layout
from tarshards.index._headers_py import read_samples as read_samples

def locate(
    tables: list[MappedMembers | None],
    rank: Callable[[tuple[bytes, ...]], bytes],
    shards: Any,
    samples: Any,
    order: Any,
    addresses: Any,
    sizes: Any,
    members: Any,
    /,
) -> bool:
    """Write address, size and member of the best field of each term of many samples.

    Sample ``samples[i]`` is one of ``tables[shards[i]]``. All arrays are of 8 bytes an item, those that are written
    have a row for each term. *rank* returns for the names of a shard's fields an int16 for each term and field: 0 for
    the best, -1 for those that are not of the term. Instead of a member -1 says that the sample has none, and lower
    numbers what else there is (see ``tarshards.index.mapped_fields``).

    Samples are looked up in *order*, that of their numbers here, and in it their headers are compared, as long as no
    disk is waited for. Returns whether any header is yet to be compared.
    """
