"""Shards -> their faults and contents.

- ``check``: checks shard after shard, and the dataset that they form; ``report``: the findings and counts
- ``header_scan``: the fast path, which scans the headers of a plain shard; ``inspection``: inspects any shard, sample
  by sample
- ``duplicates``: finds duplicate keys among more keys than fit into memory
"""

from tarshards.verbs.check.check import check_shards
from tarshards.verbs.check.report import SHOWN, Finding, Report

__all__ = ["SHOWN", "Finding", "Report", "check_shards"]
