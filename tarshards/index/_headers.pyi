from typing import Any

from tarshards.index._headers_py import MappedMembers as MappedMembers
from tarshards.index._headers_py import MemberTable as MemberTable
from tarshards.index._headers_py import find_keys as find_keys
from tarshards.index._headers_py import find_undecided as find_undecided
from tarshards.index._headers_py import layout as layout
from tarshards.index._headers_py import read_samples as read_samples

def locate(
    tables: list[MappedMembers | None],
    ranks: list[bytes | None],
    shards: Any,
    samples: Any,
    addresses: Any,
    sizes: Any,
    members: Any,
    /,
) -> None:
    """Write address, size and member of the best field of each term of many samples; -1 for none, -2 for no index.

    *ranks* has for each shard an int16 for each term and field: 0 for the best, -1 for those that are not of the term.
    Sample ``samples[i]`` is one of ``tables[shards[i]]``. All arrays are of 8 bytes an item, those that are written
    have a row for each term.
    """
