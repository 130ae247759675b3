"""Indexes, with the offset of every member of a shard, and the functions that require them.

Read in this order:

- ``sidecar``: ``Index``, the file beside a shard; ``inventory``: which shards have one, and the beginnings of many
- ``members``: the index of a shard, made while it is written
- ``build``, ``refresh``: making and renewing indexes; ``manifests``: datasets as wids JSON
- ``past_damage``: the index of a damaged shard, in memory only
- ``opening_options``: how shards are opened, as one value
- ``header_checks``: a second check of headers that the kernel does not decide on, and members of remote shards in
  memory
- ``open``: ``OpenShard``, a shard with its index, opened and verified once
- ``key_index``: samples by key, in a file beside the manifest or in memory
- ``readahead``: local shards read from a slow disk before their samples are needed
- ``fetch``: blocks of remote shards: which are prefetched, and which blocks of a cache stay mapped
- ``access``: ``SampleSequence``, any sample by its number; ``joined``: fields of parallel shards added
- ``lengths``: the lengths of a field, for packing
- ``mapped_fields``, ``npy_column``: the fields of mapped shards as batches, and as one array
- ``columns``: values of samples in files beside the indexes; ``cells``: tables of CSV, from which columns are made;
  ``where``: conditions on columns
- ``exports``, ``energon``: indexes in the formats of other programs
"""
