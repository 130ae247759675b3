"""URLs to bytes: expand shard expressions, and read and write what they name.

Read in this order:

- ``location``: a URL or path, parsed once; it knows its printable name and opens itself
- ``remote``: the options for reading remote files, as one value
- ``redaction``: URLs without credentials, for that name and for messages
- ``expressions``: shard expressions (braces, globs, lists, manifests) to URLs
- ``opening``: the public ``open_url`` and ``open_shard``, and any shard as a local file; ``streams``: the streams that
  they return, and ranges of open files that the system copies
- ``wire``: work that waits for sockets, in steps which one thread makes for all of it
- ``servers``, ``connections``, ``requests``, ``transfer``: what is idle and under way at a server; connections that are
  kept alive; requests with their redirects and retries; bodies that are resumed at the exact byte. ``traffic`` counts
  requests and bytes, and ``tuning`` has the constants of all four
- ``ahead``: the queue of requests made before their bytes are needed, and the reader of files from beginning to end
- ``local``, ``stdio``, ``http``, ``pipe``, ``fsspec_``: one family of schemes each; ``webdav``: the folders of web
  servers; ``bash_line``: names filled into a line of bash
- ``compression``: one table of compressions, read by their first bytes and written by their suffixes
- ``ranges``: bytes in any order; local files are mapped
- ``cache``: blocks of remote files on a local disk, shared by the processes of the host; ``shared``: bytes in memory,
  shared with the processes that are forked later
- ``manifest``: wids JSON, and its name; ``derived``: files that are derived from a shard and removed when
  it is replaced
- ``locks``: file locks; ``claims``: names that one writer at a time may write; ``markers``: records of complete
  outputs; ``code_digest``: digests of the functions that made them
"""
