"""Shards for torch: ``dataset`` is the IterableDataset, ``loader`` the batches of a plan made by worker processes."""
