"""Samples to shards.

- ``shards``: ``TarWriter`` and ``ShardWriter``; ``split``: samples routed to many shards
- ``dataset``: any dataset, encoded in parallel
- ``once``: many outputs in parallel, each made once, even across killed runs
- ``map``: a function applied to many shards; ``reshard``: a dataset shuffled into new shards
"""
