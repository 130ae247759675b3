"""Shards for torch: ``dataset`` is the IterableDataset, ``loader`` the batches of a plan made by worker processes."""

from tarshards.samples.codecs.registry import require

require("torch", extra="torch")  # before dataset and loader import it
