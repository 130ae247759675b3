"""Damaged shards to their whole samples: reading resumes at the next sound header, and every byte is counted.

Read in this order:

- ``walking``: the headers, data and gaps of a damaged file
- ``grouping``: these pieces to samples; ``judging``: which of the samples are whole
- ``survey``: all of it for one shard; ``reading``: its whole samples, and errors for the rest
"""
