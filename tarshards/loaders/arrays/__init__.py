"""Batches as arrays, without processes.

- ``loader``: ``ArrayLoader``; ``assembly``: how a batch of arrays is assembled from its samples
- ``after_ops``: such batches of what comes out of ops, for the workers of a ``ShardLoader``
- ``readers``: how a field becomes an array; ``augment``: flips, erasing, mixing of whole batches
"""
