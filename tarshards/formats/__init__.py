"""Other formats to shards, and shards to other formats.

- ``naming``: columns <-> fields, and the record of the import; ``arrow``: batches of Arrow <-> samples
- ``msgpack_shards``: Squirrel's shards
- ``pieces``: the parts of an input: parquet, CSV, JSON lines, Hugging Face datasets, folders; ``tfrecord``; ``mds``;
  ``zarr_``
- ``inputs``: the table of formats; ``row_stream``: ``read_rows``
- ``importing``: ``import_dataset``; ``exporting``: ``export_dataset``
- ``croissant``: dataset cards, as JSON-LD of MLCommons' Croissant
- ``catalog``: names, versions and splits of datasets
"""
