"""Samples to shards.

- ``shards``: ``TarWriter`` and ``ShardWriter``; ``split``: samples routed to many shards
- ``dataset``: a whole dataset, encoded in parallel
- ``map``: a function over many shards; ``reshard``: the same samples in other shards
"""
