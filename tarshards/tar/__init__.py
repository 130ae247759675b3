"""Bytes to members and back: the tar format.

- ``read``: ``read_members``, the headers of members to write, limits
- ``_tar.c``: the parser, and the grouping of members by key, in C; ``_tar_py``: the same in Python
"""
