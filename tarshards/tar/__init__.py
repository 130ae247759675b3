"""Bytes to members and back: the tar format.

- ``read``: ``read_members``, the headers of members to write, limits
- ``elsewhere``: the contents of links and sparse members

The parser, and the grouping of members by key, are the kernel ``tar`` of ``tarshards.kernels``.
"""
