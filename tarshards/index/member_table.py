"""The members of shards in their mapped sidecars; the kernel is in C, or its twin in Python."""

try:
    from tarshards.index._headers import (
        MappedMembers,
        MemberTable,
        find_keys,
        find_shrunk,
        find_undecided,
        layout,
        locate,
        read_samples,
    )

    IS_COMPILED = True
except ImportError:
    from tarshards.index._headers_py import (
        MappedMembers,
        MemberTable,
        find_keys,
        find_undecided,
        layout,
        read_samples,
    )

    locate = find_shrunk = None  # type: ignore[assignment]
    IS_COMPILED = False

__all__ = [
    "IS_COMPILED",
    "MappedMembers",
    "MemberTable",
    "find_keys",
    "find_shrunk",
    "find_undecided",
    "layout",
    "locate",
    "read_samples",
]
