"""Distributed engines: thin sources and sinks of shards; each file is the only importer of its engine.

- ``tasks``: what tasks read, ranges of positions as Arrow tables, and what they write, shards that count once
- ``ray``: ``RaySource``, ``RaySink``, and ``RayExecutor`` for ``map_shards``
- ``spark``: ``SparkSource``, the format "tarshards"
- ``daft``: ``DaftSource``, ``DaftSink``
"""
