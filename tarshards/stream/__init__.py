"""Samples to samples: sources, ops, and the ``Stream`` that chains them.

- ``shard_options``: the keywords of ``Stream.from_shards`` and ``ShardDataset``, as one value
- ``other_names``: names that other libraries use, for error messages
- ``sources``: sources of samples, planned or read shard by shard
- ``op``: the traits of an op; ``ops``: one short generator per op; ``collate``: samples to a batch
- ``replaying``: resuming where nothing numbers the samples
- ``randomness``: a random generator for each sample
- ``following``: counts what happens to samples in a chain of ops, for the ledger
- ``sample_ops``: the ops of single samples, as methods of ``Stream`` and ``IndexedShards``
- ``stream``: ``Stream``, the chain
- ``interleave``: merges streams in a given order; ``mixed``: mixes datasets in proportion, planned or streamed
- ``indexed_shards``: ``IndexedShards``, samples by number, with the ops of single samples
- ``dask``: maps samples on a Dask cluster
"""
