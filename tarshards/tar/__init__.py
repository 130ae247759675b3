"""Bytes to members and back: the tar format, and nothing of samples.

- ``read``: ``read_members``, headers of members that are written, limits
- ``_tar.c``: the native parser; ``_tar_py``: its twin in Python, which gives the same results
"""
