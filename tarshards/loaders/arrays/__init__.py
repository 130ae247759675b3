"""Batches as arrays, without processes.

- ``loader``: ``ArrayLoader``; ``batches``: one batch, made from a plan's positions
- ``readers``: how a field becomes an array; ``augment``: flips, erasing, mixing of whole batches
"""
