"""Samples to shards.

- ``shards``: ``TarWriter`` and ``ShardWriter``; ``split``: samples routed to many shards
- ``dataset``: any dataset, encoded in parallel
- ``once``: many outputs in parallel, each made once, also over runs that were killed
- ``map``: a function applied to many shards; ``reshard``: a dataset shuffled into new shards
"""
