"""Distributed engines: thin sources and sinks of shards; only the file of an engine imports it.

- ``tasks``: what tasks read and write as Arrow tables: ranges of positions, and samples
- ``ray``: ``RaySource``, ``RaySink``, and ``RayExecutor`` for ``map_shards``
- ``spark``: ``SparkSource``, the format "tarshards"
- ``daft``: ``DaftSource``, ``DaftSink``
"""
