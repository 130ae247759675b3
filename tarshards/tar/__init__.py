"""Bytes to members and back: the tar format.

- ``read``: ``read_members``, the headers of members to write, limits
- ``elsewhere``: the contents of links and sparse members
- ``_tar.c``: the parser, and the grouping of members by key, in C; ``_tar_py``: the same in Python
"""
