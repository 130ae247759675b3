"""URLs to bytes: what a shard expression names, and how its bytes are read and written.

Read in this order:

- ``expressions``: shard expressions (braces, globs, lists, manifests) to URLs
- ``opening``: a URL to a stream; ``streams`` is what every opener returns
- ``local``, ``stdio``, ``http``, ``pipe``, ``fsspec_``: one family of schemes each
- ``compression``: gzip, bzip2, xz and zstd by their first bytes
- ``ranges``: bytes at known offsets; local files are mapped
- ``manifest``: wids JSON; ``markers``: records of what was made
"""
