"""Samples to shards.

- ``shards``: ``TarWriter`` and ``ShardWriter``; ``split``: routes samples to many shards
- ``dataset``: writes any dataset, encoded in parallel
- ``once``: makes many outputs in parallel, each once, even if a run is killed and repeated
- ``map``: applies a function to many shards; ``reshard``: shuffles a dataset into new shards
- ``shard_output``: shards that many tasks write, on several hosts
"""
