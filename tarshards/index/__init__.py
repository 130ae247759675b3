"""Where every member of a shard lies: indexes, and what they make possible.

Read in this order:

- ``sidecar``: the file beside a shard; ``members``: places noted while a shard is written
- ``build``, ``refresh``: indexes made and renewed; ``manifests``: datasets as wids JSON
- ``options``: how shards are opened, as one value
- ``access``: ``IndexedShards``, any sample by its number; ``join``: columns from several shards
- ``places``, ``column``, ``memory``: fields gathered straight from mapped shards; ``_rows.c`` and ``_pixels.c`` do it
- ``exports``, ``energon``: indexes as other programs read them
"""
