"""Damaged shards to their whole samples: reading resumes at the next valid header, and every byte is counted.

Read in this order:

- ``walking``: the headers, data and gaps of a damaged file, and the samples that these form
- ``judging``: which of the samples are whole
- ``reading``: everything for one shard: a report on every byte, the whole samples, and errors for the rest
"""
