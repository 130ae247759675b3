"""Shards -> their faults and contents.

- ``check``: one shard after another, and the dataset that they form; ``report``: the findings and counts
- ``header_scan``: the fast path, one scan of the headers of a plain shard; ``inspection``: sample by sample, for any
  shard
- ``duplicates``: duplicate keys, among more keys than fit into memory
"""

from tarshards.verbs.check.check import check_shards
from tarshards.verbs.check.report import SHOWN, Finding, Report

__all__ = ["SHOWN", "Finding", "Report", "check_shards"]
