"""Damaged shards to their whole samples: reading goes on at the next sound header, and every byte is accounted for.

- ``walking``: headers, data and gaps of a damaged file
- ``grouping``: pieces to samples; ``judging``: which samples are whole
- ``survey``: a whole shard at once; ``reading``: samples and what the ledger says of the rest
"""
