"""Distributed engines: thin sources and sinks of shards; only the file of an engine imports it.

- ``tasks``: what tasks read (ranges of positions, as Arrow tables) and what they write (shards, counted once)
- ``ray``: ``RaySource``, ``RaySink``, and ``RayExecutor`` for ``map_shards``
- ``spark``: ``SparkSource``, the format "tarshards"
- ``daft``: ``DaftSource``, ``DaftSink``
"""
