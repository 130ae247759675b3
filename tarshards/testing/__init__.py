"""Checks that users run on their own loaders, data and writers, in Python, in pytest and as ``python -m``.

- ``conformance``: the cases of `spec/`, a reader's verdict on each, and the table of them
- ``conformance_worker``: reads each case in a process of its own, by any Python
"""
