"""Batches as arrays, without processes.

- ``array_loader``: ``ArrayLoader``; ``assembly``: how a batch of arrays is assembled from its samples
- ``after_ops``: such batches from the samples that ops yield, for the workers of a ``ShardLoader``
- ``readers``: how a field becomes an array
- ``augment``: flips, erasing, mixing of whole batches; ``seeded``: modules of torch in several threads
"""
