"""Shards for torch.

- ``shard_dataset``: the IterableDatasets
- ``shard_loader``: the batches of a plan, made by worker processes
- ``handover``: passing these batches from the workers through shared memory
"""

from tarshards.samples.codecs.registry import require

require("torch", extra="torch")  # before dataset and loader import it
