"""Other formats to shards, and shards to other formats.

- ``naming``: columns <-> fields, and the record of what was imported; ``arrow``: batches of Arrow <-> samples
- ``msgpack_shards``: Squirrel's shards
- ``pieces``: what an import reads: parquet, CSV, lines of JSON, Hugging Face's datasets, folders
- ``importing``: ``import_dataset``; ``exporting``: ``export_dataset``
- ``croissant``: dataset cards, as JSON-LD of MLCommons' Croissant
"""
