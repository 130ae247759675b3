"""Samples to batches for training; the only importers of torch and DALI.

- ``batches``: ``BatchMaker``, a single batch; ``passes``: the parts common to all loaders: passes, states, resuming
- ``torch``: ``ShardDataset`` and ``ShardLoader``; ``torch_iterable``, any stream as an IterableDataset
- ``arrays``: ``ArrayLoader``, its readers and augmentations
- ``dali``: pipelines of NVIDIA DALI
- ``tensors``: arrays to torch; ``monitor``: where the time is spent
"""
