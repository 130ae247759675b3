"""Samples to samples: sources, ops, and the ``Stream`` that chains them.

- ``shard_options``: the keywords of ``Stream.from_shards`` and ``ShardDataset``, as one value
- ``other_names``: names of other libraries, for error messages
- ``sources``: sources of samples, planned or read shard by shard
- ``op``: the traits of an op; ``ops``: one short generator per op; ``collate``: samples to a batch
- ``randomness``: a random generator for each sample
- ``following``: the outcome of samples in a chain of ops, for the ledger
- ``sample_ops``: the ops of single samples as methods, of ``Stream`` and ``IndexedShards``
- ``stream``: ``Stream``, the chain; ``interleave``: several streams in the order of given choices; ``mixed``: in
  proportion, planned or streamed
- ``indexed_shards``: ``IndexedShards``, samples by number, after such ops
- ``dask``: samples mapped on a cluster
"""
